"""A prompt's log-probabilities reach the client once, in order, whatever was computed how often."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stageline.errors import InternalError
from stageline.kv.kv_cache_manager import KVCacheManager
from stageline.pipeline.microbatch import Microbatch, MicrobatchLimits, MicrobatchResult, PromptLogprobs
from stageline.request import EngineRequest
from stageline.sampling import SamplerSpec, TokenLogprobs
from stageline.scheduler.scheduled_request import ScheduledRequest
from stageline.scheduler.scheduler import Scheduler, SchedulerLimits
from tests.unit.simulated_stages import SimulatedEngine, SimulatedStages, engine_request

BLOCK_SIZE, MAX_MODEL_LEN = 4, 64


class _DescribingStages(SimulatedStages):
    """Describe every prompt token that a microbatch's rows predict; a token's "log-probability" is its place."""

    def __init__(self, limits: MicrobatchLimits) -> None:
        super().__init__(limits)
        self._num_prompt_tokens: dict[int, int] = {}

    def _run(self, microbatch: Microbatch) -> MicrobatchResult:
        for added in microbatch.added:
            if added.sampler.num_prompt_logprobs >= 0:
                self._num_prompt_tokens[added.request_number] = added.num_prompt_tokens
        columns = (microbatch.request_numbers, microbatch.num_computed_tokens, microbatch.num_scheduled_tokens)
        runs = []
        for number, computed, scheduled in zip(*columns, strict=True):
            places = range(computed + 1, min(computed + scheduled + 1, self._num_prompt_tokens.get(number, 0)))
            if places:
                runs.append(PromptLogprobs(number, places.start, [TokenLogprobs([0], [float(p)], 1) for p in places]))
        return msgspec.structs.replace(super()._run(microbatch), prompt_logprobs=runs)


class _ListeningEngine(SimulatedEngine):
    def __init__(self, scheduler: Scheduler, stages: SimulatedStages) -> None:
        super().__init__(scheduler, stages)
        self.described: dict[str, list[float]] = {}
        self.num_preemptions = 0

    def _take(self, updates):
        super()._take(updates)
        for update in updates:
            self.described.setdefault(update.request_id, []).extend(p.logprobs[0] for p in update.prompt_logprobs)
            self.num_preemptions = max(self.num_preemptions, update.num_preemptions)


def _engine(num_blocks: int, num_stages: int = 2, max_chunk_tokens: int | None = None) -> _ListeningEngine:
    scheduler = Scheduler(
        KVCacheManager(num_blocks, BLOCK_SIZE, enable_prefix_caching=True),
        SchedulerLimits(num_stages, num_stages, 16, 64, MAX_MODEL_LEN, max_chunk_tokens),
    )
    return _ListeningEngine(scheduler, _DescribingStages(MicrobatchLimits(num_blocks, BLOCK_SIZE, 50, 16, 64, 64)))


def _asking(request_id: str, num_prompt_tokens: int, max_tokens: int) -> EngineRequest:
    asked = engine_request(request_id, [7] * num_prompt_tokens, max_tokens)
    return msgspec.structs.replace(asked, sampler=SamplerSpec(seed=0, num_prompt_logprobs=0))


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 25)), min_size=1, max_size=5),
    num_blocks=st.integers(14, 20),
    num_stages=st.integers(1, 3),
    max_chunk_tokens=st.sampled_from([None, 3, 8]),
)
def test_every_prompt_token_but_the_first_is_described_once_and_in_order(
    lengths: list[tuple[int, int]], num_blocks: int, num_stages: int, max_chunk_tokens: int | None
) -> None:
    engine = _engine(num_blocks, num_stages, max_chunk_tokens)
    for index, (num_prompt_tokens, max_tokens) in enumerate(lengths):
        engine.add(_asking(str(index), num_prompt_tokens, max_tokens))
    engine.run()
    for index, (num_prompt_tokens, _) in enumerate(lengths):
        assert engine.described[str(index)] == list(range(1, num_prompt_tokens))


def test_a_recomputed_prompt_is_not_described_again() -> None:
    engine = _engine(num_blocks=8)
    for name in "ab":
        engine.add(_asking(name, 10, 20))
    engine.run()
    assert engine.num_preemptions > 0
    assert engine.described == {"a": list(range(1, 10)), "b": list(range(1, 10))}


def test_a_hole_in_the_description_is_our_bug_and_not_passed_on() -> None:
    request = ScheduledRequest(_asking("a", 10, 1), 0, [7] * 10)
    with pytest.raises(InternalError, match="from position 4 on, but those from 1 on are missing"):
        request.take_description(PromptLogprobs(1, 4, []))
