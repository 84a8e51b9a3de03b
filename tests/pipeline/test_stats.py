"""Looking changes nothing: statistics asked for all the time cost no token, never go back, and add up per stage."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest

from stageline import AsyncLLM, SamplingParams
from stageline.config.engine_config import EngineConfig
from stageline.engine.stats import EngineStats
from stageline.outputs import OutputKind
from stageline.timeline.stage_counters import StageCounters
from tests.pipeline.failing import SETTINGS
from tests.tiny_models import TinyModel, load_reference, reference_greedy

HIDDEN_SIZE = 64
NUM_STAGES = 2
PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6] * 20, [5, 3, 5]]
NUM_TOKENS = 24
MOST_LOOKS = 60


def totals(stats: EngineStats) -> list[float]:
    """Everything that may only grow."""
    requests, found = stats.requests, [stats.now_s]
    found += [requests.num_added, requests.num_prompt_tokens, requests.num_generation_tokens]
    found += [requests.inter_token_s.num_values, stats.microbatches.tokens.num_values]
    for stage in stats.stages:
        found += [stage.elapsed_s, stage.busy_s, stage.starved_s, stage.blocked_s, stage.preparing_s, stage.idle_s]
        found += [stage.num_microbatches, stage.num_tokens, stage.sent.num_bytes, stage.received.num_bytes]
    return found


def states_s(stage: StageCounters) -> float:
    return stage.busy_s + stage.starved_s + stage.blocked_s + stage.preparing_s + stage.idle_s


async def complete(llm: AsyncLLM, prompt: list[int]) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    [output] = [output async for output in llm.generate(prompt, params, output_kind=OutputKind.FINAL_ONLY)]
    return output.outputs[0].token_ids


async def watched(model: str, **settings: Any) -> tuple[list[list[int]], list[EngineStats]]:
    """The tokens of PROMPTS, and statistics asked for by two at once, again and again, until all are done."""
    config = EngineConfig(model=model, **{**SETTINGS, "pipeline_parallel_size": NUM_STAGES, **settings})
    async with await AsyncLLM.start(config) as llm:
        seen = [await llm.stats()]
        answers = asyncio.gather(*(complete(llm, prompt) for prompt in PROMPTS))
        while not answers.done() and len(seen) < MOST_LOOKS:
            seen += await asyncio.gather(llm.stats(), llm.stats())
        tokens = await answers
        seen.append(await llm.stats())
        return tokens, seen


@pytest.mark.parametrize("executor", ["multi_process", "in_process"])
def test_looking_changes_no_token_and_totals_only_grow(executor: str, tmp_path) -> None:
    model = TinyModel(hidden_size=HIDDEN_SIZE).write(tmp_path / "tiny")
    tokens, seen = asyncio.run(watched(str(model), distributed_executor_backend=executor))
    reference = load_reference(model)
    assert tokens == [reference_greedy(reference, prompt, NUM_TOKENS) for prompt in PROMPTS]

    assert len(seen) > 3
    for before, now in pairwise(seen):
        if now.now_s > before.now_s:
            assert all(was <= is_ for was, is_ in zip(totals(before), totals(now), strict=True))
    for stats in seen:
        for stage in stats.stages:
            assert states_s(stage) == pytest.approx(stage.elapsed_s, abs=1e-6)

    first, last = seen[0], seen[-1]
    num_computed = sum(len(prompt) for prompt in PROMPTS) + len(PROMPTS) * (NUM_TOKENS - 1)
    assert last.requests.num_generation_tokens == len(PROMPTS) * NUM_TOKENS
    assert last.microbatches.tokens.total - first.microbatches.tokens.total == num_computed
    for before, stage in zip(first.stages, last.stages, strict=True):
        assert stage.num_tokens - before.num_tokens == num_computed
    if executor == "multi_process":
        sender, receiver = last.stages
        assert sender.sent.num_bytes == receiver.received.num_bytes == sender.num_tokens * HIDDEN_SIZE * 4
        assert sender.sent.num_messages == receiver.received.num_messages == receiver.num_microbatches
        assert 0 < receiver.received.latency_s.num_values <= receiver.received.num_messages
        assert all(stage.resident_bytes > 2**20 for stage in last.stages)
