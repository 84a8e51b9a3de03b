"""Advice reaches the log once, while requests run, and an idle server does nothing for it."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from stageline.engine.advice import Advice
from stageline.errors import NotReady
from stageline.server import advice_log
from stageline.server.advice_log import AdviceLog

SLOW = Advice("slowest_stage", "s1", "slowest stage: s1 (+18%)")


class Engine:
    """Answers what it is asked; `num_running` requests run at each question."""

    num_replicas = 1

    def __init__(self, *num_running: int) -> None:
        self._num_running = list(num_running)
        self.num_asked = 0
        self.is_done = asyncio.Event()

    async def stats(self, replica: int) -> Any:
        self.num_asked += 1
        running = self._num_running.pop(0)
        if not self._num_running:
            self.is_done.set()
        return SimpleNamespace(scheduler=SimpleNamespace(num_running=running))


@pytest.fixture(autouse=True)
def always_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    class Diagnoser:
        def __init__(self, llm: Any, replica: int) -> None:
            pass

        async def diagnosis(self, stats: Any) -> Any:
            return SimpleNamespace(advice=[SLOW])

    monkeypatch.setattr(advice_log, "Diagnoser", Diagnoser)


def test_it_looks_as_long_as_requests_run_and_says_the_same_once(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> Engine:
        engine: Any = Engine(3, 2, 1, 0)
        log = AdviceLog(engine, every_s=0.001)
        for _ in range(5):
            log.request_came()
        async with asyncio.timeout(30):
            await engine.is_done.wait()
            assert log._look is not None
            await log._look
        assert log._timer is None
        return engine

    with caplog.at_level(logging.WARNING):
        engine = asyncio.run(main())
    assert engine.num_asked == 4
    assert [record.message for record in caplog.records] == [SLOW.text]


def test_an_engine_that_is_not_there_is_no_trouble_here(caplog: pytest.LogCaptureFixture) -> None:
    class Gone:
        num_replicas = 1

        async def stats(self, replica: int) -> Any:
            raise NotReady("gone")

    gone: Any = Gone()
    asyncio.run(AdviceLog(gone).look())
    assert not caplog.records
