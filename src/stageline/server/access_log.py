"""One line per answered request: who asked, what came of it, what it cost. Never what was asked or answered."""

from __future__ import annotations

import logging
import time
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stageline.server.auth import path_of
from stageline.server.request_record import record_of

logger = logging.getLogger(__name__)

# Asked every few seconds by machines: of interest only to who looks for it.
_QUIET_PATHS = frozenset({"/health", "/ping", "/metrics", "/load"})


class AccessLog:
    """Middleware, outside of everything else."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin_s = time.monotonic()
        answer = _Answer()

        async def send_and_note(message: Message) -> None:
            answer.note(message)
            await send(message)

        try:
            await self._app(scope, receive, send_and_note)
        finally:
            level = logging.DEBUG if path_of(scope) in _QUIET_PATHS else logging.INFO
            if logger.isEnabledFor(level):
                logger.log(level, "%s", _line(scope, answer, time.monotonic() - begin_s))


class _Answer:
    status = 0
    is_complete = False

    def note(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message["type"] == "http.response.body":
            self.is_complete = not message.get("more_body", False)


def _line(scope: Scope, answer: _Answer, duration_s: float) -> str:
    record = record_of(scope)
    status: Any = answer.status or "no answer"
    if answer.status and not answer.is_complete:
        status = f"{answer.status}, broken off"
    client = (scope.get("client") or ["a client"])[0]
    took = f"{duration_s * 1000:.0f} ms"
    # A path is the client's text: nothing in it may look like a line of this log.
    path = scope["path"][:200].encode("unicode_escape").decode()
    tokens = f", {record.num_prompt_tokens} + {record.num_output_tokens} tokens" if record.num_prompt_tokens else ""
    return f"{client} {scope['method']} {path}: {status}{tokens}, {took}, {record.request_id}"
