"""Counts what this process answers over HTTP: by route, method and status, and how long it took.

One idea: a label has few values, whatever clients send. Paths count under the route that they match, unknown ones
together, and so do methods.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence

from prometheus_client.metrics_core import Metric
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stageline.clock import Clock, MonotonicClock
from stageline.server.auth import path_of
from stageline.server.exposition import Exposition
from stageline.timeline.histogram import HistogramCounter

_METHODS = frozenset({"GET", "HEAD", "POST", "OPTIONS", "PUT", "PATCH", "DELETE"})
_OTHER = "other"
_UNANSWERED = "499"
"""The status of a request whose client left before there was one, as web servers log it."""

API_PROCESS = {"api_process": f"{os.getpid()}"}
"""The label of what is true of this process alone: others may answer on the same port."""

_FAILED = "500"

_DURATION_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class HttpCounters:
    """This process's totals. Belongs to its event loop."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock or MonotonicClock()
        self._routes: list[Route] = []
        self._plain_paths: set[str] = set()
        self._answered: Counter[tuple[str, str, str]] = Counter()
        self._open: Counter[str] = Counter()
        self._duration_s: dict[str, HistogramCounter] = {}

    def know(self, routes: Sequence[Route]) -> None:
        """Count these by their paths; what matches none counts as one."""
        self._routes = [route for route in routes if "{" in route.path]
        self._plain_paths = {route.path for route in routes if "{" not in route.path}

    @property
    def num_open(self) -> int:
        """Requests that are being answered now."""
        return self._open.total()

    def route_of(self, scope: Scope) -> str:
        """The path of the route that the request is for."""
        if (path := path_of(scope)) in self._plain_paths:
            return path
        return next((route.path for route in self._routes if route.matches(scope)[0] != Match.NONE), _OTHER)

    def opened(self, route: str) -> None:
        self._open[route] += 1

    def closed(self, route: str, method: str, status: str, duration_s: float) -> None:
        self._open[route] -= 1
        self._answered[route, method if method in _METHODS else _OTHER, status] += 1
        if route not in self._duration_s:
            self._duration_s[route] = HistogramCounter(_DURATION_BOUNDS_S)
        self._duration_s[route].observe(duration_s)

    def families(self) -> list[Metric]:
        """Labelled with the process: others on the same port count for themselves."""
        page = Exposition(API_PROCESS)
        page.counter(
            "http_requests",
            "Requests answered.",
            [
                ({"handler": route, "method": method, "status": status}, count)
                for (route, method, status), count in self._answered.items()
            ],
        )
        page.gauge(
            "http_requests_in_progress",
            "Requests that are being answered now.",
            [({"handler": route}, count) for route, count in self._open.items()],
        )
        page.histogram(
            "http_request_duration_seconds",
            "From the end of a request's headers to the end of its answer.",
            [({"handler": route}, durations.snapshot()) for route, durations in self._duration_s.items()],
        )
        return page.families


class CountRequests:
    """Middleware: the outermost, so that what others refuse is counted, too."""

    def __init__(self, app: ASGIApp, counters: HttpCounters) -> None:
        self._app = app
        self._counters = counters

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        counters = self._counters
        route, start_s = counters.route_of(scope), counters.clock.now_s()
        status = _UNANSWERED

        async def send_and_look(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        counters.opened(route)
        try:
            await self._app(scope, receive, send_and_look)
        except Exception:
            # Who is further out turns it into an answer.
            status = _FAILED if status == _UNANSWERED else status
            raise
        finally:
            counters.closed(route, scope["method"], status, counters.clock.now_s() - start_s)
