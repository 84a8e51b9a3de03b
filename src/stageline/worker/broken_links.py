"""What a stage's process hears of its links to other machines that broke, on its way to the engine.

One idea: what was under way on a broken link may be lost, so the pipeline is; but when a neighbour has ended, others
know better why, and are given the time to say so first.
"""

from __future__ import annotations

from stageline.clock import Clock
from stageline.executor.messages import WorkerConfig
from stageline.links.tcp_address import destination_of
from stageline.links.wakeup import Wakeup

GRACE_S = 1.0


class BrokenLinks:
    """One thread hears of breaks, another one waits for `fd` and tells of the first.

    Attributes:
        due_s: when that is to be told; None if there is nothing to tell.
    """

    def __init__(self, config: WorkerConfig, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._bell = Wakeup()
        self._reason: str | None = None
        self.due_s: float | None = None

    @property
    def fd(self) -> int:
        """Becomes readable at a break."""
        return self._bell.fd

    def on_broken(self, address: str) -> None:
        """Args: address: where the link led. For the thread that hears of it."""
        if self._reason is None:
            self._reason = f"its link to {neighbour_at(self._config, address)} broke"
            self._bell.ring()

    def heard(self) -> None:
        self._bell.heard()
        self.due_s = self._clock.now_s() + GRACE_S

    def take_due(self) -> str | None:
        """What is to be told now, once."""
        if self.due_s is None or self._clock.now_s() < self.due_s:
            return None
        self.due_s = None
        return self._reason


def neighbour_at(config: WorkerConfig, address: str) -> str:
    """Who is at the other end of a TCP link."""
    where = destination_of(address)
    if address in (config.output_address, *config.more_output_addresses):
        return f"stage {config.stage_index + 1}, at {where},"
    if address in (config.token_output_address, *config.more_token_output_addresses):
        return f"stage 0, at {where},"
    return f"the head, at {where},"
