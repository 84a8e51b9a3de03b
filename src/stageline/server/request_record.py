"""What is known of one HTTP request while it is answered: its id, and the tokens that it cost.

One idea: the record hangs in the ASGI scope, so that whoever writes the log line or counts requests reads it at the
end, whatever the route was.
"""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_HEADER = "x-request-id"
_ACCEPTED_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_SCOPE_KEY = "stageline.request"


@dataclass
class RequestRecord:
    """Args:
    request_id: the client's, if it sent one that is fit for a header and a log; otherwise drawn.
    num_prompt_tokens, num_output_tokens: so far; 0 for routes that generate nothing.
    """

    request_id: str
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0


def record_of(scope: Scope) -> RequestRecord:
    """The request's record; a fresh one if no middleware made it."""
    record = scope.setdefault(_SCOPE_KEY, RequestRecord(_drawn_id()))
    assert isinstance(record, RequestRecord)
    return record


class RequestIds:
    """Middleware: makes the record and, if the operator wants it, takes and returns X-Request-Id."""

    def __init__(self, app: ASGIApp, uses_header: bool) -> None:
        self._app = app
        self._uses_header = uses_header

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = RequestRecord((self._uses_header and _sent_id(scope)) or _drawn_id())
        scope[_SCOPE_KEY] = record

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[_HEADER] = record.request_id
            await send(message)

        await self._app(scope, receive, send_with_id if self._uses_header else send)


def _sent_id(scope: Scope) -> str | None:
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            text = value.decode("latin-1")
            return text if _ACCEPTED_ID.fullmatch(text) else None
    return None


def _drawn_id() -> str:
    return uuid.uuid4().hex
