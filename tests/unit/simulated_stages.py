"""Stages without a model, for testing the scheduler: a cache of tokens, not tensors, and a token for every prefix.

What a stage would read from its KV cache is checked against the request's own tokens on every row, so a block that was
handed out, shared or overwritten wrongly is noticed at the first read. The "model" is a hash of all tokens before, so
the tokens of a request must be the same however it was cut, batched, preempted or resumed.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Sequence

from stageline.pipeline.in_flight import InFlight
from stageline.pipeline.microbatch import Microbatch, MicrobatchLimits, MicrobatchResult, check_microbatch
from stageline.request import EngineRequest, RequestUpdate
from stageline.sampling import SamplerSpec
from stageline.scheduler.scheduler import Scheduler
from stageline.worker.sampled_tokens import SampledTokens

VOCAB_SIZE = 50


def next_token(token_ids: Sequence[int]) -> int:
    return zlib.crc32(bytes(token_ids)) % VOCAB_SIZE


def expected_output(asked: EngineRequest) -> list[int]:
    token_ids = list(asked.prompt_token_ids)
    for _ in range(asked.max_tokens):
        token_ids.append(next_token(token_ids))
        if token_ids[-1] in asked.eos_token_ids:
            break
    return token_ids[len(asked.prompt_token_ids) :]


def engine_request(request_id: str, prompt: Sequence[int], max_tokens: int, eos: tuple[int, ...] = ()) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=list(prompt),
        sampler=SamplerSpec(seed=0),
        max_tokens=max_tokens,
        eos_token_ids=eos,
        stop_token_ids=(),
        arrival_s=0.0,
    )


class SimulatedStages:
    """Applies microbatches in order, as a stage would, and answers them when asked."""

    def __init__(self, limits: MicrobatchLimits) -> None:
        self.limits = limits
        self.launched: list[Microbatch] = []
        self._slots: dict[tuple[int, int], tuple[int, int]] = {}
        self._tables: dict[int, list[int]] = {}
        self._tokens: dict[int, dict[int, int]] = {}
        self._results: deque[MicrobatchResult] = deque()
        self._sampled = SampledTokens()

    def launch(self, microbatch: Microbatch) -> None:
        check_microbatch(microbatch, self.limits)
        self.launched.append(microbatch)
        for number in microbatch.removed:
            del self._tables[number]
        for added in microbatch.added:
            assert added.request_number not in self._tables
            self._tables[added.request_number] = list(added.block_ids)
        for extended in microbatch.extended:
            self._tables[extended.request_number].extend(extended.block_ids)
        assert len(self._tables) <= self.limits.max_num_seqs
        self._results.append(self._run(microbatch))

    def _token_ids(self, microbatch: Microbatch) -> list[int]:
        """With those that had to be sampled first."""
        token_ids = list(microbatch.token_ids)
        self._sampled.announce(microbatch)
        if (awaited := self._sampled.take()) is not None:
            assert awaited.microbatch is microbatch
            for row, token_id in zip(microbatch.pending_rows, awaited.token_ids, strict=True):
                token_ids[row] = token_id
        else:
            assert not microbatch.pending_rows
        return token_ids

    def _run(self, microbatch: Microbatch) -> MicrobatchResult:
        tokens: list[int] = []
        token_ids = self._token_ids(microbatch)
        starts = [0, *microbatch.row_ends]
        for row, number in enumerate(microbatch.request_numbers):
            table, size = self._tables[number], self.limits.block_size
            computed = microbatch.num_computed_tokens[row]
            for offset, token_id in enumerate(token_ids[starts[row] : starts[row + 1]]):
                position = computed + offset
                self._slots[table[position // size], position % size] = (position, token_id)
            context = []
            for position in range(computed + microbatch.num_scheduled_tokens[row]):
                found_position, token_id = self._slots[table[position // size], position % size]
                assert found_position == position
                context.append(token_id)
            if row in microbatch.sampling_rows:
                tokens.append(next_token(context))
        result = MicrobatchResult(microbatch.epoch, microbatch.number, tokens, [], [])
        self._sampled.add(result)
        return result

    def answer(self) -> MicrobatchResult:
        return self._results.popleft()


class SimulatedEngine:
    """The engine's loop over simulated stages, one event at a time, checking the window and every row on the way."""

    def __init__(self, scheduler: Scheduler, stages: SimulatedStages) -> None:
        self.scheduler = scheduler
        self.stages = stages
        self.in_flight = InFlight(scheduler.most_in_flight)
        self.outputs: dict[str, list[int]] = {}
        self.finished: dict[str, str] = {}
        self._sampling_in_flight: deque[set[int]] = deque()

    def add(self, request: EngineRequest) -> None:
        self.scheduler.add(request)
        self.outputs[request.request_id] = []

    def abort(self, request_id: str) -> None:
        update = self.scheduler.abort(request_id, 0.0)
        if update is not None:
            self._take([update])

    def fill(self) -> None:
        self.in_flight.window = self.scheduler.most_in_flight
        while self.in_flight.has_room:
            microbatch = self.scheduler.schedule(0.0)
            if microbatch is None:
                return
            sampling = {microbatch.request_numbers[row] for row in microbatch.sampling_rows}
            self._check_pending_rows(microbatch)
            self._sampling_in_flight.append(sampling)
            self.in_flight.launched(microbatch)
            self.stages.launch(microbatch)

    def _check_pending_rows(self, microbatch: Microbatch) -> None:
        """A row is pending exactly if its token is in flight, and then in the oldest microbatch."""
        numbers = microbatch.request_numbers
        pending = {numbers[row] for row in microbatch.pending_rows}
        waiting_for_token = set().union(*self._sampling_in_flight)
        assert waiting_for_token & set(numbers) == pending, "scheduled while its token is in flight"
        later = list(self._sampling_in_flight)[1:]
        assert not set().union(*later) & pending, "awaits a token that is not in the oldest microbatch"
        if self.in_flight.microbatches:
            assert microbatch.oldest == self.in_flight.microbatches[0].number
        if pending:
            assert len(self.in_flight) >= self.scheduler.window, "looks ahead while the window has room"

    def step(self) -> bool:
        """Fill the window and take one result. False if there is nothing left to do."""
        self.fill()
        if not len(self.in_flight):
            assert self.scheduler.num_unfinished == 0, "stuck: nothing in flight and nothing can be scheduled"
            return False
        self.land()
        return True

    def land(self) -> None:
        """Take the result of the oldest microbatch in flight."""
        result = self.stages.answer()
        self._sampling_in_flight.popleft()
        news = self.scheduler.completed(self.in_flight.completed(result), result, 0.0)
        self._take([one.update(0.0) for one in news])

    def run(self) -> None:
        while self.step():
            pass

    def _take(self, updates: list[RequestUpdate]) -> None:
        for update in updates:
            assert update.request_id not in self.finished, "news of a finished request"
            self.outputs[update.request_id] += update.token_ids
            if update.finish_reason is not None:
                self.finished[update.request_id] = update.finish_reason
