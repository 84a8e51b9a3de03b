"""A pipeline's pace from its stages' times: the ring, the cycle, what a burst and a prompt take.

One idea: a token needs one way around the ring (all stages, all hops, sampling, the way back) and the slowest stage
needs its time for every microbatch in flight. Whichever is longer is the cycle, in which every request gets one token.

Sources: makespans are those of a permutation flow shop, C[i, k] = max(C[i-1, k], C[i, k-1]) + p[i, k].
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Ring:
    """One microbatch's way around.

    Args:
        stages_s: [stages] of this microbatch.
        hops_s: [stages - 1] after each stage but the last.
        wires_s: [stages - 1] how long a hop occupies its wire; two microbatches cannot share it.
        sampling_s, return_s: at the end, and the token's way back to the first stage.
    """

    stages_s: tuple[float, ...]
    hops_s: tuple[float, ...] = ()
    wires_s: tuple[float, ...] = ()
    sampling_s: float = 0.0
    return_s: float = 0.0

    @property
    def ring_s(self) -> float:
        return sum(self.stages_s) + sum(self.hops_s) + self.sampling_s + self.return_s

    @property
    def slowest_s(self) -> float:
        """What the pace cannot exceed: the slowest stage, or a wire that is slower still."""
        return max((*self.stages_s, *self.wires_s))

    @property
    def slowest_stage(self) -> int:
        return self.stages_s.index(max(self.stages_s))

    def cycle_s(self, num_microbatches: int) -> float:
        """In which each of the microbatches in flight gets its next token: max(R, M·τ_max). It is their TPOT."""
        return max(self.ring_s, num_microbatches * self.slowest_s)

    @property
    def filling_microbatches(self) -> int:
        """The fewest in flight that keep the slowest stage busy: ceil(R / τ_max)."""
        return math.ceil(self.ring_s / self.slowest_s - 1e-9)

    def idle_fraction(self, num_microbatches: int) -> float:
        """Of the slowest stage's time, with so many in flight."""
        return max(0.0, 1.0 - num_microbatches * self.slowest_s / self.ring_s)


def makespan_s(microbatches_s: Sequence[Sequence[float]], hops_s: Sequence[Sequence[float]] | None = None) -> float:
    """From the first microbatch's start to the last one's end, all stages free at first.

    Args:
        microbatches_s: [microbatches][stages] in order.
        hops_s: [microbatches][stages - 1] after each stage but the last; None for none.
    """
    num_stages = len(microbatches_s[0])
    free_s = [0.0] * num_stages
    for index, stages_s in enumerate(microbatches_s):
        arrives_s = 0.0
        for stage, time_s in enumerate(stages_s):
            free_s[stage] = max(free_s[stage], arrives_s) + time_s
            arrives_s = free_s[stage]
            if hops_s is not None and stage < num_stages - 1:
                arrives_s += hops_s[index][stage]
    return free_s[-1]


def bubble_fraction(num_microbatches: int, num_stages: int) -> float:
    """Of a burst of equal microbatches through equal stages: (P - 1)/(M + P - 1)."""
    return (num_stages - 1) / (num_microbatches + num_stages - 1)


def pipeline_beats_sharding(num_layers: int, all_reduce_time_s: float, weights_s: float, num_devices: int) -> bool:
    """Whether n stages decode faster than n shards: 2·L·t_AR > w·(1 - 1/n).

    Args:
        weights_s: w, one device's time to read all weights.
    """
    return 2 * num_layers * all_reduce_time_s > weights_s * (1 - 1 / num_devices)
