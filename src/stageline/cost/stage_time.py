"""The time of a microbatch on the slowest stage, fitted online to the microbatches that came back.

    t = c + b·Σx + a·Σ(2Lx + x²) + e·n_decode + κ·Σcontext

for x new tokens of a row on top of L cached ones: c is the fixed cost of a microbatch, b a token's, a attention's
within prompts, e a decode row's own, κ what a decode pays for each token of its context.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_NUM_REMEMBERED_DECODES = 192
_NUM_REMEMBERED_PROMPTS = 64
_REFIT_EVERY = 16
_FEW_OBSERVATIONS = 4
_ENOUGH_PROMPT_TOKENS = 64
_RIDGE = 1e-6

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class MicrobatchShape:
    """What the time of a microbatch depends on.

    Args:
        num_tokens: Σx over all rows.
        prefill_attention: Σ(2Lx + x²) over rows with more than one new token.
        num_decodes: rows with one new token.
        decode_context_tokens: Σ of their cached tokens.
    """

    num_tokens: int
    prefill_attention: int
    num_decodes: int
    decode_context_tokens: int

    @classmethod
    def of_rows(cls, num_computed_tokens: Sequence[int], num_scheduled_tokens: Sequence[int]) -> MicrobatchShape:
        """Args: per row, cached tokens L and new tokens x."""
        attention = decodes = context = 0
        for cached, new in zip(num_computed_tokens, num_scheduled_tokens, strict=True):
            if new == 1:
                decodes += 1
                context += cached
            else:
                attention += 2 * cached * new + new * new
        return cls(sum(num_scheduled_tokens), attention, decodes, context)

    def features(self) -> tuple[float, float, float, float, float]:
        return 1.0, self.num_tokens, self.prefill_attention, self.num_decodes, self.decode_context_tokens


@dataclass(frozen=True)
class StageTimeCosts:
    """The coefficients in seconds, each at least 0."""

    fixed_s: float
    token_s: float
    prefill_attention_s: float
    decode_s: float
    context_token_s: float

    def predict_s(self, shape: MicrobatchShape) -> float:
        costs = (self.fixed_s, self.token_s, self.prefill_attention_s, self.decode_s, self.context_token_s)
        return sum(cost * feature for cost, feature in zip(costs, shape.features(), strict=True))

    @property
    def fixed_cost_tokens(self) -> float:
        """The fixed cost of a microbatch, in tokens' worth of time."""
        return self.fixed_s / self.token_s if self.token_s > 0 else 0.0

    def prompt_s(self, num_cached_tokens: int, num_tokens: int) -> float:
        """What a prompt's chunk adds to a microbatch: b·x + a·(2Lx + x²)."""
        attention = 2 * num_cached_tokens * num_tokens + num_tokens * num_tokens
        return self.token_s * num_tokens + self.prefill_attention_s * attention

    def prompt_tokens_in(self, time_s: float, num_cached_tokens: int) -> int:
        """The longest chunk on top of the cached tokens that adds no more than that; at most 2^31."""
        if time_s <= 0:
            return 0
        linear_s = self.token_s + 2 * self.prefill_attention_s * num_cached_tokens
        # The root of a·x² + linear·x = t, in the form that loses no digits when a is small, and holds for a = 0.
        divisor = linear_s + math.sqrt(linear_s * linear_s + 4 * self.prefill_attention_s * time_s)
        return int(min(2 * time_s / divisor, 2**31)) if divisor > 0 else 2**31


class StageTimeModel:
    """Least squares with coefficients of at least 0 over the last microbatches, relative to their times.

    Relative, because a decode of milliseconds matters as much as a prompt's chunk of a second. A coefficient that comes
    out negative is left out and the rest fitted again: with few kinds of microbatches several explanations fit, and a
    negative cost would be absurd for the next one. Microbatches with prompts are remembered apart, or what a prompt
    costs would be forgotten while there are only decodes, which cannot tell the costs apart.
    """

    def __init__(self) -> None:
        self.costs: StageTimeCosts | None = None
        self._decodes: deque[tuple[float, ...]] = deque(maxlen=_NUM_REMEMBERED_DECODES)
        self._prompts: deque[tuple[float, ...]] = deque(maxlen=_NUM_REMEMBERED_PROMPTS)
        self._num_prompt_tokens = 0
        self._num_since_fit = 0

    @property
    def knows_prompts(self) -> bool:
        """Enough of prompts was seen to predict what one adds to a microbatch."""
        return self.costs is not None and self._num_prompt_tokens >= _ENOUGH_PROMPT_TOKENS

    def observe(self, shape: MicrobatchShape, elapsed_s: float) -> None:
        """Learn from a microbatch that took `elapsed_s` on its slowest stage."""
        if elapsed_s <= 0.0:
            return
        row = tuple(feature / elapsed_s for feature in shape.features())
        num_prompt_tokens = shape.num_tokens - shape.num_decodes
        (self._prompts if num_prompt_tokens else self._decodes).append(row)
        self._num_prompt_tokens += num_prompt_tokens
        self._num_since_fit += 1
        # The first prompts teach much, and the next microbatch needs it.
        is_news = num_prompt_tokens > 0 and len(self._prompts) <= _REFIT_EVERY
        has_enough = len(self._decodes) + len(self._prompts) >= _FEW_OBSERVATIONS
        if self._num_since_fit >= _REFIT_EVERY or (has_enough and (is_news or self.costs is None)):
            self._fit()
            self._num_since_fit = 0

    def _fit(self) -> None:
        rows = np.array([*self._decodes, *self._prompts])
        scale = np.sqrt((rows**2).mean(axis=0))
        used = np.flatnonzero(scale > 0)
        solution = np.zeros(rows.shape[1])
        scaled = rows[:, used] / scale[used]
        coefficients = _least_squares_at_least_0(scaled, np.ones(len(rows)))
        solution[used] = coefficients / scale[used]
        self.costs = StageTimeCosts(*(float(value) for value in solution))


def _least_squares_at_least_0(matrix: Array, wanted: Array) -> Array:
    """Minimise |matrix @ c - wanted| over c >= 0, dropping the most negative coefficient until none is left.

    Args: matrix: [observations, coefficients], columns of similar size. Returns: [coefficients].
    """
    num_columns = matrix.shape[1]
    gram = matrix.T @ matrix + _RIDGE * len(matrix) * np.eye(num_columns)
    moments = matrix.T @ wanted
    kept = list(range(num_columns))
    solution = np.zeros(num_columns)
    while kept:
        part = np.linalg.solve(gram[np.ix_(kept, kept)], moments[kept])
        lowest = int(part.argmin())
        if part[lowest] >= 0:
            solution[kept] = part
            break
        del kept[lowest]
    return solution
