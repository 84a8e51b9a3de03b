"""One run: sends what was planned when it was planned, and gathers what came of it.

One idea: an open loop does not wait for answers, so a slow server gets no easier load; a closed loop keeps a number of
requests under way. Both are the same tasks behind one gate.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from stageline.loadgen.outcome import Outcome

if TYPE_CHECKING:
    from stageline.loadgen.client import LoadClient


@dataclass(frozen=True)
class PreparedRequest:
    """A request whose body is ready; `at_s` from the start of the run, None for as soon as there is room."""

    body: bytes
    at_s: float | None


@dataclass(frozen=True)
class RunResult:
    """Args:
    duration_s: from the first request to the last answer.
    num_planned: requests that should have been sent; fewer outcomes if the run was stopped.
    cpu_s: what this process computed meanwhile, in user and system time.
    """

    outcomes: tuple[Outcome, ...]
    duration_s: float
    num_planned: int
    cpu_s: float


class LoadRun:
    """Args:
    max_concurrency: most requests under way; None for no limit.
    on_done: called after each.
    """

    def __init__(
        self,
        client: LoadClient,
        requests: Sequence[PreparedRequest],
        max_concurrency: int | None,
        on_done: Callable[[], object] | None = None,
    ) -> None:
        self._client = client
        self._requests = requests
        self._gate = nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
        self._on_done = on_done
        self._outcomes: list[Outcome] = []
        self._timers: list[asyncio.TimerHandle] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_over = asyncio.Event()
        self._error: BaseException | None = None

    async def run(self) -> RunResult:
        """Return when every request has its outcome, or `stop` was called.

        Raises: what was raised instead of giving an outcome, once the others were given up.
        """
        loop = asyncio.get_running_loop()
        before_s, self._start_s = _cpu_s(), loop.time()
        for request in self._requests:
            if request.at_s is None:
                self._launch(request)
            else:
                self._timers.append(loop.call_at(self._start_s + request.at_s, self._launch, request))
        if self._requests:
            await self._is_over.wait()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._error is not None:
            raise self._error
        duration_s = max((outcome.ended_s for outcome in self._outcomes), default=0.0)
        return RunResult(tuple(self._outcomes), duration_s, len(self._requests), _cpu_s() - before_s)

    def stop(self) -> None:
        """Send no more, and give up what is under way: it has no outcome."""
        for timer in self._timers:
            timer.cancel()
        for task in self._tasks:
            task.cancel()
        self._is_over.set()

    def _launch(self, request: PreparedRequest) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(request))
        self._tasks.add(task)
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # Its outcome would be waited for without end.
            self._error = self._error or error
            self.stop()

    async def _serve(self, request: PreparedRequest) -> None:
        async with self._gate:
            self._outcomes.append(await self._client.ask(request.body, self._start_s, request.at_s))
        if self._on_done is not None:
            self._on_done()
        if len(self._outcomes) == len(self._requests):
            self._is_over.set()


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
