"""Writes into the log what the dashboard would advise, for operators who do not look at it.

One idea: it looks only a while after requests came, so an idle server does nothing; and only what is new is said.
"""

from __future__ import annotations

import asyncio
import logging

from stageline.engine.advice import NewAdvice
from stageline.engine.async_llm import AsyncLLM
from stageline.errors import StagelineError
from stageline.server.pipeline_view import Diagnoser

logger = logging.getLogger(__name__)

_EVERY_S = 20.0
_PATIENCE_S = 10.0


class AdviceLog:
    """One per process that answers requests; only one of them should be told of requests.

    Args:
        every_s: between two looks, and from the first request to the first.
    """

    def __init__(self, llm: AsyncLLM, every_s: float = _EVERY_S) -> None:
        self._llm = llm
        self._every_s = every_s
        self._diagnosers = [Diagnoser(llm, replica) for replica in range(llm.num_replicas)]
        self._new = [NewAdvice() for _ in self._diagnosers]
        self._timer: asyncio.TimerHandle | None = None
        self._look: asyncio.Task[None] | None = None

    def request_came(self) -> None:
        """There will be something to look at."""
        if self._timer is None and self._look is None:
            self._timer = asyncio.get_running_loop().call_later(self._every_s, self._begin)

    def _begin(self) -> None:
        self._timer = None
        self._look = asyncio.get_running_loop().create_task(self.look())
        self._look.add_done_callback(self._end)

    def _end(self, look: asyncio.Task[None]) -> None:
        self._look = None
        if not look.cancelled() and (error := look.exception()) is not None:
            logger.error("the log of advice failed", exc_info=error)

    async def look(self) -> None:
        """Say what is new, and look again later if requests still run."""
        replicas = range(len(self._diagnosers))
        num_running = await asyncio.gather(*(self._look_at(replica) for replica in replicas))
        if any(num_running):
            self._timer = asyncio.get_running_loop().call_later(self._every_s, self._begin)

    async def _look_at(self, replica: int) -> int:
        """Returns: how many requests run there."""
        try:
            async with asyncio.timeout(_PATIENCE_S):
                stats = await self._llm.stats(replica)
                diagnosis = await self._diagnosers[replica].diagnosis(stats)
        except (TimeoutError, StagelineError):
            return 0  # whoever asks for /health hears of it
        which = f"replica {replica}: " if len(self._diagnosers) > 1 else ""
        for advice in self._new[replica].among(diagnosis.advice):
            logger.warning("%s%s", which, advice.text)
        return stats.scheduler.num_running
