"""What a stage's process hears of its links to other machines that broke, on its way to the engine.

One idea: what was under way on a broken link may be lost, so the pipeline is. Which end is to blame, the engine finds
out: it hears of both.
"""

from __future__ import annotations

from stageline.executor.messages import Failed, WorkerConfig
from stageline.links.tcp_address import destination_of
from stageline.links.wakeup import Wakeup


class BrokenLinks:
    """One thread hears of breaks, another one waits for `fd` and tells of the first."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._bell = Wakeup()
        self._first: str | None = None
        self._is_told = False

    @property
    def fd(self) -> int:
        """Becomes readable at a break."""
        return self._bell.fd

    def on_broken(self, address: str) -> None:
        """Args: address: where the link led. For the thread that hears of it."""
        if self._first is None:
            self._first = address
            self._bell.ring()

    def take(self) -> Failed | None:
        """What is to be told now, once."""
        self._bell.heard()
        if self._first is None or self._is_told:
            return None
        self._is_told = True
        return link_failed(self._config, self._first, "broke")


def link_failed(config: WorkerConfig, address: str, how: str) -> Failed:
    """The news of a link that leads to this address, and how it is no way to a neighbour."""
    link_to, neighbour = neighbour_at(config, address)
    message = f"its link to {neighbour} {how}"
    return Failed(config.stage_index, message, "", is_config_error=False, rank=config.rank, link_to=link_to)


def neighbour_at(config: WorkerConfig, address: str) -> tuple[int | None, str]:
    """Who is at the other end of a TCP link. Returns: the stage, None for the head, which runs the engine; in words."""
    where = destination_of(address)
    if address in (config.output_address, *config.more_output_addresses):
        return config.stage_index + 1, f"stage {config.stage_index + 1}, at {where},"
    if address in (config.token_output_address, *config.more_token_output_addresses):
        return 0, f"stage 0, at {where},"
    return None, f"the head, at {where},"
