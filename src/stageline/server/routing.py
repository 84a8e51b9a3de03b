"""How a route is called: with the server's state, and with its errors turned into answers in one place."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

from stageline.server.errors import api_error_of, error_response
from stageline.server.state import ServerState

Handler = Callable[[ServerState, Request], Awaitable[Response]]
Endpoint = Callable[[Request], Awaitable[Response]]


def endpoint(state: ServerState, handler: Handler) -> Endpoint:
    """The handler as Starlette calls it."""

    async def answer(request: Request) -> Response:
        try:
            return await handler(state, request)
        except Exception as error:
            return error_response(api_error_of(error))

    answer.__name__ = handler.__name__
    answer.__doc__ = handler.__doc__
    return answer
