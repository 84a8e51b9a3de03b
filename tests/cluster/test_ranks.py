"""Ranks that share layers, on several machines: the tokens of one process, and a lost rank is a lost stage."""

from __future__ import annotations

import os
import signal

import httpx
import pytest

from tests.cluster.machines import Machines, sharing_memory
from tests.server.served import Served

pytestmark = pytest.mark.timeout(240)


def _complete(several: Machines, head: Served) -> str:
    body = {"model": several.model, "prompt": "Hello", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    with several.network.inside(0), httpx.Client(timeout=60) as client:
        answer = client.post(f"http://127.0.0.1:{head.port}/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def test_ranks_on_two_machines_answer_as_one_process_does_and_a_killed_one_comes_back(several: Machines) -> None:
    from stageline import LLM, SamplingParams

    settings = {"dtype": "float32", "device": "cpu", "kv_cache_memory": "8MiB"}
    with LLM(several.model, distributed_executor_backend="in_process", **settings) as alone:
        params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
        expected = alone.generate("Hello", params)[0].outputs[0].text
    # Two ranks here send to two there, and these to one, whose tokens go to both here.
    shared = ["-tp", "2,2,1", "--nnodes", "2"]
    head = several.serve(3, *shared, "--stages", "1")
    flags = [*several.flags(3, *shared), "--dtype", "float32", "--device", "cpu", "--no-bind-cores"]
    node = several.node(1, "serve", several.model, *flags, "--node-rank", "1", "--headless")
    try:
        head.wait_until_ready()
        assert _complete(several, head) == expected
        before, seen = node.stage_pids(), len(head.lines)
        assert len(before) == 3
        os.kill(max(sharing_memory(before)), signal.SIGKILL)
        head.wait_for_line(r"stage 1 \(s1\) was lost: node 1 .*rank [01]: .*by SIGKILL; the pipeline is", seen)
        head.wait_for_line("the pipeline is complete again", seen)
        assert _complete(several, head) == expected
        assert len(node.stage_pids()) == 3 and not set(before) & set(node.stage_pids())
    except BaseException:
        print(head.log, node.log)
        raise
