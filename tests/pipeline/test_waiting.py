"""The law: whoever waits for the stages hears of a bell, a message and the time, also while nothing is in flight."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stageline.checkpoint import open_checkpoint
from stageline.clock import MonotonicClock
from stageline.config.engine_config import EngineConfig
from stageline.engine.startup import Pipeline, start_pipeline
from stageline.errors import WorkerLost
from stageline.links.sockets import Links
from stageline.request import EngineRequest
from stageline.sampling import SamplerSpec
from tests.pipeline.failing import SETTINGS, stop, worker_pids
from tests.tiny_models import TinyModel

CLOCK = MonotonicClock()
FAR_S = 1e9

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(TinyModel().write(tmp_path_factory.mktemp("tiny")))


def _start(model: str, **others: Any) -> Pipeline:
    settings = {**SETTINGS, "pipeline_parallel_size": 2, "heartbeat_timeout_s": 3.0, **others}
    return start_pipeline(EngineConfig(model=model, **settings), open_checkpoint(model), CLOCK)


@pytest.fixture(scope="module")
def links() -> Iterator[Links]:
    links = Links()
    yield links
    links.close()


@pytest.fixture(scope="module", params=["multi_process", "in_process"])
def pipeline(model: str, links: Links, request: pytest.FixtureRequest) -> Iterator[Pipeline]:
    pipeline = _start(model, distributed_executor_backend=request.param)
    yield pipeline
    pipeline.core.close()


def test_a_bell_ends_a_wait_for_nothing(pipeline: Pipeline) -> None:
    core = pipeline.core
    for is_rung_before in (True, False):
        if is_rung_before:
            core.wake()
        else:
            threading.Thread(target=core.wake).start()
        assert core.step(waits_for_work=True, until_s=CLOCK.now_s() + FAR_S) == []


def test_a_message_ends_a_wait_for_nothing(pipeline: Pipeline, links: Links, tmp_path: Path) -> None:
    incoming, sender = links.receiver(f"ipc://{tmp_path}/m"), links.sender(f"ipc://{tmp_path}/m")
    pipeline.core.wake_on(incoming)
    sender.send(b"news")
    while not incoming.poll(0):
        assert pipeline.core.step(waits_for_work=True, until_s=CLOCK.now_s() + FAR_S) == []
    assert incoming.recv() == b"news"


def test_a_wait_ends_when_its_time_has_come(pipeline: Pipeline) -> None:
    for patience_s in (-1.0, 0.0, 0.05):
        until_s = CLOCK.now_s() + patience_s
        while CLOCK.now_s() < until_s or patience_s <= 0:
            assert pipeline.core.step(waits_for_work=True, until_s=until_s) == []
            if patience_s <= 0:
                break


def test_a_bell_in_the_middle_of_work_loses_nothing(pipeline: Pipeline) -> None:
    core = pipeline.core
    core.add(
        EngineRequest(
            request_id="R", prompt_token_ids=[1, 2], sampler=SamplerSpec(seed=0), max_tokens=20, eos_token_ids=(),
            stop_token_ids=(), arrival_s=0.0,
        )
    )  # fmt: skip
    tokens: list[int] = []
    while core.has_work:
        core.wake()
        for update in core.step(waits_for_work=True):
            tokens += update.token_ids
    assert len(tokens) == 20
    assert core.stalled_s(CLOCK.now_s()) == 0.0


@pytest.mark.parametrize("hurt", [stop, lambda pid: os.kill(pid, signal.SIGKILL)], ids=["frozen", "killed"])
def test_a_stage_lost_while_nothing_is_in_flight_ends_the_wait(model: str, hurt: Any) -> None:
    before = set(worker_pids())
    core = _start(model).core
    try:
        hurt(sorted(set(worker_pids()) - before)[1])
        with pytest.raises(WorkerLost):
            while True:
                core.step(waits_for_work=True)
    finally:
        core.close()
