"""Notices that the layers would better be cut otherwise, while requests are served: a neighbour took a core, say.

One idea: suspicion is free, certainty is not. What the stages count anyway tells whether they are uneven; only while
they are, their items are timed, and only a gain that stays for a while is worth a word, or a pause in which the cut is
moved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stageline.timeline.stage_counters import StageCounters

_LOOKS_PER_PATIENCE = 4
_LONGEST_LOOK_S = 5.0
_LEAST_BUSY_FRACTION = 0.2
_SAME_SHARES = 0.03
_MOST_PATIENCE_TIMES = 16


@dataclass(frozen=True)
class RebalancePolicy:
    """Args:
    gain_fraction: how much faster another cut has to be; 0.1 is 10 %.
    patience_s: for how long it has to be that.
    """

    gain_fraction: float
    patience_s: float

    @property
    def look_s(self) -> float:
        """Time between two looks at the stages."""
        return min(self.patience_s / _LOOKS_PER_PATIENCE, _LONGEST_LOOK_S)


@dataclass(frozen=True)
class BetterCut:
    """A cut that would be faster, by what was measured.

    Args:
        layer_counts: of the cut that would be.
        times_s: [stages] what a microbatch of decodes would take there.
        times_now_s: [stages] what it takes as the layers are cut.
    """

    layer_counts: tuple[int, ...]
    times_s: tuple[float, ...]
    times_now_s: tuple[float, ...]

    @property
    def gain_fraction(self) -> float:
        return max(self.times_now_s) / max(self.times_s) - 1


class DriftWatch:
    """Remembers since when another cut would be worthwhile. Knows no clock: every time is given.

    Args:
        now_s: now, on the clock of all other times given here.
    """

    def __init__(self, policy: RebalancePolicy, now_s: float) -> None:
        self._policy = policy
        self._looked_s = now_s
        self._busy_s: list[float] = []
        self._shares: list[float] = []
        self._accepted: list[float] = []
        self._better_since_s: float | None = None
        self._patience_s = policy.patience_s

    def is_due(self, now_s: float) -> bool:
        """It is time for a look at the stages' counters."""
        return now_s - self._looked_s >= self._policy.look_s

    def is_uneven(self, counters: Sequence[StageCounters], now_s: float) -> bool:
        """Since the last look one stage computed so much longer than the others that another cut may be worthwhile."""
        elapsed_s, self._looked_s = now_s - self._looked_s, now_s
        before_s, self._busy_s = self._busy_s or [0.0] * len(counters), [stage.busy_s for stage in counters]
        busy_s = [max(0.0, now - before) for now, before in zip(self._busy_s, before_s, strict=True)]
        if max(busy_s) < _LEAST_BUSY_FRACTION * elapsed_s:
            return False  # too little to do for anything to matter
        self._shares = [busy / sum(busy_s) for busy in busy_s]
        if self._is_accepted():
            return False
        # The mean is what equally fast stages could have; half the gain leaves room for those that are not.
        is_uneven = max(self._shares) * len(self._shares) - 1 >= self._policy.gain_fraction / 2
        if not is_uneven:
            self._better_since_s = None
        return is_uneven

    def _is_accepted(self) -> bool:
        if not self._accepted:
            return False
        if max(abs(now - then) for now, then in zip(self._shares, self._accepted, strict=True)) <= _SAME_SHARES:
            return True
        self._accepted = []
        return False

    def is_lasting(self, better: BetterCut | None, now_s: float) -> bool:
        """A look at the items' times found this. Returns: whether it is worthwhile, and was for a while."""
        if better is None or better.gain_fraction < self._policy.gain_fraction:
            self._better_since_s = None
            return False
        if self._better_since_s is None:
            self._better_since_s = now_s
        return now_s - self._better_since_s >= self._patience_s

    def accept(self) -> None:
        """It was told, or cannot be helped: say no more of it until the stages' shares change."""
        self._accepted, self._better_since_s = self._shares, None

    def moved(self, now_s: float) -> None:
        """The cut is another one. The next move needs twice the patience: each costs a pause."""
        self._accepted, self._better_since_s, self._looked_s = [], None, now_s
        self._patience_s = min(2 * self._patience_s, _MOST_PATIENCE_TIMES * self._policy.patience_s)
