"""The application: every route, and what each request passes on its way in.

One idea: what refuses requests stands outside of what serves them, the cheapest first: too many headers, no key, a
model that is not there yet. None of that reads a body.
"""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

import stageline
from stageline.config.serve_config import ServeConfig
from stageline.engine.async_llm import AsyncLLM
from stageline.server import (
    chat,
    completions,
    dashboard,
    debug,
    docs_page,
    metrics,
    models,
    openapi,
    responses,
    tokenize,
)
from stageline.server.auth import RequireKey, path_of
from stageline.server.errors import api_error_of, error_response, on_error, on_http_exception
from stageline.server.http_counters import CountRequests, HttpCounters
from stageline.server.limits import LimitHeaders
from stageline.server.request_record import RequestIds
from stageline.server.state import ServerState

_MODULES = (chat, completions, models, responses, tokenize, debug, dashboard)
# These tell what is the matter while the model loads; all others wait for it.
_ALWAYS_ANSWERED = frozenset(
    {"/", "/health", "/ping", "/version", "/metrics", "/load", "/openapi.json", "/docs", dashboard.PATH}
)


def create_app(llm: AsyncLLM, config: ServeConfig, writes_advice: bool = True) -> Starlette:
    """The server as an ASGI application. It does not close `llm`.

    Args:
        writes_advice: into the log; of several processes that serve one engine, one does.
    """
    state = ServerState.of(llm, config, stageline.__version__, writes_advice)
    counters = HttpCounters()
    routes = _routes(state, counters)
    counters.know(routes)
    app = Starlette(
        routes=routes,
        middleware=[Middleware(CountRequests, counters), *_middleware(state)],
        exception_handlers={HTTPException: on_http_exception, Exception: on_error},
    )
    app.router.redirect_slashes = False
    app.state.server = state
    return app


def _routes(state: ServerState, counters: HttpCounters) -> list[Route]:
    described = [one for module in (*_MODULES, metrics) for one in module.OPERATIONS]
    served = [route for module in _MODULES for route in module.routes(state)] + metrics.routes(state, counters)
    return [*served, *openapi.routes(state, described), *docs_page.routes(state)]


def _middleware(state: ServerState) -> list[Middleware]:
    """The first is the outermost."""
    config = state.config
    layers = [Middleware(RequestIds, uses_header=config.enable_request_id_headers)]
    if config.allowed_origins:
        # Before the key is looked at: browsers ask what is allowed without it.
        layers.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(config.allowed_origins),
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=["X-Request-Id", "Retry-After"],
            )
        )
    layers.append(Middleware(LimitHeaders, config.max_header_bytes, config.max_body_bytes))
    if config.api_key:
        layers.append(Middleware(RequireKey, config.api_key))
    layers.append(Middleware(_WaitForModel, state))
    return layers


class _WaitForModel:
    """Middleware: 503 while the pipeline cannot answer, whatever is asked of it."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and path_of(scope) not in _ALWAYS_ANSWERED:
            try:
                self._state.llm.check_takes_requests()
            except Exception as error:
                await error_response(api_error_of(error))(scope, receive, send)
                return
        await self._app(scope, receive, send)
