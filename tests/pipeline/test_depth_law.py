"""The law: a request's greedy tokens are those of `transformers` in float32, however deep the pipeline, whatever runs
the stages, however prompts are cut, whether prefixes are reused, whether memory forces requests out and back in.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from stageline.sampling import SamplerSpec
from tests.pipeline.running import Case, StartedPipeline, request, run, start_stages
from tests.tiny_models import TinyModel, load_reference, reference_greedy

DEPTHS = (1, 2, 3, 5)
BACKENDS = ("in_process", "multi_process")
NUM_OUTPUT_TOKENS = 24

COMMON_BEGINNING = [(7 * i) % 250 for i in range(48)]
PROMPTS = {
    "long, first": [*COMMON_BEGINNING, *[(3 * i) % 200 for i in range(83)]],
    "one token": [65],
    "a block": list(range(100, 116)),
    "a block and one": list(range(100, 117)),
    "shares a beginning": [*COMMON_BEGINNING, 9, 8, 7],
    "is the beginning": list(COMMON_BEGINNING),
    "shares and goes on": [*COMMON_BEGINNING, *range(150, 190)],
    "long, last": [(11 * i + 5) % 256 for i in range(120)],
}


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TinyModel(num_layers=7, num_heads=6, num_kv_heads=3, hidden_size=96).write(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def expected(tiny_llama: Path) -> dict[str, list[int]]:
    model = load_reference(tiny_llama)
    return {name: reference_greedy(model, prompt, NUM_OUTPUT_TOKENS) for name, prompt in PROMPTS.items()}


@pytest.fixture(scope="module", params=[(depth, backend) for depth in DEPTHS for backend in BACKENDS], ids=str)
def pipeline(request: pytest.FixtureRequest, tiny_llama: Path) -> Iterator[StartedPipeline]:
    depth, backend = request.param
    started = start_stages(tiny_llama, depth, backend)
    yield started
    started.executor.close()


@pytest.mark.parametrize("num_blocks", [400, 13], ids=["ample memory", "forced preemption"])
@pytest.mark.parametrize("prefix_caching", [True, False], ids=["prefix cache", "no prefix cache"])
@pytest.mark.parametrize("chunk", [7, 16, 128])
def test_greedy_tokens_are_those_of_transformers(
    pipeline: StartedPipeline, expected: dict[str, list[int]], chunk: int, prefix_caching: bool, num_blocks: int
) -> None:
    case = Case(max_chunk_tokens=chunk, prefix_caching=prefix_caching, num_blocks=num_blocks)
    finished = run(pipeline, case, [request(name, prompt, NUM_OUTPUT_TOKENS) for name, prompt in PROMPTS.items()])
    assert {name: result.token_ids for name, result in finished.items()} == expected
    assert any(result.num_cached_tokens > 0 for result in finished.values()) == prefix_caching
    assert any(result.num_preemptions > 0 for result in finished.values()) == (num_blocks == 13)


def test_seeded_tokens_do_not_depend_on_depth_batch_or_preemption(pipeline: StartedPipeline, tiny_llama: Path) -> None:
    """The same seed gives the tokens of the request alone in one process, in every pipeline and every company."""
    sampler = SamplerSpec(seed=1234, temperature=0.9, top_p=0.95, top_k=40)
    mine = request("mine", PROMPTS["shares and goes on"], NUM_OUTPUT_TOKENS, sampler)
    alone = start_stages(tiny_llama, 1, "in_process")
    expected_tokens = run(alone, Case(), [mine])["mine"].token_ids
    greedy = run(alone, Case(), [request("greedy", PROMPTS["shares and goes on"], NUM_OUTPUT_TOKENS)])["greedy"]
    assert expected_tokens != greedy.token_ids
    others = [
        request(name, prompt, NUM_OUTPUT_TOKENS, SamplerSpec(seed=index, temperature=1.0))
        for index, (name, prompt) in enumerate(PROMPTS.items())
    ]
    cases = (Case(max_chunk_tokens=7), Case(num_blocks=13, max_chunk_tokens=16), Case(look_ahead=False))
    for case in cases:
        assert run(pipeline, case, [*others, mine])["mine"].token_ids == expected_tokens


@pytest.mark.parametrize("partition", ["1,5,1", "5,1,1", "1,1,5"])
def test_unequal_partitions_change_nothing(tiny_llama: Path, expected: dict[str, list[int]], partition: str) -> None:
    started = start_stages(tiny_llama, 3, "in_process", partition)
    finished = run(started, Case(), [request(name, prompt, NUM_OUTPUT_TOKENS) for name, prompt in PROMPTS.items()])
    assert {name: result.token_ids for name, result in finished.items()} == expected


def test_a_window_wider_than_the_pipeline_changes_nothing(tiny_llama: Path, expected: dict[str, list[int]]) -> None:
    started = start_stages(tiny_llama, 2, "in_process")
    requests = [request(name, prompt, NUM_OUTPUT_TOKENS) for name, prompt in PROMPTS.items()]
    finished = run(started, Case(window=5, num_blocks=13), requests)
    assert {name: result.token_ids for name, result in finished.items()} == expected
