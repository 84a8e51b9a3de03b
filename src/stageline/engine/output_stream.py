"""The outputs of some requests, as they come, for one who may stop listening at any moment.

One idea: whoever holds the stream holds the requests. They are aborted when it is closed, when it is left with an error
and when it is dropped, also before its first output was asked for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from types import TracebackType

from stageline.engine.frontend import Frontend, errors_that_name_the_prompt
from stageline.outputs import RequestOutput


class OutputStream(Iterator[RequestOutput]):
    """Gives each request's output whenever it has grown; ends when all are finished.

        with llm.stream("Once upon a time") as outputs:
            for output in outputs:
                print(output.outputs[0].new_text, end="")
    """

    def __init__(self, frontend: Frontend, request_ids: Iterable[str]) -> None:
        self._frontend = frontend
        self._request_ids = list(request_ids)
        self._pending = set(self._request_ids)
        self._ready: deque[RequestOutput] = deque()

    def __next__(self) -> RequestOutput:
        """Raises: RequestError if a request failed, WorkerLost if a stage is lost; the stream is closed then."""
        while not self._ready:
            if not self._pending:
                raise StopIteration
            self._fetch()
        return self._ready.popleft()

    def _fetch(self) -> None:
        try:
            self._raise_failure()
            outputs = self._frontend.take(self._pending)
        except BaseException:
            self.close()
            raise
        self._ready.extend(outputs)
        self._pending.difference_update(output.request_id for output in outputs if output.is_finished)

    def _raise_failure(self) -> None:
        failed = self._frontend.take_failure(self._pending)
        if failed is not None:
            request_id, error = failed
            with errors_that_name_the_prompt(self._request_ids.index(request_id), len(self._request_ids)):
                raise error

    def close(self) -> None:
        """Abort what is not finished. The stream is at its end; may be called at any time and twice."""
        pending, self._pending = self._pending, set()
        self._ready.clear()
        self._frontend.abort(pending)

    def __enter__(self) -> OutputStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if self._pending:
            self._frontend.abandon(self._pending)
