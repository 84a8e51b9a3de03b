"""The contract between the engine's loop and whatever runs the stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import zmq

from stageline.executor.messages import StageLoaded
from stageline.links.wakeup import Wakeup
from stageline.pipeline.item_times import PlannedMicrobatch, StageItemTimes
from stageline.pipeline.microbatch import Microbatch, MicrobatchLimits, MicrobatchResult, TokenMasks
from stageline.pipeline.partition import StageLayers
from stageline.timeline.span import Span
from stageline.timeline.stage_counters import StageCounters


@dataclass(frozen=True)
class CalibrationPlan:
    """What stages time before the layers are cut, and who cuts them.

    Args:
        layers: to be timed, the same on every stage.
        choose: the partition that follows from the stages' times, in order. May raise ConfigError.
    """

    planned: PlannedMicrobatch
    layers: tuple[int, ...]
    choose: Callable[[list[StageItemTimes]], tuple[StageLayers, ...]]


OnProgress = Callable[[int, int, int], None]
"""Called with (stage index, bytes of weights read, bytes in all) while stages load."""


class Executor(Protocol):
    """Runs the stages of one pipeline: `load`, `allocate`, then microbatches, then `close`.

    Every method but `close` raises WorkerLost if a stage dies, freezes or raises, and ConfigError if a stage finds that
    it cannot be set up as asked.

    Args:
        wakeup: any thread may ring it to end a `wait`.
    """

    wakeup: Wakeup

    def load(self, on_progress: OnProgress | None = None) -> list[StageLoaded]:
        """Start the stages and read their weights, all in parallel. Returns: one report per stage, in order."""
        ...

    @property
    def partition(self) -> tuple[StageLayers, ...]:
        """Which layers each stage holds; what a calibration says is known after `load`."""
        ...

    def allocate(self, limits: MicrobatchLimits, epoch: int = 0, first_microbatch: int = 0) -> None:
        """Make the KV cache on every stage, anew if there is one; nothing may be in flight.

        Args:
            epoch, first_microbatch: of the next microbatch; others are refused.
        """
        ...

    def repartition(self, stages: tuple[StageLayers, ...]) -> list[StageLoaded]:
        """Cut the layers otherwise, with nothing in flight: every stage keeps what it has of its layers and reads the
        others. There is no KV cache until the next `allocate`.

        Returns: one report per stage, as `load` does.
        """
        ...

    def launch(self, microbatch: Microbatch) -> None:
        """Send a microbatch into the pipeline; does not wait."""
        ...

    def send_masks(self, masks: TokenMasks) -> None:
        """Let the last stage have masks for rows of a microbatch that was launched; does not wait."""
        ...

    def before_sampling(self, send_masks: Callable[[], None]) -> None:
        """Call this at the last moment at which `send_masks` is in time, where that moment is known here."""
        ...

    def wake_on(self, source: zmq.Socket[bytes]) -> None:
        """Let `wait` end also when there is something to receive from this socket."""
        ...

    def wait(self, until_s: float | None = None) -> MicrobatchResult | None:
        """Wait for the next thing to happen, also while nothing is in flight; a lost stage is noticed then, too.

        Args:
            until_s: wait no longer than this, on the engine's clock.
        Returns: the next result, in the order of launching; None for anything else: a ring of `wakeup`, something to
            receive from a source of `wake_on`, the time, or counters or spans from all stages.
        """
        ...

    def ask_for_spans(self, since_s: float, most_per_stage: int | None = None) -> None:
        """Ask every stage for what it recorded since then, the newest of it if that is much; does not wait.

        A question before the answer to the one before is ignored.
        """
        ...

    def take_spans(self) -> list[Span] | None:
        """The answer to `ask_for_spans`, as far as the stages' rings remember, once; None as long as one owes it."""
        ...

    def collect_spans(self, since_s: float = 0.0) -> list[Span]:
        """Ask for all spans, and wait for them."""
        ...

    def collect_item_times(self, goes_on: bool = True) -> list[StageItemTimes]:
        """What each stage's items took since this was asked before, in order; the first call turns timing on.

        Args:
            goes_on: false turns it off again.
        """
        ...

    def ask_for_counters(self) -> None:
        """Ask every stage for its running totals; does not wait, and does not ask twice for one answer."""
        ...

    def take_counters(self) -> list[StageCounters] | None:
        """The answer to `ask_for_counters`, one per stage in order, once; None as long as a stage owes it."""
        ...

    def close(self) -> None:
        """Stop the stages and free what they hold; may be called twice, and after a loss."""
        ...
