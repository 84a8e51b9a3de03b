"""Pipelines over machines: started in any order with the flags users know, they answer; wrong starts say which step."""

from __future__ import annotations

import re
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest

from stageline.links.key_file import read_key
from stageline.links.keys import ClusterKey, LinkSecurity
from stageline.links.sockets import Links
from tests.cluster.conftest import write_key
from tests.cluster.machines import PORT, Machines, Node, machines
from tests.cluster.network import Network
from tests.hostile_frames import Enemy
from tests.server.served import DEADLINE_S
from tests.tiny_models import TinyModel

pytestmark = pytest.mark.timeout(240)

WRONG_START_S = 20.0
QUICKLY = ["--heartbeat-timeout-s", "3"]


class Cluster:
    """Three machines that serve: the head, one with the head's own flags, and one that joined."""

    def __init__(self, several: Machines) -> None:
        self.several = several
        shared = ["--nnodes", "3", "--stages", "1", *QUICKLY]
        small = ["--dtype", "float32", "--device", "cpu", "--no-bind-cores"]
        with_rank = ["serve", several.model, *several.flags(3, *shared), *small, "--node-rank", "1", "--headless"]
        # The head last: each waits for the others.
        self.nodes = {1: several.node(1, *with_rank), 2: several.join(2)}
        self.head = several.serve(3, *shared, "--node-rank", "0")
        self.head.wait_until_ready()

    def chat(self) -> str:
        """What OpenAI's client gets for a fixed prompt."""
        with self.several.network.inside(0):
            url = f"http://127.0.0.1:{self.head.port}/v1"
            with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=DEADLINE_S) as client:
                answer = client.chat.completions.create(
                    model=self.several.model,
                    messages=[{"role": "user", "content": "Hello"}],
                    max_tokens=8,
                    temperature=0,
                    extra_body={"ignore_eos": True},
                )
        return answer.choices[0].message.content or ""

    def lose(self, machine: int, how: str) -> None:
        """Killed, as if switched off; stopped, as if it stood still; unplugged; parted from others that are."""
        if how == "parted":
            self.several.network.part([machine])
        elif how == "unplugged":
            self.several.network.pull_out(machine)
        else:
            self.nodes[machine].hurt(signal.SIGKILL if how == "killed" else signal.SIGSTOP)

    def bring_back(self, machine: int, how: str) -> None:
        if how == "parted":
            self.several.network.part([machine], False)
        elif how == "unplugged":
            self.several.network.plug_in(machine)
        elif how == "stopped":
            self.nodes[machine].hurt(signal.SIGCONT)
        else:
            self.nodes[machine] = self.several.join(machine)


@pytest.fixture(scope="module")
def cluster(network: Network, tiny_model: str, key_file: Path) -> Iterator[Cluster]:
    with machines(network, tiny_model, key_file) as several:
        made = Cluster(several)
        try:
            yield made
        except BaseException:
            print(made.head.log)
            raise


def _fails(node: Node, step: str) -> str:
    """The one line that a wrong start ends with, in time."""
    began_s = time.monotonic()
    status = node.finish()
    assert status == 2, node.log
    assert time.monotonic() - began_s < WRONG_START_S
    last = node.lines[-1]
    assert last.startswith(f"stageline: error: joining failed at the step `{step}`: "), node.log
    return last


def test_three_machines_answer_as_one_does(cluster: Cluster, tiny_model: str) -> None:
    answer = cluster.chat()
    from stageline import LLM, SamplingParams

    settings = {"dtype": "float32", "device": "cpu", "kv_cache_memory": "8MiB"}
    with LLM(tiny_model, distributed_executor_backend="in_process", **settings) as alone:
        messages = [{"role": "user", "content": "Hello"}]
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        assert alone.chat(messages, params)[0].outputs[0].text == answer
    assert len(cluster.nodes[1].stage_pids()) == len(cluster.nodes[2].stage_pids()) == 1
    assert re.search(r"type on each of them:\s+stageline join 10\.77\.0\.1:29500 --cluster-key-file", cluster.head.log)


def test_a_node_that_does_not_fit_is_refused_on_both_sides_and_nobody_else_notices(
    cluster: Cluster, tmp_path: Path
) -> None:
    several = cluster.several
    other_key = write_key(tmp_path / "key")
    flags = ["--dtype", "float32", "--device", "cpu", "--nnodes", "3", "--headless", *QUICKLY]
    settings = ["serve", several.model, *several.flags(3, "--block-size", "32"), *flags, "--node-rank", "1"]
    wrong = {
        "key": several.join(1, key_file=other_key),
        "settings": several.node(1, *settings),
        "rank": several.join(1, "--node-rank", "2"),
        "no such rank": several.join(1, "--node-rank", "7"),
    }
    assert "key" in _fails(wrong["key"], "key")
    assert "--block-size is 32 on the node and 16 on the head" in _fails(wrong["settings"], "settings")
    assert "--node-rank 2 is taken by node 2" in _fails(wrong["rank"], "rank")
    assert "--node-rank is 7 on the node, and the head has --nnodes 3" in _fails(wrong["no such rank"], "rank")
    for step in ("settings", "rank"):
        assert f"was refused at the step `{step}`" in cluster.head.log
    assert "refused 10.77.0.2" in cluster.head.log
    assert several.get(cluster.head, "/health")[0] == 200


def test_who_has_no_key_or_talks_nonsense_with_it_disturbs_nobody(cluster: Cluster) -> None:
    network, seen, answer = cluster.several.network, len(cluster.head.lines), cluster.chat()
    head, neighbour = cluster.several.head_address, f"{network.address(2)}:{PORT + 1}"
    enemy = Enemy(seed=2)
    own_key = read_key(str(cluster.several.key_file), "the key")
    with network.inside(1), ExitStack() as stack:
        for key, addresses in ((ClusterKey.new(), (head, neighbour)), (own_key, (head,))):
            links = Links(LinkSecurity(key))
            stack.callback(links.close, linger_s=2)
            callers = [links.caller(f"tcp://{address}") for address in addresses]
            for number in range(2000):
                callers[number % len(callers)].send(enemy.control_frame()[1])
        for number in range(100):
            host, _, port = (head, neighbour)[number % 2].partition(":")
            with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as stranger:
                stranger.sendall(enemy.control_frame()[1])
    assert cluster.chat() == answer
    assert not any("was lost" in line for line in cluster.head.lines[seen:]), cluster.head.log


def test_another_model_and_too_many_stages_are_refused(several: Machines, tmp_path: Path) -> None:
    other_model = str(TinyModel(num_layers=3).write(tmp_path / "other"))
    head = several.serve(2, "--nnodes", "2", "--stages", "1", "--join-timeout", "10")
    wrong = several.join(1, "--model", other_model)
    assert "digest" in _fails(wrong, "model")
    head.wait_for_line("cannot take part, step `model`")
    assert "too many stages" in _fails(several.join(1, "--stages", "2"), "stages")
    assert head.finish() == 2
    assert "1 of 2 machines are there" in head.lines[-1] and "missing: rank 1" in head.lines[-1]


def test_a_wrong_place_is_told_in_one_line(several: Machines) -> None:
    key = ["--cluster-key-file", str(several.key_file), "--join-timeout", "3"]
    absent = several.node(1, "join", "10.77.0.1:29999", *key)
    nowhere = several.node(2, "join", "10.99.0.1", *key)
    unnamed = several.node(1, "join", "no-such-host.invalid", *key)
    open_door = several.node(2, "join", several.head_address)
    assert "the connection is refused" in _fails(absent, "connection")
    assert nowhere.finish() == 2 and "10.99.0.1" in nowhere.lines[-1]
    assert "no-such-host.invalid" in _fails(unnamed, "connection")
    assert open_door.finish() == 2 and "--cluster-key-file" in open_door.lines[-1]


@dataclass(frozen=True)
class Loss:
    """Args:
    machines: how each is lost.
    stage_index, seen: whom the log is to name, and what of it.
    """

    machines: dict[int, str]
    stage_index: int
    seen: str


GONE = "its connection to the head is closed"
NEXT = r"its link to stage 2, at [\d.]+:\d+, broke, though stage 2 answers"

LOSSES = {
    # Stage 0, on the head, hears that its link broke; stage 1, on the machine itself, dies.
    "killed": Loss({1: "killed"}, 1, f"{GONE}|no answer for|killed by SIGKILL"),
    "silent": Loss({1: "unplugged", 2: "stopped"}, 1, r"no sign of life within .*; nor does node 2 answer: no other"),
    "parted": Loss({1: "parted", 2: "parted"}, 1, f"{NEXT}: look at the network between node 1 and node 2"),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES.keys())
def test_lost_machines_cost_open_requests_are_named_everywhere_and_come_back(cluster: Cluster, loss: Loss) -> None:
    before, seen = cluster.chat(), len(cluster.head.lines)
    with cluster.several.network.inside(0):
        stream = cluster.head.stream(400)
    began_s = time.monotonic()
    for machine, how in loss.machines.items():
        cluster.lose(machine, how)
    answer = stream.read().decode()
    assert time.monotonic() - began_s < WRONG_START_S
    assert '"code":"not_ready"' in answer and answer.endswith("data: [DONE]\n\n")
    told = cluster.head.wait_for_line(r"was lost: .*the pipeline is started again as soon as all machines are", seen)
    stage, node = loss.stage_index, f"node {loss.stage_index}"
    named = rf"stage {stage} \(s{stage}\) was lost: {node} \([^;]+; stage {stage}\): .*({loss.seen})"
    assert re.search(named, told.string), told.string
    with cluster.several.network.inside(0), httpx.Client() as client:
        url = f"http://127.0.0.1:{cluster.head.port}/v1/completions"
        refused = client.post(url, json={"model": cluster.several.model, "prompt": "a"})
    assert refused.status_code == 503 and int(refused.headers["Retry-After"]) >= 1
    status, health = cluster.several.get(cluster.head, "/health")
    assert status == 503 and f"stage {stage} of the pipeline, on {node}, was lost" in health["error"]["message"]
    for machine, how in loss.machines.items():
        cluster.bring_back(machine, how)
    cluster.head.wait_for_line("the pipeline is complete again", seen)
    assert cluster.chat() == before
    events = cluster.several.get(cluster.head, "/debug/pipeline")[1]["events"]
    lost = next(event for event in events if event["kind"] == "lost")
    assert lost["stage_index"] == stage and re.search(loss.seen, lost["text"]) and f": {node} (" in lost["text"]


def test_told_to_stop_the_head_leaves_nothing_and_its_nodes_wait_for_the_next(cluster: Cluster) -> None:
    cluster.head.process.send_signal(signal.SIGTERM)
    assert cluster.head.finish() == 0
    for node in cluster.nodes.values():
        node.wait_for_line("the head is gone")
        node.process.send_signal(signal.SIGTERM)
        assert node.finish() == 0
        assert node.leftovers() == []
