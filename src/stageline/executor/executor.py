"""The contract between the engine's loop and whatever runs the stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import zmq

from stageline.executor.messages import StageLoaded
from stageline.links.wakeup import Wakeup
from stageline.pipeline.microbatch import Microbatch, MicrobatchLimits, MicrobatchResult
from stageline.timeline.span import Span

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

    def allocate(self, limits: MicrobatchLimits) -> None:
        """Make the KV cache on every stage."""
        ...

    def launch(self, microbatch: Microbatch) -> None:
        """Send a microbatch into the pipeline; does not wait."""
        ...

    def wake_on(self, source: zmq.Socket[bytes]) -> None:
        """Let `wait` end also when there is something to receive from this socket."""
        ...

    def wait(self, until_s: float | None = None) -> MicrobatchResult | None:
        """Wait for the next thing to happen, also while nothing is in flight; a lost stage is noticed then, too.

        Args:
            until_s: wait no longer than this, on the engine's clock.
        Returns: the next result, in the order of launching; None for anything else: a ring of `wakeup`, something to
            receive from a source of `wake_on`, the time, or counters from all stages.
        """
        ...

    def collect_spans(self, since_s: float = 0.0) -> list[Span]:
        """What the stages recorded, as far as their rings remember."""
        ...

    def close(self) -> None:
        """Stop the stages and free what they hold; may be called twice, and after a loss."""
        ...
