"""Layers with a window keep their window only, in blocks of their own, and every token is still `transformers`'."""

from __future__ import annotations

from pathlib import Path

import pytest

from stageline import kernels
from stageline.kv.kv_cache_manager import WindowBlocks
from tests.model.tiny_families import FAMILIES
from tests.pipeline.running import Case, request, run, start_stages
from tests.pipeline.test_depth_law import PROMPTS
from tests.tiny_models import load_reference, reference_greedy

NUM_OUTPUT_TOKENS = 24
WINDOW = 9
AMPLE, TIGHT = WindowBlocks(300, WINDOW), WindowBlocks(12, WINDOW)


@pytest.fixture(scope="module", params=["gemma3", "mistral"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whose layers differ, and one whose layers all have the window."""
    return FAMILIES[request.param].write(tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, list[int]]:
    reference = load_reference(model)
    return {name: reference_greedy(reference, prompt, NUM_OUTPUT_TOKENS) for name, prompt in PROMPTS.items()}


def test_torch_alone_finds_both_kinds_of_blocks(
    model: Path, expected: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "library", lambda device, dtype: None)
    started = start_stages(model, 2, "in_process")
    requests = [request(name, prompt, NUM_OUTPUT_TOKENS) for name, prompt in PROMPTS.items()]
    finished = run(started, Case(max_chunk_tokens=7, window_blocks=TIGHT), requests)
    assert {name: result.token_ids for name, result in finished.items()} == expected


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_tokens_do_not_depend_on_where_the_window_is_kept(
    model: Path, expected: dict[str, list[int]], num_stages: int
) -> None:
    started = start_stages(model, num_stages, "in_process")
    requests = [request(name, prompt, NUM_OUTPUT_TOKENS) for name, prompt in PROMPTS.items()]
    num_preemptions = {AMPLE: 0, TIGHT: 0}
    for blocks, num_blocks in ((AMPLE, 400), (TIGHT, 13)):
        for chunk in (7, 64):
            for prefix_caching in (True, False):
                case = Case(chunk, prefix_caching, num_blocks, blocks)
                finished = run(started, case, requests)
                assert {name: result.token_ids for name, result in finished.items()} == expected, case
                assert any(result.num_cached_tokens for result in finished.values()) == prefix_caching, case
                num_preemptions[blocks] += sum(result.num_preemptions for result in finished.values())
    assert num_preemptions[AMPLE] == 0 < num_preemptions[TIGHT]
