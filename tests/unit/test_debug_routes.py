"""/debug: bounded in seconds and in size, cut alike for all stages, diagnosed once for all viewers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from stageline.engine.stats import EngineStats, StatsCollector
from stageline.server import debug, pipeline_view
from stageline.timeline.span import Span
from tests.unit.fake_llm import FakeClock
from tests.unit.stats_examples import MAX_MODEL_LEN, snapshot

NOW_S = 100.0


@dataclass
class Config:
    pipeline_parallel_size: int = 2


@dataclass
class Engine:
    """As AsyncLLM, as far as these routes look at it: two stages that took turns, 10 ms each, for a while."""

    config: Config = field(default_factory=Config)
    clock: FakeClock = field(default_factory=lambda: FakeClock(NOW_S))
    lasts_s: float = 20.0
    asked: list[tuple[float, int]] = field(default_factory=list)
    num_replicas: int = 1

    async def stats(self, replica: int | None) -> EngineStats:
        return snapshot(StatsCollector(MAX_MODEL_LEN, now_s=0.0))

    async def spans(self, since_s: float, most_per_stage: int, replica: int | None) -> list[Span]:
        self.asked.append((since_s, most_per_stage))
        found = []
        for stage in (-1, 0, 1):
            spans = [self._span(stage, number) for number in range(int(self.lasts_s / 0.02))]
            found += [span for span in spans if span.end_s > since_s][-most_per_stage:]
        return found

    def _span(self, stage: int, number: int) -> Span:
        start_s = NOW_S - self.lasts_s + number * 0.02 + max(0, stage) * 0.01
        kind: Any = "schedule" if stage < 0 else "forward"
        return Span(stage, number, kind, start_s, start_s + (0.0 if stage < 0 else 0.01), 3, 3)


class Frozen(Engine):
    async def spans(self, since_s: float, most_per_stage: int, replica: int | None) -> list[Span]:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")


@dataclass
class State:
    llm: Engine
    model_names: tuple[str, ...] = ("m",)


def get(engine: Engine, *paths: str) -> list[httpx.Response]:
    state: Any = State(engine)

    async def ask() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app=Starlette(routes=debug.routes(state)))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return [await client.get(path) for path in paths]

    return asyncio.run(ask())


def test_the_last_seconds_are_told_and_no_more() -> None:
    [answer] = get(Engine(), "/debug/timeline?seconds=2")
    timeline = answer.json()
    assert (timeline["start_s"], timeline["end_s"], timeline["num_stages"]) == (98.0, 100.0, 2)
    assert timeline["is_complete"] is True
    assert all(98.0 <= span[4] <= 100.0 for span in timeline["spans"])
    assert len(timeline["spans"]) == 3 * 100


@pytest.mark.parametrize("seconds", ["0", "-1", "60.1", "nan", "inf", "five", "", "5_0", "%205", "+5", "1e999"])
def test_other_seconds_are_refused_by_name(seconds: str) -> None:
    [answer] = get(Engine(), f"/debug/timeline?seconds={seconds}")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "seconds"


def test_an_unknown_format_is_refused() -> None:
    [answer] = get(Engine(), "/debug/timeline?format=png")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "format")


def test_a_chrome_trace_names_every_stage() -> None:
    [answer] = get(Engine(), "/debug/timeline?seconds=1&format=chrome")
    names = {event["args"]["name"] for event in answer.json()["traceEvents"] if event["name"] == "process_name"}
    assert names == {"engine", "s0", "s1"}


def test_where_one_stage_is_cut_off_all_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debug, "MOST_SPANS", 90)
    [answer] = get(Engine(), "/debug/timeline?seconds=20")
    timeline = answer.json()
    assert timeline["is_complete"] is False
    assert len(timeline["spans"]) <= 90
    oldest = [min(span[4] for span in timeline["spans"] if span[0] == stage) for stage in (0, 1)]
    assert max(oldest) - min(oldest) <= 0.02
    assert timeline["start_s"] <= min(oldest)


def test_an_engine_that_does_not_answer_is_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(debug, "_PATIENCE_S", 0.05)
    for answer in get(Frozen(), "/debug/timeline", "/debug/pipeline"):
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")


def test_the_view_has_shares_the_slowest_stage_and_the_queue() -> None:
    [answer] = get(Engine(), "/debug/pipeline")
    view = answer.json()
    assert view["queue"] == {"num_running": 2, "num_waiting": 1, "num_waiting_tokens": 30, "max_num_seqs": 4}
    assert [sum(stage["shares"].values()) for stage in view["stages"]] == pytest.approx([1.0, 1.0], abs=1e-3)
    assert [stage["shares"]["busy"] for stage in view["stages"]] == pytest.approx([0.5, 0.5], abs=0.02)
    assert view["slowest_stage"] in (0, 1)
    assert view["stages"][1]["also_holds"] == ["norm + LM head"]


def test_many_viewers_share_one_diagnosis_until_it_is_old() -> None:
    engine = Engine()
    get(engine, *["/debug/pipeline"] * 5)
    assert len(engine.asked) == 1
    state: Any = State(engine)

    async def ask_late() -> None:
        transport = httpx.ASGITransport(app=Starlette(routes=debug.routes(state)))
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            await client.get("/debug/pipeline")
            engine.clock.time_s += pipeline_view._FRESH_S + 0.1
            await client.get("/debug/pipeline")

    asyncio.run(ask_late())
    assert len(engine.asked) == 3


def test_a_pipeline_that_never_ran_has_no_slowest_stage() -> None:
    [answer] = get(Engine(lasts_s=0.0), "/debug/pipeline")
    view = answer.json()
    assert (view["slowest_stage"], view["advice"], view["bubble_fraction"]) == (None, [], 0)
    assert [stage["shares"] for stage in view["stages"]] == [None, None]
