"""Logging sets up Stageline's own logger once and leaves the application's alone."""

import logging
from collections.abc import Iterator

import pytest

from stageline.errors import ConfigError
from stageline.log import LOGGER_NAME, set_up_logging


@pytest.fixture(autouse=True)
def _restored_logger() -> Iterator[None]:
    logger = logging.getLogger(LOGGER_NAME)
    before = (list(logger.handlers), logger.level, logger.propagate)
    yield
    logger.handlers[:], logger.propagate = before[0], before[2]
    logger.setLevel(before[1])


def test_a_line_carries_level_and_stage(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("INFO", stage_index=1)
    logging.getLogger("stageline.worker.stage").info("loaded 15 layers")
    captured = capsys.readouterr()
    assert captured.err.startswith("INFO ") and captured.err.endswith(" [s1] loaded 15 layers\n")
    assert captured.out == ""


def test_setting_up_twice_does_not_write_twice(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("DEBUG")
    set_up_logging("WARNING")
    logging.getLogger("stageline").info("hidden")
    logging.getLogger("stageline").warning("shown")
    assert capsys.readouterr().err.count("\n") == 1


def test_the_root_logger_is_left_alone() -> None:
    root = logging.getLogger()
    before = (list(root.handlers), root.level)
    set_up_logging("DEBUG")
    assert (list(root.handlers), root.level) == before


def test_the_environment_gives_the_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGELINE_LOG_LEVEL", "error")
    set_up_logging()
    assert logging.getLogger(LOGGER_NAME).level == logging.ERROR


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(ConfigError, match="LOUD"):
        set_up_logging("loud")
