"""The time of a microbatch on the slowest stage, fitted online to the microbatches that came back.

    t = c + b·Σx + a·Σ(2Lx + x²) + e·n_decode + κ·Σcontext + p·[has prompts]

for x new tokens of a row on top of L cached ones: c is the fixed cost of a microbatch, b a token's, a attention's
within prompts, e a decode row's own, κ what a decode pays for each token of its context, p what is fixed of prompts:
kernels are less efficient on a short chunk.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

_NUM_REMEMBERED_PER_KIND = 32
_REFIT_EVERY = 16
_HALVED_AFTER, _LEAST_WEIGHT = 128, 0.05
"""In how many microbatches an observation comes to weigh half as much, and what it keeps for being the only one of its
kind, perhaps."""
_FEW_OBSERVATIONS = 4
_ENOUGH_PROMPT_TOKENS = 64
_TOKENS, _ATTENTION, _DECODES, _PROMPTS = 1, 2, 3, 5
_TELLING_RANGE = 4.0
"""By how much the attention per token must vary among prompts before their times tell what attention costs, and the
tokens before they tell what is fixed."""
_RIDGE = 1e-6

ASSUMED_FIXED_TOKENS = 32
"""The fixed cost of a microbatch (launch, weights, messages) in tokens' worth of compute, until measured."""

ASSUMED_ATTENTION_TOKENS = 2e-4
"""What a unit of attention, a new token's with half a cached one, costs in tokens' worth of compute, until measured. It
is the model's width over the weights of a layer, times two or three for being less efficient than a product of
matrices: 4e-4 for 135 million parameters, 5e-5 for 8 billion."""

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

    @property
    def num_prompt_tokens(self) -> int:
        return self.num_tokens - self.num_decodes

    def features(self) -> tuple[float, ...]:
        has_prompts = float(self.num_tokens > self.num_decodes)
        return 1.0, self.num_tokens, self.prefill_attention, self.num_decodes, self.decode_context_tokens, has_prompts


@dataclass(frozen=True)
class StageTimeCosts:
    """The coefficients in seconds, each at least 0.

    Args:
        alone_s: the fixed cost of a microbatch that has nothing but prompts; None until seen. Decodes wait until all
            weights were read, and a chunk's products hide that, so it may be less than `fixed_s`.
    """

    fixed_s: float
    token_s: float
    prefill_attention_s: float
    decode_s: float
    context_token_s: float
    prompts_s: float = 0.0
    alone_s: float | None = None

    def predict_s(self, shape: MicrobatchShape) -> float:
        costs = (
            self.fixed_s,
            self.token_s,
            self.prefill_attention_s,
            self.decode_s,
            self.context_token_s,
            self.prompts_s,
        )
        return sum(cost * feature for cost, feature in zip(costs, shape.features(), strict=True))

    @property
    def chunk_s(self) -> float:
        """The fixed cost of a prompt's chunk that has a microbatch to itself."""
        return self.fixed_s + self.prompts_s if self.alone_s is None else self.alone_s

    def prompt_s(self, num_cached_tokens: int, num_tokens: int) -> float:
        """What a prompt's chunk adds to a microbatch that has prompts: b·x + a·(2Lx + x²)."""
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


ASSUMED_COSTS = StageTimeCosts(ASSUMED_FIXED_TOKENS, 1.0, ASSUMED_ATTENTION_TOKENS, 0.0, 0.0)
"""In tokens' worth of compute instead of seconds: good for comparing prompts' chunks with one another."""


class _Range:
    """The least and the most of some numbers."""

    def __init__(self) -> None:
        self._least, self._most = math.inf, 0.0

    def add(self, value: float) -> None:
        self._least, self._most = min(self._least, value), max(self._most, value)

    @property
    def is_telling(self) -> bool:
        return self._most >= _TELLING_RANGE * self._least


class StageTimeModel:
    """Least squares with coefficients of at least 0 over microbatches that came back, relative to their times.

    Relative, because a decode of milliseconds matters as much as a prompt's chunk of a second. With few kinds of
    microbatches several explanations fit, and a negative cost would be absurd for the next one. So that there are many
    kinds, the last of each size are remembered, with and without prompts: a long time of like decodes does not make it
    forget what a prompt costs, nor does a time of small chunks what a large one showed more clearly. What is older
    weighs less, so that what changes is learnt.
    """

    def __init__(self) -> None:
        self.costs: StageTimeCosts | None = None
        self._rows: dict[tuple[bool, int], deque[tuple[int, tuple[float, ...]]]] = {}
        self._num_observed = 0
        self._num_prompts = 0
        self._num_prompt_tokens = 0
        self._num_since_fit = 0
        self._attention = _Range()
        self._chunk_tokens = _Range()

    @property
    def knows_prompts(self) -> bool:
        """Enough of prompts was seen to predict what one adds to a microbatch."""
        return self.costs is not None and self._num_prompt_tokens >= _ENOUGH_PROMPT_TOKENS

    def observe(self, shape: MicrobatchShape, elapsed_s: float) -> None:
        """Learn from a microbatch that took `elapsed_s` on its slowest stage."""
        if elapsed_s <= 0.0:
            return
        num_prompt_tokens = shape.num_prompt_tokens
        kind = num_prompt_tokens > 0, (num_prompt_tokens or shape.num_tokens).bit_length()
        rows = self._rows.setdefault(kind, deque(maxlen=_NUM_REMEMBERED_PER_KIND))
        self._num_observed += 1
        rows.append((self._num_observed, tuple(feature / elapsed_s for feature in shape.features())))
        self._num_prompts += num_prompt_tokens > 0
        self._num_prompt_tokens += num_prompt_tokens
        if num_prompt_tokens > 0:
            self._attention.add(shape.prefill_attention / num_prompt_tokens)
            self._chunk_tokens.add(num_prompt_tokens)
        self._num_since_fit += 1
        # The first prompts teach much, and the next microbatch needs it.
        is_news = num_prompt_tokens > 0 and self._num_prompts <= _REFIT_EVERY
        has_enough = self._num_observed >= _FEW_OBSERVATIONS
        if self._num_since_fit >= _REFIT_EVERY or (has_enough and (is_news or self.costs is None)):
            self._fit()
            self._num_since_fit = 0

    def _fit(self) -> None:
        remembered = [row for kind in self._rows.values() for row in kind]
        ages = self._num_observed - np.array([number for number, _ in remembered])
        weights = np.maximum(0.5 ** (ages / _HALVED_AFTER), _LEAST_WEIGHT)
        rows = np.array([row for _, row in remembered]) * weights[:, None]
        scale = np.sqrt((rows**2).mean(axis=0))
        is_used = scale > 0
        # Of prompts that are alike the attention could explain all, or what is fixed: tokens would be taken for free.
        is_used[_PROMPTS] &= self._chunk_tokens.is_telling
        if not self._attention.is_telling:
            is_used[_ATTENTION] = False
            rows[:, _TOKENS] += ASSUMED_ATTENTION_TOKENS * rows[:, _ATTENTION]
            scale[_TOKENS] = np.sqrt((rows[:, _TOKENS] ** 2).mean())
        used = np.flatnonzero(is_used)
        solution = np.zeros(rows.shape[1])
        solution[used] = _least_squares_at_least_0(rows[:, used] / scale[used], weights) / scale[used]
        if not self._attention.is_telling:
            solution[_ATTENTION] = ASSUMED_ATTENTION_TOKENS * solution[_TOKENS]
        alone_s = _alone_s(np.array([row for _, row in remembered]), weights)
        self.costs = replace(StageTimeCosts(*(float(value) for value in solution)), alone_s=alone_s)


def _alone_s(rows: Array, weights: Array) -> float | None:
    """Fitted to microbatches without decodes, if their sizes tell what is fixed of them."""
    is_alone = (rows[:, _DECODES] == 0) & (rows[:, _PROMPTS] > 0)
    rows, weights = rows[is_alone][:, : _ATTENTION + 1], weights[is_alone]
    sizes = rows[:, 1:] / rows[:, :1]
    if len(rows) < _FEW_OBSERVATIONS or (sizes.max(axis=0) < _TELLING_RANGE * sizes.min(axis=0)).any():
        return None
    rows = rows * weights[:, None]
    scale = np.sqrt((rows**2).mean(axis=0))
    return float(_least_squares_at_least_0(rows / scale, weights)[0] / scale[0])


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
        # As far towards the best as the first coefficient that reaches 0 allows. Rounding may leave it just above 0,
        # where it would be tried again without end.
        steps = np.full(len(solution), np.inf)
        steps[negative] = solution[negative] / (solution[negative] - best[negative])
        solution = np.maximum(solution + steps.min() * (best - solution), 0.0)
        solution[steps.argmin()] = 0.0
        free &= solution > 0
    return np.zeros_like(solution)
