"""How many microbatches should be in flight: enough to hide the hops, not so many that each becomes too small.

With n decoding requests in M microbatches, the slowest stage takes τ(M) for each, and a token comes back after the ring
R(M) = Στ + d, where d is all that is not computing: hops, messages, the engine. A cycle of all requests takes
C(M) = max(R(M), M·τ(M)); the best M is the one with the shortest cycle. Free hops give M = number of stages; slow links
give M = R / τ_max, as far as smaller microbatches still compute efficiently.
"""

from __future__ import annotations

from collections import deque

from stageline.cost.stage_time import MicrobatchShape, StageTimeCosts

_NUM_REMEMBERED = 64
_WORTHWHILE_FRACTION = 0.03
_LEAST_HOPS = 0.25
"""Time outside the stages, in units of one stage's, from which a wider window is considered."""


def cycle_s(
    window: int,
    costs: StageTimeCosts,
    num_decodes: int,
    context_tokens: int,
    stages_worth: float,
    outside_s: float,
) -> float:
    """Time in which every decoding request gets one token.

    Args:
        context_tokens: of all decoding requests together.
        stages_worth: Στ over the stages, in units of the slowest stage's τ; between 1 and the number of stages.
        outside_s: d, the part of the ring that is not computing.
    """
    stage_s = _stage_s(window, costs, num_decodes, context_tokens)
    return max(stages_worth * stage_s + outside_s, min(window, num_decodes) * stage_s)


def _stage_s(window: int, costs: StageTimeCosts, num_decodes: int, context_tokens: int) -> float:
    """Time of one of `window` level microbatches on the slowest stage."""
    rows = -(-num_decodes // window)
    return costs.predict_s(MicrobatchShape(rows, 0, rows, context_tokens // window))


def best_window(
    narrowest: int,
    widest: int,
    costs: StageTimeCosts,
    num_decodes: int,
    context_tokens: int,
    stages_worth: float,
    outside_s: float,
) -> int:
    """The number of microbatches in flight with the shortest cycle, between `narrowest` and `widest`.

    A wider window has to be worth at least 3 % to be taken: estimates are noisy, and width costs latency. And there
    must be something to hide: while the hops are short beside a stage's time, what the fit says of the smaller
    microbatches of a wider window, which it has not seen, weighs more than what could be won.
    """
    if num_decodes <= narrowest or outside_s < _LEAST_HOPS * _stage_s(narrowest, costs, num_decodes, context_tokens):
        return narrowest
    known = (costs, num_decodes, context_tokens, stages_worth, outside_s)
    best, best_s = narrowest, cycle_s(narrowest, *known)
    for window in range(narrowest + 1, min(widest, num_decodes) + 1):
        candidate_s = cycle_s(window, *known)
        if candidate_s < best_s * (1 - _WORTHWHILE_FRACTION):
            best, best_s = window, candidate_s
    return best


class RingTime:
    """What a microbatch's way around the ring is made of, from those that came back lately."""

    def __init__(self) -> None:
        self._outside_s: deque[float] = deque(maxlen=_NUM_REMEMBERED)
        self._stages_worth: deque[float] = deque(maxlen=_NUM_REMEMBERED)

    def observe(self, ring_s: float, computing_s: float, slowest_s: float) -> None:
        """Args: ring_s: from launch to result. computing_s: Στ over the stages. slowest_s: the largest of them."""
        self._outside_s.append(max(0.0, ring_s - computing_s))
        if slowest_s > 0:
            self._stages_worth.append(computing_s / slowest_s)

    @property
    def outside_s(self) -> float:
        """The least that was not computing: a microbatch that never had to queue."""
        return min(self._outside_s, default=0.0)

    @property
    def stages_worth(self) -> float:
        return sum(self._stages_worth) / len(self._stages_worth) if self._stages_worth else 1.0
