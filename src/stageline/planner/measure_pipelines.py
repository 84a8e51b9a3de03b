"""The small pipelines of a calibration, which run in turns.

One idea: what is compared is measured within seconds of each other. All pipelines stand ready from the start, and one
that is idle takes no time of any core.
"""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Self

from stageline.checkpoint.model_spec import ModelSpec
from stageline.config.engine_config import EngineConfig
from stageline.planner.crowding import Turns
from stageline.planner.measure_run import RunningPipeline, SteadyDecodes, running_pipeline

MOST_PIPELINES = 3
_MOST_STAGES = 4
FILLED_ROWS = 4
"""Requests of a stage with which no core waits long for its next microbatch."""

_SINGLE_ROWS, _FURTHER_ROWS = (1, FILLED_ROWS, 12), (8, 16, 32, 64)
"""What the pipeline of one stage meets in every round, and in one of them."""

_POINTS_PER_RUN, _POINTS_PER_CROWDED_RUN = 4, 8
"""Stages that share cores get now more of them and now less, so it takes longer to see what they get."""


class CalibratingPipelines:
    """Pipelines of as many layers each, that run one after the other, once in each round.

    One of a single stage; one whose stages have cores of their own; and one of more stages than there are cores. The
    last two are left out where there is no such pipeline of few stages.

    Args:
        num_places: stages that can have cores of their own.
        point_s: for how long few requests decode on the single stage, in all rounds together.
    """

    def __init__(
        self,
        config: EngineConfig,
        spec: ModelSpec,
        num_layers: int,
        num_places: int,
        num_rounds: int,
        point_s: float,
    ) -> None:
        self._num_rounds, self._round_s = num_rounds, point_s / num_rounds
        self._found: dict[tuple[int, int], list[SteadyDecodes]] = {}
        self._num_bound, self._num_crowded = (2 if num_places > 1 else 0), num_places + 1
        if self._num_crowded > min(_MOST_STAGES, spec.num_layers):
            self._num_crowded = 0
        several = [
            (self._num_bound, _POINTS_PER_RUN, _SINGLE_ROWS[:2]),
            (self._num_crowded, _POINTS_PER_CROWDED_RUN, _SINGLE_ROWS),
        ]
        with ExitStack() as running:

            def start(num_stages: int, most_requests: int) -> RunningPipeline:
                num = max(num_layers, num_stages)
                return running.enter_context(running_pipeline(config, spec, num, num_stages, most_requests))

            self._single = start(1, _FURTHER_ROWS[-1])
            self._several = [
                (start(num_stages, _requests(rows[-1], num_stages)), num_points, rows)
                for num_stages, num_points, rows in several
                if num_stages
            ]
            self._running = running.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._running.close()

    def go_round(self, number: int) -> None:
        for rows in _SINGLE_ROWS:
            self._decode(self._single, rows, 1)
        for pipeline, num_points, each_rows in self._several:
            for rows in each_rows:
                self._decode(pipeline, rows, num_points)
        for rows in _FURTHER_ROWS[number :: self._num_rounds]:
            self._decode(self._single, rows, self._num_rounds)

    def _decode(self, pipeline: RunningPipeline, rows: int, num_points: int) -> None:
        num_requests = _requests(rows, pipeline.num_stages)
        decodes = pipeline.decode(num_requests, num_points * self._round_s)
        self._found.setdefault((pipeline.num_stages, rows), []).append(decodes)

    # ---- what was found ----

    @property
    def single(self) -> list[SteadyDecodes]:
        """One stage, with ever more requests."""
        return [SteadyDecodes.together(self._found[1, rows]) for rows in sorted((*_SINGLE_ROWS, *_FURTHER_ROWS))]

    @property
    def several(self) -> tuple[SteadyDecodes, SteadyDecodes]:
        """Several stages with one request, and with several each; with cores of their own if there are so many."""
        return self._pair(self._num_bound or self._num_crowded)

    @property
    def crowded(self) -> tuple[SteadyDecodes, SteadyDecodes] | None:
        return self._pair(self._num_crowded) if self._num_crowded else None

    def _pair(self, num_stages: int) -> tuple[SteadyDecodes, SteadyDecodes]:
        lone, loaded = (SteadyDecodes.together(self._found[num_stages, rows]) for rows in _SINGLE_ROWS[:2])
        return lone, loaded

    @property
    def bound_turns(self) -> Turns | None:
        """With one request."""
        return self._turns(self._num_bound, 1) if self._num_bound else None

    @property
    def crowded_turns(self) -> list[Turns]:
        return [self._turns(self._num_crowded, rows) for rows in _SINGLE_ROWS]

    def _turns(self, num_stages: int, rows: int) -> Turns:
        return Turns(rows, self._found[1, rows], self._found[num_stages, rows])


def _requests(rows: int, num_stages: int) -> int:
    """So many for each stage, but one alone."""
    return rows if rows == 1 else rows * num_stages
