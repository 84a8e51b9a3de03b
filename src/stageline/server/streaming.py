"""Server-sent events, and answers that end when their reader leaves.

One idea: nothing is sent before the first event is there, so that whatever goes wrong until then is an answer with the
right status; later it is an event. Who leaves is noticed at once, and everything that was running for him is cancelled.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from stageline.server.errors import FieldNames, api_error_of, error_event, error_response

DONE = b"data: [DONE]\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_Result = TypeVar("_Result")
_encoder = msgspec.json.Encoder()


def encode_event(data: msgspec.Struct) -> bytes:
    return b"data: " + _encoder.encode(data) + b"\n\n"


class EventStream(Response):
    """Args:
    events: pieces of the body, each with one or more whole events; closed when the reader leaves.
    fields: what the route calls the engine's fields, for errors.
    ending: sent after an error in the middle of the stream.
    """

    def __init__(
        self, events: AsyncGenerator[bytes, None], fields: FieldNames | None = None, ending: bytes = DONE
    ) -> None:
        super().__init__()
        self._events = events
        self._fields = fields
        self._ending = ending

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await until_disconnect(receive, self._send_all(scope, receive, send))

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_started = False
        try:
            async with aclosing(self._events) as events:
                async for event in events:
                    if not has_started:
                        has_started = True
                        await send({"type": "http.response.start", "status": 200, "headers": list(_HEADERS)})
                    await send({"type": "http.response.body", "body": event, "more_body": True})
        except Exception as error:
            told = api_error_of(error, self._fields)
            if not has_started:
                await error_response(told)(scope, receive, send)
                return
            await send({"type": "http.response.body", "body": error_event(told) + self._ending, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, _Result]) -> _Result | None:
    """The work's result; None, with the work cancelled, if the client went away before it was done."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else None
    finally:
        leaving.cancel()
        if not working.done():
            working.cancel()
            # Its requests are aborted when this is over, and not before.
            await asyncio.wait({working})
        if not working.cancelled():
            working.exception()  # nobody may be left to ask for it


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
