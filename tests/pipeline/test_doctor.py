"""`stageline doctor --first-request` ends whatever hangs, and a listening doctor ends when it is told to."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from stageline.config.engine_config import EngineConfig
from stageline.doctor.first_request import check_first_request
from tests.pipeline.failing import SETTINGS
from tests.server.served import Logged
from tests.tiny_models import TinyModel


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    path = TinyModel(num_layers=2).write(tmp_path_factory.mktemp("tiny"))
    return EngineConfig(model=str(path), pipeline_parallel_size=2, **SETTINGS)


def _children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


def test_a_first_token_is_waited_for_and_what_takes_too_long_is_ended(config: EngineConfig) -> None:
    before = _children()
    found = check_first_request(config, limit_s=120.0)
    assert found.status == "ok" and "a token after" in found.message
    found = check_first_request(config, limit_s=0.05)
    assert found.status == "failed" and "loading the stages was not done after 0.05 s" in found.message
    assert _children() <= before


def test_a_listening_doctor_ends_when_it_is_told_to(tmp_path: Path) -> None:
    listening = Logged("doctor", "--listen", "127.0.0.1:0", "--device", "cpu", home=tmp_path)
    try:
        listening.wait_for_line(r"answering another machine's doctor at 127\.0\.0\.1:\d+ until Ctrl-C")
        listening.process.send_signal(signal.SIGINT)
        assert listening.finish() == 130
    finally:
        listening.process.kill()
        listening.process.wait()
