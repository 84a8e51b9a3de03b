"""The time of a microbatch on the slowest stage, fitted online to the microbatches that came back.

    t = c + b·Σx + a·Σ(2Lx + x²) + e·n_decode + κ·Σcontext

for x new tokens of a row on top of L cached ones: c is the fixed cost of a microbatch, b a token's, a attention's
within prompts, e a decode row's own, κ what a decode pays for each token of its context.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_NUM_REMEMBERED = 256
_REFIT_EVERY = 16
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


class StageTimeModel:
    """Least squares with coefficients of at least 0 over the last microbatches, relative to their times.

    Relative, because a decode of milliseconds matters as much as a prompt's chunk of a second. A coefficient that comes
    out negative is left out and the rest fitted again: with few kinds of microbatches several explanations fit, and a
    negative cost would be absurd for the next one.
    """

    def __init__(self) -> None:
        self.costs: StageTimeCosts | None = None
        self._rows: deque[tuple[float, ...]] = deque(maxlen=_NUM_REMEMBERED)
        self._num_since_fit = 0

    def observe(self, shape: MicrobatchShape, elapsed_s: float) -> None:
        """Learn from a microbatch that took `elapsed_s` on its slowest stage."""
        if elapsed_s <= 0.0:
            return
        self._rows.append(tuple(feature / elapsed_s for feature in shape.features()))
        self._num_since_fit += 1
        if self._num_since_fit >= _REFIT_EVERY or (self.costs is None and self._num_since_fit >= 4):
            self._fit()
            self._num_since_fit = 0

    def _fit(self) -> None:
        rows = np.array(self._rows)
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
