"""The outputs of one request for asyncio, as they come, for one reader who may be slow, or leave.

One idea: nothing is queued here. The reader is told that there is news, and fetches all of it when it comes to read.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from stageline.errors import StagelineError
from stageline.outputs import RequestOutput


class RequestStream(AsyncIterator[RequestOutput]):
    """Ends when the request is finished. Leaving it early aborts the request.

    Closing it, cancelling who waits for it and dropping it are all leaving.

    Args:
        fetch: gives all that is new.
        leave: aborts the request; called at most once, and not after its end.
        drop: the same, but called from any thread, by the garbage collector.
        timeout_s: how long it may take; None for as long as it wants.
        deadline_s: the end of that time, on the clock of who makes it.
    """

    def __init__(
        self,
        fetch: Callable[[], RequestOutput],
        leave: Callable[[], None],
        drop: Callable[[], None],
        timeout_s: float | None = None,
        deadline_s: float | None = None,
    ) -> None:
        self.timeout_s = timeout_s
        self.deadline_s = deadline_s
        self._fetch = fetch
        self._leave = leave
        self._drop = drop
        self._has_news = False
        self._is_over = False
        self._error: StagelineError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def notify(self) -> None:
        """There is news."""
        self._has_news = True
        self._wake()

    def fail(self, error: StagelineError) -> None:
        """There will be no more news; the reader gets this error."""
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        """Raises: RequestError if the request failed; WorkerLost, EngineLost, InternalError if the engine is gone."""
        while not self._has_news or self._error is not None:
            if self._is_over:
                raise StopAsyncIteration
            if self._error is not None:
                self._is_over = True
                raise self._error.with_traceback(None)
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            except BaseException:
                self.close()
                raise
        self._has_news = False
        output = self._fetch()
        self._is_over = output.is_finished
        return output

    def close(self) -> None:
        """The stream is at its end; what is not finished is aborted. May be called twice."""
        if not self._is_over:
            self._is_over = True
            self._has_news = False
            self._leave()
        self._wake()

    async def aclose(self) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._is_over:
            self._drop()
