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

_NUM_REMEMBERED_PER_KIND = 32
_REFIT_EVERY = 16
_FEW_OBSERVATIONS = 4
_ENOUGH_PROMPT_TOKENS = 64
_ATTENTION = 2
_TELLING_RANGE = 4.0
"""By how much the attention per token must vary among prompts before their times tell what attention costs."""
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
    """Least squares with coefficients of at least 0 over microbatches that came back, relative to their times.

    Relative, because a decode of milliseconds matters as much as a prompt's chunk of a second. With few kinds of
    microbatches several explanations fit, and a negative cost would be absurd for the next one. So that there are many
    kinds, the last of each size are remembered, with and without prompts: a long time of like decodes does not make it
    forget what a prompt costs, nor does a time of small chunks what a large one showed more clearly.
    """

    def __init__(self) -> None:
        self.costs: StageTimeCosts | None = None
        self._rows: dict[tuple[bool, int], deque[tuple[float, ...]]] = {}
        self._num_observed = 0
        self._num_prompts = 0
        self._num_prompt_tokens = 0
        self._num_since_fit = 0
        self._least_attention, self._most_attention = math.inf, 0.0

    @property
    def knows_prompts(self) -> bool:
        """Enough of prompts was seen to predict what one adds to a microbatch."""
        return self.costs is not None and self._num_prompt_tokens >= _ENOUGH_PROMPT_TOKENS

    def observe(self, shape: MicrobatchShape, elapsed_s: float) -> None:
        """Learn from a microbatch that took `elapsed_s` on its slowest stage."""
        if elapsed_s <= 0.0:
            return
        num_prompt_tokens = shape.num_tokens - shape.num_decodes
        kind = num_prompt_tokens > 0, (num_prompt_tokens or shape.num_tokens).bit_length()
        rows = self._rows.setdefault(kind, deque(maxlen=_NUM_REMEMBERED_PER_KIND))
        rows.append(tuple(feature / elapsed_s for feature in shape.features()))
        self._num_observed += 1
        self._num_prompts += num_prompt_tokens > 0
        self._num_prompt_tokens += num_prompt_tokens
        if num_prompt_tokens > 0:
            attention = shape.prefill_attention / num_prompt_tokens
            self._least_attention = min(self._least_attention, attention)
            self._most_attention = max(self._most_attention, attention)
        self._num_since_fit += 1
        # The first prompts teach much, and the next microbatch needs it.
        is_news = num_prompt_tokens > 0 and self._num_prompts <= _REFIT_EVERY
        has_enough = self._num_observed >= _FEW_OBSERVATIONS
        if self._num_since_fit >= _REFIT_EVERY or (has_enough and (is_news or self.costs is None)):
            self._fit()
            self._num_since_fit = 0

    def _fit(self) -> None:
        rows = np.array([row for kind in self._rows.values() for row in kind])
        scale = np.sqrt((rows**2).mean(axis=0))
        is_used = scale > 0
        # Of prompts that are alike the attention could explain all: small chunks would be taken for free.
        is_used[_ATTENTION] &= self._most_attention >= _TELLING_RANGE * self._least_attention
        used = np.flatnonzero(is_used)
        solution = np.zeros(rows.shape[1])
        solution[used] = _least_squares_at_least_0(rows[:, used] / scale[used], np.ones(len(rows))) / scale[used]
        self.costs = StageTimeCosts(*(float(value) for value in solution))


def _least_squares_at_least_0(matrix: Array, wanted: Array) -> Array:
    """Minimise |matrix @ c - wanted| over c >= 0.

    Args: matrix: [observations, coefficients], columns of similar size. Returns: [coefficients].
    Source: the active set method of Lawson and Hanson, on the normal equations.
    """
    num_columns = matrix.shape[1]
    gram = matrix.T @ matrix + _RIDGE * len(matrix) * np.eye(num_columns)
    moments = matrix.T @ wanted
    solution, free = np.zeros(num_columns), np.zeros(num_columns, dtype=bool)
    for _ in range(3 * num_columns):
        slope = np.where(free, -np.inf, moments - gram @ solution)
        if slope.max() <= _RIDGE * len(matrix):
            break
        free[slope.argmax()] = True
        solution = _within_bounds(gram, moments, solution, free)
    return solution


def _within_bounds(gram: Array, moments: Array, solution: Array, free: npt.NDArray[np.bool_]) -> Array:
    """The best solution with the free coefficients alone; one that would be negative becomes 0 and not `free`."""
    while free.any():
        best = np.zeros_like(solution)
        best[free] = np.linalg.solve(gram[np.ix_(free, free)], moments[free])
        negative = free & (best <= 0)
        if not negative.any():
            return best
        # As far towards the best as the first coefficient that reaches 0 allows.
        step = (solution[negative] / (solution[negative] - best[negative])).min()
        solution = np.maximum(solution + step * (best - solution), 0.0)
        free &= solution > 0
    return np.zeros_like(solution)
