"""A pipeline in virtual time, for laws about waiting: stages whose times are known exactly, and no machine's noise.

The scheduler is the real one; only the stages are arithmetic. A stage runs microbatches in order, each for the time its
costs say, so a microbatch's way through all of them is known when it is launched.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from stageline.cost.stage_time import MicrobatchShape, StageTimeCosts
from stageline.pipeline.in_flight import InFlight
from stageline.pipeline.microbatch import Microbatch, MicrobatchResult
from stageline.request import EngineRequest
from stageline.scheduler.scheduler import Scheduler

# One of two stages of a small model on one core, about as measured.
STAGE_COSTS = StageTimeCosts(
    fixed_s=2.5e-3, token_s=3.5e-4, prefill_attention_s=1.2e-8, decode_s=8e-5, context_token_s=3e-7
)


@dataclass
class Record:
    """What a client saw of a request, on the virtual clock."""

    arrival_s: float
    token_times_s: list[float] = field(default_factory=list)
    is_finished: bool = False

    @property
    def time_to_first_token_s(self) -> float:
        return self.token_times_s[0] - self.arrival_s

    def gaps_s(self, start_s: float = 0.0, end_s: float = float("inf")) -> list[float]:
        """Times between consecutive tokens, of those that came between the two times."""
        return [after - before for before, after in pairwise(self.token_times_s) if start_s < after <= end_s]


class VirtualPipeline:
    """The engine's loop over virtual stages.

    Args:
        costs: of each stage.
        hop_s: from one stage to the next, from the engine to the first, and from the last back.
        noise: drawn for each stage and microbatch, its time is multiplied by it; a machine that others use as well.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        costs: Sequence[StageTimeCosts],
        hop_s: float = 2e-4,
        noise: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self.scheduler = scheduler
        self.now_s = 0.0
        self.records: dict[str, Record] = {}
        self.launched: list[Microbatch] = []
        self._costs = costs
        self._hop_s = hop_s
        self._noise = noise
        self._free_s = [0.0] * len(costs)
        self._ends_s: dict[int, float] = {}
        self._in_flight = InFlight(scheduler.most_in_flight)
        self._results: deque[tuple[float, MicrobatchResult]] = deque()
        self._arrivals: deque[tuple[float, EngineRequest]] = deque()

    def arrive(self, request: EngineRequest, at_s: float | None = None) -> None:
        """A request comes now, or later; in order of time."""
        self._arrivals.append((self.now_s if at_s is None else at_s, request))

    def run(self, until_s: float = float("inf")) -> None:
        """Go on until that time, or until everything has ended."""
        while self.step(until_s):
            pass

    def step(self, until_s: float = float("inf")) -> bool:
        """Take one event, unless it is after `until_s`. False if it is, or if there is none."""
        self._fill()
        arrival_s = self._arrivals[0][0] if self._arrivals else float("inf")
        result_s = self._results[0][0] if self._results else float("inf")
        if min(arrival_s, result_s) > until_s or min(arrival_s, result_s) == float("inf"):
            assert self._results or self._arrivals or not self.scheduler.num_unfinished, "nothing can be scheduled"
            return False
        if arrival_s <= result_s:
            self.now_s, request = self._arrivals.popleft()
            self.records[request.request_id] = Record(self.now_s)
            self.scheduler.add(request)
        else:
            self.now_s, result = self._results.popleft()
            for news in self.scheduler.completed(self._in_flight.completed(result), result, self.now_s):
                update = news.update(self.now_s)
                record = self.records[update.request_id]
                record.token_times_s += [self.now_s] * len(update.token_ids)
                record.is_finished = update.finish_reason is not None
        return True

    def _fill(self) -> None:
        self._in_flight.window = self.scheduler.most_in_flight
        while self._in_flight.has_room and (microbatch := self.scheduler.schedule(self.now_s)) is not None:
            self._in_flight.launched(microbatch)
            self.launched.append(microbatch)
            self._launch(microbatch)

    def _launch(self, microbatch: Microbatch) -> None:
        shape = MicrobatchShape.of_rows(microbatch.num_computed_tokens, microbatch.num_scheduled_tokens)
        times_s = [costs.predict_s(shape) * self._noise() for costs in self._costs]
        there_s = self.now_s + self._hop_s
        if microbatch.pending_rows:
            token_hop_s = self._hop_s if len(self._costs) > 1 else 0.0
            there_s = max(there_s, self._ends_s[microbatch.oldest] + token_hop_s)
        for index, time_s in enumerate(times_s):
            self._free_s[index] = max(there_s, self._free_s[index]) + time_s
            there_s = self._free_s[index] + self._hop_s
        self._ends_s[microbatch.number] = self._free_s[-1]
        tokens = [1] * len(microbatch.sampling_rows)
        result = MicrobatchResult(microbatch.epoch, microbatch.number, tokens, [], [], sum(times_s), max(times_s))
        self._results.append((there_s, result))
