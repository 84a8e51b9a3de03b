"""Starting and ending a stage's process, with stand-ins that start in a moment instead of loading a model.

The stand-in is a small program in the interpreter's place; it gets its configuration as a stage does.
"""

from __future__ import annotations

import os
import signal
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stageline.clock import MonotonicClock
from stageline.config.engine_config import EngineConfig
from stageline.errors import ConfigError, StagelineError, WorkerLost
from stageline.executor.multi_process import MultiProcessExecutor
from stageline.executor.worker_process import WorkerProcess
from stageline.pipeline.partition import partition_layers
from tests.pipeline.failing import is_alive, wait_for_end, worker_pids

pytestmark = pytest.mark.timeout(60)

PATIENT = "exec cat > /dev/null"
"""Lives until the engine closes its standard input, and does nothing."""


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="home-") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)
        assert [path for path in Path(folder).iterdir() if path.name.startswith("stageline-")] == []


@pytest.fixture
def start(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., MultiProcessExecutor]]:
    """Starts stages that are stand-ins, given as a shell program."""
    started = []

    def start(program: str, num_stages: int = 2, load_timeout_s: float = 60.0) -> MultiProcessExecutor:
        stand_in = home / "python"
        stand_in.write_text(f"#!/bin/sh\n{program}\n")
        stand_in.chmod(stat.S_IRWXU)
        monkeypatch.setattr(sys, "executable", str(stand_in))
        parts = partition_layers(4, num_stages, None)
        config = EngineConfig(model="none", pipeline_parallel_size=num_stages, load_timeout_s=load_timeout_s)
        started.append(MultiProcessExecutor(config, "none", parts, 64, MonotonicClock()))
        return started[-1]

    yield start
    for executor in started:
        executor.close()


Start = Callable[..., MultiProcessExecutor]


def test_a_stage_that_exits_before_its_first_word_is_named_with_its_status(start: Start) -> None:
    # The configuration holds the stage's index behind its name, as MessagePack writes small integers.
    program = "if head -c 400 | grep -qaP 'stage_index\\x01'; then exit 7; fi; exec cat > /dev/null"
    executor = start(program, num_stages=3)
    with pytest.raises(WorkerLost, match="exited with status 7") as caught:
        executor.load()
    assert caught.value.stage_index == 1


def test_a_stage_that_never_speaks_is_lost_after_the_loading_time(start: Start) -> None:
    with pytest.raises(WorkerLost, match=r"did not come up .*--load-timeout-s 0\.5"):
        start(PATIENT, load_timeout_s=0.5).load()


def test_an_interpreter_that_does_not_start_leaves_nothing(
    start: Start, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "chmod", lambda self, mode: None)
    open_files = os.listdir("/proc/self/fd")
    with pytest.raises(ConfigError, match=r"stage 0: no process.*Permission denied; .*/python is no interpreter"):
        start(PATIENT)
    assert os.listdir("/proc/self/fd") == open_files
    assert [path.name for path in home.iterdir()] == ["python"]


def test_many_engines_leak_neither_files_nor_threads_nor_processes(start: Start) -> None:
    start(PATIENT).close()
    before = (len(os.listdir("/proc/self/fd")), threading.active_count(), len(os.listdir("/proc/self/task")))
    for cycle in range(50):
        executor = start(PATIENT if cycle % 2 else "kill -9 $$")
        if cycle % 2 == 0:
            with pytest.raises(WorkerLost):
                executor.load()
        executor.close()
    after = (len(os.listdir("/proc/self/fd")), threading.active_count(), len(os.listdir("/proc/self/task")))
    assert after == before
    assert worker_pids() == []


def test_closing_goes_on_where_an_interrupt_stopped_it(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C twice: the second one comes while the engine is being closed."""
    executor = start(PATIENT, num_stages=3)
    pids = executor.worker_pids
    reap = WorkerProcess.reap

    def interrupted(process: WorkerProcess) -> None:
        if process.stage_index == 1:
            raise KeyboardInterrupt
        reap(process)

    monkeypatch.setattr(WorkerProcess, "reap", interrupted)
    with pytest.raises(KeyboardInterrupt):
        executor.close()
    monkeypatch.setattr(WorkerProcess, "reap", reap)
    executor.close()
    assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_a_closed_engine_says_so(start: Start) -> None:
    executor = start(PATIENT)
    executor.close()
    for call in (executor.load, executor.wait, executor.collect_spans):
        with pytest.raises(StagelineError, match="the engine was closed"):
            call()


def test_a_process_forked_off_the_engine_does_not_end_the_stages(start: Start) -> None:
    executor = start(PATIENT)
    forked = os.fork()
    if forked == 0:
        executor.close()
        os._exit(0)
    os.waitpid(forked, 0)
    assert all(is_alive(pid) for pid in executor.worker_pids)
    executor.close()


@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda *_: None], ids=["ignored", "handled"])
def test_applications_that_care_for_children_themselves_are_no_obstacle(start: Start, handler: object) -> None:
    before = signal.signal(signal.SIGCHLD, handler)  # type: ignore[arg-type]
    try:
        executor = start(PATIENT)
        pids = executor.worker_pids
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(WorkerLost) as caught:
            executor.load()
        assert caught.value.stage_index == 1
        assert all(wait_for_end(pid) for pid in pids)
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_a_long_tmpdir_is_no_obstacle(start: Start, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = home / ("long" * 25)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    executor = start(PATIENT)
    assert len(executor.worker_pids) == 2
    assert list(deep.iterdir()) == []
    executor.close()


def test_without_a_place_for_sockets_the_operator_is_told(
    start: Start, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(home / "missing"))
    with pytest.raises(ConfigError, match="TMPDIR"):
        start(PATIENT)
    assert worker_pids() == []
