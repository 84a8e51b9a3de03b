"""What the scheduler knows of time: fitted to the microbatches that came back, used to size the next ones.

Counting rows and tokens levels microbatches only if rows and tokens are alike. Until enough results are in, everything
here falls back to counting.
"""

from __future__ import annotations

from collections import deque

from stageline.cost.stage_time import ASSUMED_COSTS, MicrobatchShape, StageTimeCosts, StageTimeModel
from stageline.cost.window import RingTime, best_window
from stageline.pipeline.microbatch import Microbatch, MicrobatchResult
from stageline.scheduler.budget import (
    LEAST_TOKENS_BESIDE_DECODES,
    MIN_CHUNK_TOKENS,
    PrefillRoom,
    PromptWork,
    next_chunk_s,
)

_RECONSIDER_EVERY = 32
_LEAST_UNKNOWN_TOKENS = 16
_NUM_REMEMBERED_CHUNKS, _GROWTH = 16, 2


class Pace:
    """One pipeline's measured pace.

    Args:
        narrowest_window: one microbatch per stage, where the window begins.
        widest_window: how far it may grow.
    """

    def __init__(self, narrowest_window: int, widest_window: int) -> None:
        self.window = narrowest_window
        self._narrowest_window = narrowest_window
        self._widest_window = widest_window
        self._model = StageTimeModel()
        self._ring = RingTime()
        self._num_results = 0
        self._mean_context_tokens = 0.0
        self._prompt_tokens: deque[int] = deque(maxlen=_NUM_REMEMBERED_CHUNKS)
        self._stages_worth: deque[float] = deque(maxlen=_NUM_REMEMBERED_CHUNKS)

    def observe(self, microbatch: Microbatch, result: MicrobatchResult, ring_s: float) -> None:
        """Learn from a result. Args: ring_s: time from the microbatch's launch to its result."""
        shape = MicrobatchShape.of_rows(microbatch.num_computed_tokens, microbatch.num_scheduled_tokens)
        self._model.observe(shape, result.slowest_s)
        self._ring.observe(ring_s, result.computing_s, result.slowest_s)
        self._num_results += 1
        if shape.num_prompt_tokens:
            self._prompt_tokens.append(shape.num_prompt_tokens)
            if result.slowest_s > 0:
                self._stages_worth.append(result.computing_s / result.slowest_s)

    @property
    def is_due(self) -> bool:
        """Enough results have come in to choose the window anew."""
        return self._num_results >= _RECONSIDER_EVERY

    def choose_window(self, context_tokens: list[int]) -> None:
        """Args: context_tokens: cached tokens of every decoding request."""
        self._num_results = 0
        total = sum(context_tokens)
        self._mean_context_tokens = total / len(context_tokens) if context_tokens else 0.0
        if self._model.costs is not None:
            self.window = best_window(
                self._narrowest_window,
                self._widest_window,
                self._model.costs,
                len(context_tokens),
                total,
                self._ring.stages_worth,
                self._ring.outside_s,
            )

    @property
    def prompt_costs(self) -> StageTimeCosts:
        """To compare what prompts take: measured, in seconds, or assumed, in tokens' worth of compute."""
        return self._model.costs if self._model.costs is not None and self._model.knows_prompts else ASSUMED_COSTS

    def room_for_prompts(self, num_tokens: int, work: PromptWork, least_tokens: int = MIN_CHUNK_TOKENS) -> PrefillRoom:
        """Room where nobody waits: as much as lets the chunks of all prompts overlap on the stages.

        Args:
            num_tokens: most tokens.
            work: of all prompts, in units of `prompt_costs`.
            least_tokens: what a prompt gets whatever its time.
        """
        return PrefillRoom(num_tokens, self._chunk_s(work), self.prompt_costs, least_tokens)

    def _chunk_s(self, work: PromptWork, decodes_s: float = 0.0) -> float:
        worth = sum(self._stages_worth) / len(self._stages_worth) if self._stages_worth else self._narrowest_window
        return next_chunk_s(work, self.prompt_costs, worth, decodes_s)

    def room_beside_decodes(
        self, num_tokens: int, work: PromptWork, placed: MicrobatchShape, num_decoding: int, slowdown: float
    ) -> PrefillRoom:
        """Room for prompts in a microbatch that shall take no longer than `slowdown` times one with decodes alone.

        It holds for microbatches without a decode as well: decodes of others queue behind them. Until it is known what
        a prompt's token costs, it is taken to cost as much as a decode; and no microbatch gets much more of prompts
        than those that came back, so that a wrong prediction is found out before it hurts.

        Args:
            num_tokens, work: see `room_for_prompts`.
            placed: rows that are in the microbatch already.
            num_decoding: requests that decode, in this microbatch or another.
        """
        rows, least = -(-num_decoding // self.window), LEAST_TOKENS_BESIDE_DECODES
        costs = self._model.costs
        if costs is None or not self._model.knows_prompts:
            num_tokens = int(min(num_tokens, max(_LEAST_UNKNOWN_TOKENS, (slowdown - 1) * rows)))
            return PrefillRoom(num_tokens, self._chunk_s(work), self.prompt_costs, least)
        num_tokens = min(num_tokens, max(_LEAST_UNKNOWN_TOKENS, _GROWTH * max(self._prompt_tokens)))
        level = MicrobatchShape(rows, 0, rows, int(rows * self._mean_context_tokens))
        level_s = costs.predict_s(level)
        spare_s = slowdown * level_s - costs.predict_s(placed) - costs.prompts_s
        return PrefillRoom(num_tokens, min(self._chunk_s(work, level_s), spare_s), costs, least)

    def decode_weight(self, num_cached_tokens: int) -> float:
        """A decode row's share of a microbatch's time, in units of a row with the mean context; 1 until known."""
        costs = self._model.costs
        if costs is None:
            return 1.0
        row_s = costs.token_s + costs.decode_s
        mean_s = row_s + costs.context_token_s * self._mean_context_tokens
        return (row_s + costs.context_token_s * num_cached_tokens) / mean_s if mean_s > 0 else 1.0
