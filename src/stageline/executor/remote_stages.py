"""The stages of a pipeline that other machines run, as the executor sees them.

One idea: they are the same processes as here, and say the same. Only the way there differs: all of them share one
socket of the engine's, and whoever let the machines in also starts and ends the processes on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import zmq

from stageline.executor.messages import LinkAccess, WorkerConfig
from stageline.pipeline.rank_layout import StageRank


class Channel(Protocol):
    """Where messages to one thread of a stage's process go."""

    def send(self, frame: bytes, /) -> Any: ...


class RemoteStages(Protocol):
    """Known before anything starts: which stages they are, and where each is reached."""

    @property
    def num_local(self) -> int:
        """The stages before this one run here, the others elsewhere."""
        ...

    @property
    def access(self) -> LinkAccess:
        """How links between machines are protected."""
        ...

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """Becomes readable when there may be something to `receive`."""
        ...

    @property
    def own_input(self) -> str:
        """Where what other machines send to this one's first stage arrives, at its first rank."""
        ...

    def input_of(self, stage_index: int) -> str:
        """Where the stage before reaches this one's first rank: an address of another machine."""
        ...

    def machine_of(self, stage_index: int) -> str:
        """A name for the machine it runs on; empty for this one. Memory is shared only within one."""
        ...

    def describe_machine(self, stage_index: int) -> str:
        """The machine it runs on, this one too, and which stages that runs, for messages."""
        ...

    def is_machine_connected(self, stage_index: int) -> bool:
        """Whether the machine it runs on has a connection to this one, as far as this one knows by now."""
        ...

    def due_s(self) -> float | None:
        """When `receive` is to be called again although there is nothing to read; None for never."""
        ...

    def start(self, configs: Sequence[WorkerConfig]) -> None:
        """Start these ranks, of all stages that are not here, in order; what a machine knows better, it fills in."""
        ...

    def control(self, place: StageRank) -> Channel:
        """To the thread that computes; in order, and only after the rank has said something."""
        ...

    def responder(self, place: StageRank) -> Channel:
        """To the thread that is never busy. What is sent before that is there gets lost."""
        ...

    def receive(self) -> bytes | None:
        """A stage's next message; None if there is none now. Raises: WorkerLost if one, or its machine, is gone."""
        ...

    def end(self, patience_s: float) -> None:
        """End the processes, those at once that have not left after `patience_s`; does not wait. Can be repeated."""
        ...
