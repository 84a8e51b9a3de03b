"""A machine without the model gets its stages' layers from others, answers as one that has it, and keeps them.

Also what crosses between machines otherwise: hidden states, in 8 bits if that is asked for.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from stageline import LLM, SamplingParams
from stageline.checkpoint.open import open_checkpoint
from stageline.config import environment
from tests.cluster.machines import PORT, Machines, Node, machines
from tests.cluster.network import Network
from tests.server.served import DEADLINE_S, Served

pytestmark = pytest.mark.timeout(240)

PROMPT = "Hello"
NEARLY = 0.1


def _cache_with_kernels(home: Path) -> Path:
    """An empty cache, but for what is compiled already, which takes long."""
    cache = home / "stageline"
    cache.mkdir(parents=True)
    for path in environment.cache_directory().glob("*"):
        if path.is_file():
            (cache / path.name).symlink_to(path)
    return cache


def _answer(several: Machines, head: Served) -> str:
    asked = {"model": several.model, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    with several.network.inside(0), httpx.Client(timeout=DEADLINE_S) as client:
        answer = client.post(f"http://127.0.0.1:{head.port}/v1/completions", json=asked)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def _answer_of_one_process(model: str) -> str:
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(
        model, distributed_executor_backend="in_process", dtype="float32", device="cpu", kv_cache_memory="8MiB"
    ) as alone:
        return alone.generate([PROMPT], params)[0].outputs[0].text


def _received(node: Node, seen: int) -> tuple[int, int]:
    """Bytes of weights that came over the link, of those that its stage needs."""
    found = node.wait_for_line(r"([\d,]+) of ([\d,]+) bytes came over the link", seen)
    came, needed = (int(group.replace(",", "")) for group in found.groups())
    return came, needed


def test_a_machine_without_the_model_answers_as_one_that_has_it_and_keeps_what_it_got(
    several: Machines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = several.serve(2, "--nnodes", "2", "--heartbeat-timeout-s", "3")
    folder = _cache_with_kernels(tmp_path / "cache") / "models"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    node = several.join(1, "--model-source", "peer", "--model", "/no/such/model")
    head.wait_until_ready()
    expected = _answer_of_one_process(several.model)
    assert _answer(several, head) == expected
    original = open_checkpoint(several.model)
    all_bytes = sum(entry.num_bytes for entry in original.tensors.values())
    came, needed = _received(node, 0)
    assert came == needed < all_bytes
    (copied,) = folder.iterdir()
    assert open_checkpoint(str(copied)).spec == original.spec

    seen = len(head.lines)
    node.hurt(signal.SIGKILL)
    head.wait_for_line("the pipeline is started again", seen)
    again = several.join(1, "--model-source", "peer")
    head.wait_for_line("the pipeline is complete again", seen)
    assert _received(again, 0) == (0, needed)
    assert _answer(several, head) == expected


def test_a_cache_that_cannot_be_written_and_a_head_without_the_model_are_told_at_once(
    several: Machines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    node, head = several.join(1, "--model-source", "peer"), several.serve(2, "--nnodes", "2", "--model-source", "peer")
    assert head.finish() == 2 and "the head has to have the model itself" in head.lines[-1]
    assert node.finish() == 2
    assert "cannot be used: Not a directory" in node.lines[-1] and "XDG_CACHE_HOME" in node.lines[-1]


@dataclass(frozen=True)
class Three:
    """A head, a machine with the model and one without; hidden states cross in 8 bits."""

    several: Machines
    head: Served
    without_model: Node


@pytest.fixture(scope="module")
def three(
    network: Network, tiny_model: str, key_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Three]:
    cache = tmp_path_factory.mktemp("cache")
    _cache_with_kernels(cache)
    with machines(network, tiny_model, key_file, PORT + 200) as several:
        head = several.serve(3, "--nnodes", "3", "--activation-dtype", "int8")
        several.join(1, "--node-rank", "1", "--model", several.model)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", str(cache))
            node = several.join(2, "--node-rank", "2", "--model-source", "peer")
        head.wait_until_ready()
        yield Three(several, head, node)


def test_another_machine_that_has_the_model_gives_weights_too(three: Three) -> None:
    found = three.without_model.wait_for_line(r"([\d,]+) of ([\d,]+) bytes came .* ([\d,]+) from 10\.77\.0\.2:\d+", 0)
    came, needed, given = (int(group.replace(",", "")) for group in found.groups())
    assert 0 < given <= came == needed
    assert "weights are also given by node 1" in three.head.log


def test_with_eight_bits_between_machines_answers_are_nearly_as_sure_and_the_loss_is_told(three: Three) -> None:
    several, head = three.several, three.head
    asked = {"model": several.model, "prompt": PROMPT, "max_tokens": 1, "temperature": 0, "logprobs": 1}
    with several.network.inside(0), httpx.Client(timeout=DEADLINE_S) as client:
        answer = client.post(f"http://127.0.0.1:{head.port}/v1/completions", json={**asked, "ignore_eos": True})
    assert answer.status_code == 200, answer.text
    [logprob] = answer.json()["choices"][0]["logprobs"]["token_logprobs"]
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=1)
    settings = {"dtype": "float32", "device": "cpu", "kv_cache_memory": "8MiB"}
    with LLM(several.model, distributed_executor_backend="in_process", **settings) as alone:
        [exact] = alone.generate([PROMPT], params)[0].outputs[0].logprobs or []
    difference = abs(logprob - max(entry.logprob for entry in exact.values()))
    # None at all would mean that nothing was rounded.
    assert 1e-6 < difference < NEARLY
    assert re.search(r"hidden states leave in 8 bits \(int8\): 2\d % of their bytes, and 0\.\d+ % of", head.log)
