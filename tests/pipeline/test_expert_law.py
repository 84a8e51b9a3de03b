"""The law for other caches and layers: rows of latent attention, windows with sinks, experts of mixed batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.model.tiny_experts import EXPERT_FAMILIES
from tests.pipeline.running import Case, StartedPipeline, request, run, start_stages
from tests.tiny_models import load_reference, reference_greedy

NUM_OUTPUT_TOKENS = 24
BEGINNING = [(7 * i) % 250 for i in range(40)]
PROMPTS = {
    "long": [*BEGINNING, *[(3 * i) % 200 for i in range(60)]],
    "one token": [65],
    "shares a beginning": [*BEGINNING, 9, 8, 7],
    "shares and goes on": [*BEGINNING, *range(150, 180)],
}


@dataclass(frozen=True)
class Started:
    pipeline: StartedPipeline
    expected: dict[str, list[int]]


@pytest.fixture(scope="module", params=["mixtral", "deepseek v3", "gpt-oss"])
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    path: Path = EXPERT_FAMILIES[request.param].write(tmp_path_factory.mktemp("experts"))
    model = load_reference(path)
    expected = {name: reference_greedy(model, prompt, NUM_OUTPUT_TOKENS) for name, prompt in PROMPTS.items()}
    pipeline = start_stages(path, 3, "in_process")
    yield Started(pipeline, expected)
    pipeline.executor.close()


@pytest.mark.parametrize("num_blocks", [400, 9], ids=["ample memory", "forced preemption"])
@pytest.mark.parametrize("prefix_caching", [True, False], ids=["prefix cache", "no prefix cache"])
def test_greedy_tokens_are_those_of_transformers(started: Started, prefix_caching: bool, num_blocks: int) -> None:
    case = Case(max_chunk_tokens=16, prefix_caching=prefix_caching, num_blocks=num_blocks)
    finished = run(started.pipeline, case, [request(n, prompt, NUM_OUTPUT_TOKENS) for n, prompt in PROMPTS.items()])
    assert {name: result.token_ids for name, result in finished.items()} == started.expected
    assert any(result.num_preemptions > 0 for result in finished.values()) == (num_blocks == 9)
