"""The law, with ranks: tokens do not depend on how many processes share a stage's layers, and a lost one ends all."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from stageline.errors import WorkerLost
from stageline.executor.multi_process import MultiProcessExecutor
from stageline.sampling import SamplerSpec
from tests.model.tiny_experts import EXPERT_FAMILIES
from tests.model.tiny_families import FAMILIES
from tests.pipeline.running import Case, StartedPipeline, make_core, request, run, start_stages
from tests.tiny_models import load_reference, reference_greedy

NUM_OUTPUT_TOKENS = 12
BEGINNING = [(7 * i) % 250 for i in range(40)]
PROMPTS = {
    "long": [*BEGINNING, *[(3 * i) % 200 for i in range(60)]],
    "one token": [65],
    "shares a beginning": [*BEGINNING, 9, 8, 7],
    "shares and goes on": [*BEGINNING, *range(150, 180)],
}
LAYOUTS = {"qwen3": (1, "2"), "gemma2": (2, "2"), "deepseek v3": (3, "2,1,2")}
DEALT = ["deepseek v3"]
"""Families whose experts are dealt to the ranks; tests/model/test_tensor_parallel.py has both ways."""


@dataclass(frozen=True)
class Started:
    family: str
    path: Path
    pipeline: StartedPipeline


@pytest.fixture(scope="module", params=LAYOUTS)
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    family: str = request.param
    path = {**FAMILIES, **EXPERT_FAMILIES}[family].write(tmp_path_factory.mktemp("shared"))
    num_stages, ranks = LAYOUTS[family]
    pipeline = start_stages(path, num_stages, "multi_process", ranks=ranks, deals_experts=family in DEALT)
    yield Started(family, path, pipeline)
    pipeline.executor.close()


def test_greedy_tokens_are_those_of_transformers(started: Started) -> None:
    model = load_reference(started.path)
    expected = {name: reference_greedy(model, prompt, NUM_OUTPUT_TOKENS) for name, prompt in PROMPTS.items()}
    requests = [request(n, prompt, NUM_OUTPUT_TOKENS) for n, prompt in PROMPTS.items()]
    window = started.pipeline.num_stages + 1  # tokens are awaited before they are sampled
    for case in (Case(max_chunk_tokens=16, window=window), Case(prefix_caching=False, num_blocks=13)):
        finished = run(started.pipeline, case, requests)
        assert {name: result.token_ids for name, result in finished.items()} == expected


def test_drawn_tokens_are_those_of_one_process(started: Started) -> None:
    """Rows that are drawn, penalised and described make the first rank ask for logits in its own order."""
    samplers = {
        "drawn": SamplerSpec(seed=5, temperature=0.8, top_p=0.9),
        "penalised": SamplerSpec(seed=0, repetition_penalty=1.3),
        "described": SamplerSpec(seed=0, num_logprobs=3),
        "greedy": SamplerSpec(seed=0),
    }
    prompts = dict(zip(samplers, PROMPTS.values(), strict=True))
    requests = [request(name, prompts[name], NUM_OUTPUT_TOKENS, sampler) for name, sampler in samplers.items()]
    alone = start_stages(started.path, 1, "in_process")
    expected = run(alone, Case(), requests)
    alone.executor.close()
    assert run(started.pipeline, Case(), requests) == expected


def test_a_killed_rank_is_a_lost_stage(started: Started) -> None:
    executor = started.pipeline.executor
    assert isinstance(executor, MultiProcessExecutor)
    core = make_core(started.pipeline, Case())
    core.add(request("endless", BEGINNING, 150))
    while not core.step():
        pass
    pids = executor.worker_pids
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(WorkerLost, match=r"stage 0 .*rank 1: its process .* was killed by SIGKILL"):
        while core.has_work:
            core.step()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
