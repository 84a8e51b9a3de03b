"""/metrics and /load answer whatever the engine does; HTTP requests count under few labels, whatever clients send."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from stageline.engine.stats import EngineStats, StatsCollector
from stageline.errors import WorkerLost
from stageline.server import metrics
from stageline.server.http_counters import CountRequests, HttpCounters
from tests.unit.stats_examples import MAX_MODEL_LEN, snapshot


class Engine:
    """As AsyncLLM, as far as metrics look at it."""

    healthy_replicas: Sequence[int] = (0,)

    async def stats(self, replica: int) -> EngineStats:
        return snapshot(StatsCollector(MAX_MODEL_LEN, now_s=0.0))


class Loading(Engine):
    healthy_replicas = ()


class Lost(Engine):
    async def stats(self, replica: int) -> EngineStats:
        raise WorkerLost(1, "its process 7 was killed by SIGKILL")


class Frozen(Engine):
    async def stats(self, replica: int) -> EngineStats:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")


class Silent(Engine):
    """Known to be: nobody waits for it."""

    healthy_replicas = ()

    async def stats(self, replica: int) -> EngineStats:
        raise AssertionError("it is asked though it is known to be silent")


@dataclass
class State:
    llm: Engine
    model_names: tuple[str, ...] = ("m", "alias")


def application(engine: Engine) -> Starlette:
    counters = HttpCounters()
    state: Any = State(engine)

    async def item(request: Any) -> PlainTextResponse:
        return PlainTextResponse("found", status_code=201)

    async def broken(request: Any) -> PlainTextResponse:
        raise RuntimeError("a bug")

    own = [Route("/items/{name:path}", item, methods=["POST"]), Route("/broken", broken)]
    routes = [*metrics.routes(state, counters), *own]
    counters.know(routes)
    return Starlette(routes=routes, middleware=[Middleware(CountRequests, counters)])


async def get(app: Starlette, *paths: tuple[str, str]) -> list[httpx.Response]:
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        return [await client.request(method, path) for method, path in paths]


def samples(response: httpx.Response) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    assert response.status_code == 200
    return {
        (sample.name, tuple(sorted((k, v) for k, v in sample.labels.items() if k != "api_process"))): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


@pytest.mark.parametrize(
    "engine", [Loading(), Lost(), Frozen(), Silent()], ids=["loading", "lost", "frozen", "silent"]
)
def test_an_engine_that_tells_nothing_is_shown_as_not_ready(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_PATIENCE_S", 0.05)
    page, load = asyncio.run(get(application(engine), ("GET", "/metrics"), ("GET", "/load")))
    found = samples(page)
    assert found["stageline:ready", (("model_name", "m"),)] == 0
    assert ("process_resident_memory_bytes", ()) in found
    assert not any(name.startswith("vllm:") for name, _ in found)
    assert load.json()["is_ready"] is False and load.json()["server_load"] == 0


def test_a_ready_engine_tells_its_load() -> None:
    page, load = asyncio.run(get(application(Engine()), ("GET", "/metrics"), ("GET", "/load")))
    assert samples(page)["stageline:ready", (("model_name", "m"),)] == 1
    assert load.json() == {
        "server_load": 3, "num_requests_running": 2, "num_requests_waiting": 1, "num_waiting_tokens": 30,
        "max_num_seqs": 4, "kv_cache_usage": 0.4, "microbatches_in_flight": 0, "is_ready": True,
    }  # fmt: skip


class Two(Engine):
    """Of four replicas three are well, and one of these does not answer."""

    healthy_replicas = (0, 2, 3)

    async def stats(self, replica: int) -> EngineStats:
        if replica == 2:
            await asyncio.Event().wait()
        return await super().stats(replica)


def test_replicas_are_labelled_and_their_load_is_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_PATIENCE_S", 0.05)
    page, load = asyncio.run(get(application(Two()), ("GET", "/metrics"), ("GET", "/load")))
    found = samples(page)
    running = {dict(labels)["engine"]: n for (name, labels), n in found.items() if name == "vllm:num_requests_running"}
    assert running == {"0": 2, "3": 2}
    assert found["stageline:engines_ready", (("model_name", "m"),)] == 2
    assert load.json() == {
        "server_load": 6, "num_requests_running": 4, "num_requests_waiting": 2, "num_waiting_tokens": 60,
        "max_num_seqs": 8, "kv_cache_usage": 0.4, "microbatches_in_flight": 0, "is_ready": True,
    }  # fmt: skip
    assert page.text.count("# TYPE vllm:num_requests_running ") == 1


def test_requests_count_under_their_route_and_odd_ones_together() -> None:
    asked = [
        ("POST", "/items/a"), ("POST", "/items/b/c"), ("GET", "/items/a"), ("GET", "/none"), ("BREW", "/tea"),
        ("GET", "/broken"), ("GET", "/metrics"), ("GET", "/metrics"),
    ]  # fmt: skip
    found = samples(asyncio.run(get(application(Engine()), *asked))[-1])
    counted = {
        (dict(labels)["handler"], dict(labels)["method"], dict(labels)["status"]): value
        for (name, labels), value in found.items()
        if name == "http_requests_total"
    }
    assert counted == {
        ("/items/{name:path}", "POST", "201"): 2,
        ("/items/{name:path}", "GET", "405"): 1,
        ("other", "GET", "404"): 1,
        ("other", "other", "404"): 1,
        ("/broken", "GET", "500"): 1,
        ("/metrics", "GET", "200"): 1,
    }
    assert found["http_requests_in_progress", (("handler", "/metrics"),)] == 1
    assert found["http_requests_in_progress", (("handler", "/broken"),)] == 0


def test_a_client_that_leaves_before_an_answer_is_counted_and_no_longer_open() -> None:
    counters = HttpCounters()

    async def never(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        scope = {"type": "http", "path": "/x", "method": "GET"}
        task = asyncio.create_task(CountRequests(never, counters)(scope, None, None))  # type: ignore[arg-type]
        while counters.num_open == 0:
            await asyncio.to_thread(lambda: None)
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(main())
    [family] = [family for family in counters.families() if family.name == "http_requests"]
    assert counters.num_open == 0
    assert [(sample.labels["status"], sample.value) for sample in family.samples] == [("499", 1)]
