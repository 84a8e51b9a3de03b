"""The pipeline on a Ray cluster: Ray places and watches, nodes join as others do, a lost one comes back elsewhere."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from stageline.cluster.ray_fleet import RayFleet
from stageline.config.cluster_config import ClusterConfig
from stageline.config.engine_config import EngineConfig
from stageline.errors import ConfigError
from stageline.executor.messages import LinkAccess
from tests.cluster.machines import sharing_memory
from tests.cluster.network import Network
from tests.cluster.ray_nodes import RayNodes, ray_nodes
from tests.server.served import Served
from tests.tiny_models import TinyModel

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed (the extra `ray`)"),
]

WRONG_START_S = 20.0
FLAGS = ["--distributed-executor-backend", "ray", "--master-port", "29800"]


@pytest.fixture(scope="module")
def ray(network: Network) -> Iterator[RayNodes]:
    with ray_nodes(network) as nodes:
        for machine, num_devices in enumerate((2, 4, 4)):
            nodes.start(machine, num_devices)
        yield nodes


@contextmanager
def served(network: Network, ray: RayNodes, model: str, home: Path, *flags: str, address: str = "") -> Iterator[Served]:
    """The command, on machine 0."""
    with network.inside(0):
        server = Served(model, *FLAGS, *flags, home=home, environ={"RAY_ADDRESS": address or ray.address})
    try:
        yield server
    except BaseException:
        print(server.log)
        raise
    finally:
        server.destroy()


def _complete(network: Network, server: Served) -> str:
    with network.inside(0), httpx.Client(timeout=60) as client:
        body = {"model": server.model, "prompt": "Hello", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        answer = client.post(f"http://127.0.0.1:{server.port}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def _stages_of(parent: int) -> list[int]:
    """Processes of stages that Ray's processes started, not the server's own."""
    own = {child.pid for child in psutil.Process(parent).children(recursive=True)}
    agents = [p for p in psutil.process_iter() if "stageline.cluster.node_process" in _words(p) and p.pid not in own]
    return [child.pid for agent in agents for child in agent.children(recursive=True)]


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_a_pipeline_on_ray_answers_as_one_process_does_and_lost_ranks_and_machines_are_replaced(
    network: Network, ray: RayNodes, tiny_model: str, tmp_path: Path
) -> None:
    from stageline import LLM, SamplingParams

    settings = {"dtype": "float32", "device": "cpu", "kv_cache_memory": "8MiB"}
    with LLM(tiny_model, distributed_executor_backend="in_process", **settings) as alone:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        expected = alone.generate("Hello", params)[0].outputs[0].text
    with served(network, ray, tiny_model, tmp_path, "-pp", "3", "-tp", "1,2,1") as server:
        server.wait_until_ready()
        where = server.wait_for_line(r"Ray has room for the stages: 1 here, 2 on (\S+)")[1]
        machine, other = (1, 2) if where == network.address(1) else (2, 1)
        assert _complete(network, server) == expected
        stages, seen = _stages_of(server.process.pid), len(server.lines)
        assert len(stages) == 3
        os.kill(max(sharing_memory(stages)), signal.SIGKILL)
        server.wait_for_line(r"stage 1 \(s1\) was lost: .*rank [01]: .*the pipeline is started again", seen)
        server.wait_for_line("the pipeline is complete again", seen)
        assert _complete(network, server) == expected
        seen = len(server.lines)
        ray.kill(machine)
        server.wait_for_line(r"was lost: .*the pipeline is started again", seen)
        server.wait_for_line("the pipeline is complete again", seen)
        server.wait_for_line(rf"node 1 \(\S+, {network.address(other)}:\d+\) joined", seen)
        assert _complete(network, server) == expected
        stages = _stages_of(server.process.pid)
        server.process.terminate()
        assert server.finish() == 0
        assert server.leftovers() == []
        assert not any(psutil.pid_exists(pid) and _words(psutil.Process(pid)) for pid in stages)


def test_with_gpus_each_rank_has_one_that_ray_keeps_for_it_and_for_nobody_else(
    network: Network, ray: RayNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", ray.address)
    engine = EngineConfig(model="m", pipeline_parallel_size=3, tensor_parallel_size=2, device="cuda")
    with network.inside(0):
        fleet = RayFleet(engine, ClusterConfig(join_timeout_s=WRONG_START_S), LinkAccess())
        try:
            with pytest.raises(ConfigError, match=r"Ray has had no room for 3 times 2 CPUs, 2 GPUs on one machine"):
                RayFleet(engine, ClusterConfig(join_timeout_s=1.0), LinkAccess())
        finally:
            fleet.close()
    assert fleet.own_gpus == ["0", "1"]
    assert (fleet.cluster.stages, fleet.cluster.nnodes) == (1, 2)


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("", r"6 times 2 CPUs on one machine \(-tp 2\), and Ray has room for [35]\. Ray has [23] nodes .*smaller -tp"),
        ("10.77.0.1:9", r"no Ray cluster can be reached: RAY_ADDRESS is 10\.77\.0\.1:9: Connection refused\. Start"),
    ],
    ids=["no room", "no Ray"],
)
def test_a_wrong_start_is_told_in_time_in_one_line(
    network: Network, ray: RayNodes, tmp_path: Path, address: str, words: str
) -> None:
    model = str(TinyModel(num_layers=6).write(tmp_path / "model"))
    began_s = time.monotonic()
    with served(network, ray, model, tmp_path, "-tp", "2", "-pp", "6", address=address) as server:
        assert server.finish() == 2
        assert re.search(words, server.lines[-1]), server.log
    assert time.monotonic() - began_s < WRONG_START_S
