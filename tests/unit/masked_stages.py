"""Simulated stages that sample under masks, and masks that are computed when a test says so.

One idea: as in `simulated_stages`, the "model" is a hash of all tokens before; of the tokens that a mask allows it
takes the first at or after the hash. So a request's tokens must be the same whenever its masks come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from stageline.grammar.mask_pool import Guide
from stageline.grammar.step import Step
from stageline.pipeline.microbatch import NO_TOKEN, Microbatch, MicrobatchResult, TokenMasks, check_masks, mask_bytes
from stageline.request import EngineRequest, GrammarSpec, RequestFailure, RequestUpdate
from tests.unit.simulated_stages import VOCAB_SIZE, SimulatedEngine, SimulatedStages, next_token

FIELD = "structured_outputs.grammar"


def every_third(first: int, num_tokens: int, most_tokens: int = 9999, maskless_after: int = -1) -> GrammarSpec:
    """A grammar: token i of the answer is (first + i) modulo 3, and the answer has so many tokens.

    It exceeds its limits with a token after `most_tokens`, or with the mask that follows `maskless_after` tokens.
    """
    return GrammarSpec(FIELD, f"{first} {num_tokens} {most_tokens} {maskless_after}")


def mask_of(allowed: set[int]) -> bytes:
    return sum(1 << token_id for token_id in allowed).to_bytes(mask_bytes(VOCAB_SIZE), "little")


class FakeMatcher:
    """Of the grammar that `every_third` makes."""

    def __init__(self, spec: GrammarSpec) -> None:
        self.first, self.num_tokens, self.most_tokens, self.maskless_after = map(int, spec.definition.split())
        self.taken: list[int] = []

    def allowed(self) -> set[int]:
        return {token_id for token_id in range(VOCAB_SIZE) if token_id % 3 == (self.first + len(self.taken)) % 3}

    def mask(self) -> bytes | None:
        return None if len(self.taken) == self.maskless_after else mask_of(self.allowed())

    def advance(self, token_id: int) -> Step:
        assert token_id in self.allowed()
        self.taken.append(token_id)
        if len(self.taken) > self.most_tokens:
            return Step.FAILED
        return Step.COMPLETE if len(self.taken) == self.num_tokens else Step.GOES_ON


def masked_token(context: list[int], mask: bytes) -> int:
    bits = int.from_bytes(mask, "little")
    token_id = next_token(context)
    while not bits >> token_id & 1:
        token_id = (token_id + 1) % VOCAB_SIZE
    return token_id


def expected_masked_output(asked: EngineRequest) -> list[int]:
    assert asked.grammar is not None
    matcher, context = FakeMatcher(asked.grammar), list(asked.prompt_token_ids)
    for _ in range(asked.max_tokens):
        context.append(masked_token(context, matcher.mask() or b""))
        if matcher.advance(context[-1]) is Step.COMPLETE:
            break
    return context[len(asked.prompt_token_ids) :]


class ControlledMasks:
    """In the place of a `MaskPool`: nothing is computed before `release`. `broken` definitions have no masks."""

    def __init__(self) -> None:
        self.pending: deque[Guide] = deque()
        self.broken: set[str] = set()
        self._finished: list[Guide] = []

    def compute(self, guide: Guide) -> None:
        assert guide not in self.pending, "handed in twice"
        guide.mask = None
        self.pending.append(guide)

    def release(self, place: int = 0) -> None:
        """Compute one of the masks that were asked for."""
        guide = self.pending[place]
        del self.pending[place]
        if guide.spec.definition in self.broken:
            guide.failure = RequestFailure("it is broken", guide.spec.field)
        else:
            guide.matcher = guide.matcher or FakeMatcher(guide.spec)
            guide.mask = guide.matcher.mask()
            guide.is_exceeded = guide.mask is None
        self._finished.append(guide)

    def finished(self) -> list[Guide]:
        finished, self._finished = self._finished, []
        return finished

    def close(self) -> None:
        pass


class MaskedStages(SimulatedStages):
    """Tokens are sampled when the answer is asked for, with the masks that have come by then."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self._unanswered: deque[tuple[Microbatch, dict[int, list[int]]]] = deque()
        self._masks: dict[tuple[int, int], bytes] = {}
        self.num_masks_in_vain = 0

    def _run(self, microbatch: Microbatch) -> MicrobatchResult:
        rows = set(microbatch.sampling_rows)
        token_ids = self._token_ids(microbatch)
        contexts = {row: self._context(microbatch, row, token_ids) for row in range(microbatch.num_rows)}
        # What a row without a mask gets is known now; the others' tokens are awaited by nobody.
        tokens = [
            NO_TOKEN if row in microbatch.masked_rows else next_token(contexts[row])
            for row in microbatch.sampling_rows
        ]
        self._sampled.add(MicrobatchResult(microbatch.epoch, microbatch.number, tokens, [], []))
        self._unanswered.append((microbatch, {row: context for row, context in contexts.items() if row in rows}))
        return MicrobatchResult(microbatch.epoch, microbatch.number, [], [], [])

    def _context(self, microbatch: Microbatch, row: int, token_ids: list[int]) -> list[int]:
        starts = [0, *microbatch.row_ends]
        table, size = self._tables[microbatch.request_numbers[row]], self.limits.block_size
        computed = microbatch.num_computed_tokens[row]
        for offset, token_id in enumerate(token_ids[starts[row] : starts[row + 1]]):
            position = computed + offset
            self._slots[table[position // size], position % size] = (position, token_id)
        context = []
        for position in range(computed + microbatch.num_scheduled_tokens[row]):
            found_position, token_id = self._slots[table[position // size], position % size]
            assert found_position == position
            context.append(token_id)
        return context

    def take_masks(self, masks: TokenMasks) -> None:
        assert masks.number < len(self.launched), "masks overtook their microbatch"
        if masks.number not in [microbatch.number for microbatch, _ in self._unanswered]:
            self.num_masks_in_vain += 1
            return
        check_masks(masks, self.launched[masks.number].masked_rows, VOCAB_SIZE)
        for row, mask in zip(masks.rows, masks.masks, strict=True):
            assert (masks.number, row) not in self._masks, "a mask was sent twice"
            self._masks[masks.number, row] = mask

    def answer(self) -> MicrobatchResult:
        super().answer()
        microbatch, contexts = self._unanswered.popleft()
        tokens = []
        for row, context in contexts.items():
            if row not in microbatch.masked_rows:
                tokens.append(next_token(context))
            elif (mask := self._masks.pop((microbatch.number, row), None)) is None:
                tokens.append(NO_TOKEN)
            else:
                tokens.append(masked_token(context, mask))
        return MicrobatchResult(microbatch.epoch, microbatch.number, tokens, [], [])


class MaskedEngine(SimulatedEngine):
    """The engine's loop with masks. `compute` says which masks are ready at each turn."""

    def __init__(self, scheduler: object, stages: MaskedStages, masks: ControlledMasks) -> None:
        super().__init__(scheduler, stages)  # type: ignore[arg-type]
        self.masks = masks
        self.compute: Callable[[ControlledMasks], None] = release_all
        self.failures: dict[str, RequestFailure] = {}

    def _take(self, updates: list[RequestUpdate]) -> None:
        super()._take(updates)
        for update in updates:
            assert (update.failure is not None) == (update.finish_reason == "error")
            if update.failure is not None:
                self.failures[update.request_id] = update.failure

    def send_masks(self) -> None:
        messages, ends = self.scheduler.take_masks(0.0)
        for message in messages:
            self.stages.take_masks(message)  # type: ignore[attr-defined]
        self._take(ends)

    def fill(self) -> None:
        self.compute(self.masks)
        self.send_masks()
        super().fill()
        self.send_masks()

    def step(self) -> bool:
        self.fill()
        if len(self.in_flight) == 0 and self.scheduler.is_waiting_for_masks:
            self.masks.release()
            return True
        return super().step()


def release_all(masks: ControlledMasks) -> None:
    while masks.pending:
        masks.release()


def release_none(masks: ControlledMasks) -> None:
    pass
