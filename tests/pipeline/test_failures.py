"""The law: a stage that dies, freezes or raises ends the run with an error that names it, soon and for good.

Soon: within a deadline that only a hang misses; how soon is measured by benchmarks/failure_detection.py.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from stageline import LLM
from stageline.checkpoint import open_checkpoint
from stageline.clock import MonotonicClock
from stageline.config.engine_config import EngineConfig
from stageline.errors import ConfigError, StagelineError, WorkerLost
from stageline.executor.messages import Allocate
from stageline.executor.multi_process import MultiProcessExecutor
from stageline.pipeline.microbatch import MicrobatchLimits
from stageline.pipeline.partition import partition_layers
from tests.pipeline.failing import SETTINGS, generate, is_alive, send_frames, stop, under_way, worker_pids
from tests.tiny_models import TinyModel, load_reference, reference_greedy

FIRST, LAST = range(2)
"""A start costs seconds: each kind of loss comes to the places where it is different, all kinds together to each."""
DEEP = 3
MIDDLE = 1
"""For what is different in the middle, of three stages."""
HEARTBEAT_S = 3.0

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TinyModel().write(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def home(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where this test's sockets are; short enough for them, and empty again afterwards.

    A model is written before: torch makes a folder of its own where it is first used for that.
    """
    with tempfile.TemporaryDirectory(prefix="home-") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)
        assert list(Path(folder).iterdir()) == []


@pytest.fixture
def llm(model: Path, home: Path) -> Iterator[LLM]:
    with LLM(str(model), pipeline_parallel_size=2, heartbeat_timeout_s=HEARTBEAT_S, **SETTINGS) as llm:
        yield llm


@pytest.fixture
def deep_llm(model: Path, home: Path) -> Iterator[LLM]:
    with LLM(str(model), pipeline_parallel_size=DEEP, heartbeat_timeout_s=HEARTBEAT_S, **SETTINGS) as llm:
        yield llm


@pytest.fixture(scope="module")
def unhurt_llm(model: Path) -> Iterator[LLM]:
    """For the last tests, after which all stages live."""
    with LLM(str(model), pipeline_parallel_size=2, heartbeat_timeout_s=HEARTBEAT_S, **SETTINGS) as llm:
        yield llm


@pytest.fixture
def start(model: Path, home: Path) -> Iterator[Callable[..., MultiProcessExecutor]]:
    """Starts stages that have not loaded yet, of a checkpoint as it was when the engine opened it."""
    started = []
    checkpoint = open_checkpoint(str(model))

    def start(path: Path = model, num_stages: int = DEEP) -> MultiProcessExecutor:
        parts = partition_layers(checkpoint.spec.num_layers, num_stages, None)
        config = EngineConfig(model=str(path), heartbeat_timeout_s=HEARTBEAT_S, dtype="float32", bind_cores=False)
        started.append(MultiProcessExecutor(config, str(path), parts, 128, MonotonicClock()))
        return started[-1]

    yield start
    for executor in started:
        executor.close()


def expect_loss(llm: LLM, home: Path, pids: list[int], stage_index: int, *told: str) -> WorkerLost:
    """The next call says what happened; so does every later one; nothing is left; closing is quiet and repeatable.

    Args:
        pids: of all stages, the lost one included.
    """
    assert len(pids) == len(llm.partition)
    with pytest.raises(WorkerLost) as first:
        generate(llm, [4, 5], 400)
    assert first.value.stage_index == stage_index
    assert f"stage {stage_index}" in str(first.value)
    for part in told:
        assert part in str(first.value)
    assert worker_pids() == [] and not any(is_alive(pid) for pid in pids)
    assert list(home.iterdir()) == []
    for _ in range(2):
        with pytest.raises(WorkerLost) as later:
            generate(llm, [6], 1)
        assert str(later.value) == str(first.value)
        llm.close()
    return first.value


@pytest.mark.parametrize("stage_index", [FIRST, LAST])
def test_a_killed_stage_is_named_with_the_signal(llm: LLM, home: Path, stage_index: int) -> None:
    stream, pids = under_way(llm)
    os.kill(pids[stage_index], signal.SIGKILL)
    lost = expect_loss(llm, home, pids, stage_index, "killed by SIGKILL")
    with pytest.raises(WorkerLost):
        list(stream)
    assert lost.remote_traceback == ""


@pytest.mark.parametrize("stage_index", [FIRST, LAST])
def test_a_frozen_stage_is_named_with_the_limit(llm: LLM, home: Path, stage_index: int) -> None:
    _stream, pids = under_way(llm)
    stop(pids[stage_index])
    expect_loss(llm, home, pids, stage_index, "no sign of life", f"--heartbeat-timeout-s {HEARTBEAT_S:g}")


@pytest.mark.parametrize("stage_index", [FIRST, MIDDLE])
def test_an_exception_in_a_stage_comes_with_its_traceback(deep_llm: LLM, home: Path, stage_index: int) -> None:
    _stream, pids = under_way(deep_llm)
    send_frames(home, f"s{stage_index}.control", [b"\xc1is not any message"])
    lost = expect_loss(deep_llm, home, pids, stage_index, "FrameError", "control frame of 19 bytes")
    assert "Traceback" in lost.remote_traceback and "worker.py" in lost.remote_traceback


def test_a_corrupted_activation_ends_the_run(llm: LLM, home: Path) -> None:
    _stream, pids = under_way(llm)
    send_frames(home, f"s{LAST}.input", [b"SLA1" + bytes(64)])
    expect_loss(llm, home, pids, LAST, "FrameError", "in 68 bytes")


def test_a_stage_killed_while_idle_is_named_by_the_next_call(deep_llm: LLM, home: Path) -> None:
    assert len(generate(deep_llm, [1], 3)) == 3
    pids = worker_pids()
    os.kill(pids[MIDDLE], signal.SIGTERM)
    expect_loss(deep_llm, home, pids, MIDDLE, "killed by SIGTERM")


# ---- while stages start and load ----


def test_a_stage_frozen_while_it_starts_is_noticed_by_the_heartbeat(start: Callable[..., MultiProcessExecutor]) -> None:
    """Before its first message a stage cannot answer pings, and has the whole loading time unless it is stopped."""
    executor = start()
    stop(executor.worker_pids[MIDDLE])
    with pytest.raises(WorkerLost, match="no sign of life") as caught:
        executor.load()
    assert caught.value.stage_index == MIDDLE


@pytest.mark.parametrize("stage_index", range(DEEP))
def test_a_stage_killed_while_it_starts_is_named(
    start: Callable[..., MultiProcessExecutor], stage_index: int
) -> None:
    executor = start()
    os.kill(executor.worker_pids[stage_index], signal.SIGKILL)
    with pytest.raises(WorkerLost, match="killed by SIGKILL") as caught:
        executor.load()
    assert caught.value.stage_index == stage_index


def test_a_stage_frozen_while_it_loads_is_noticed(model: Path, home: Path) -> None:
    def freeze(stage_index: int, num_bytes_read: int, num_bytes_total: int) -> None:
        if stage_index == 1 and num_bytes_read == 0:
            stop(worker_pids()[1])

    with pytest.raises(WorkerLost, match="no sign of life") as caught:
        LLM(
            str(model), pipeline_parallel_size=2, heartbeat_timeout_s=HEARTBEAT_S, on_load_progress=freeze, **SETTINGS
        )
    assert caught.value.stage_index == 1
    assert worker_pids() == []


def _reshape_last_layer(checkpoint: Path) -> None:
    weights = load_file(checkpoint / "model.safetensors")
    weights["model.layers.3.mlp.up_proj.weight"] = torch.zeros(3, 5)
    save_file(weights, checkpoint / "model.safetensors")


def _truncate(checkpoint: Path) -> None:
    os.truncate(checkpoint / "model.safetensors", 20_000)


def _remove(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()


def _change_architecture(checkpoint: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"hidden_size": 32}))


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (_reshape_last_layer, "stage 0: .*layers.3.mlp.up_proj.weight"),
        (_truncate, r"stage \d: .*model.safetensors"),
        (_remove, r"stage \d: "),
        (_change_architecture, r"stage \d: "),
    ],
    ids=["misshapen", "truncated", "removed", "other architecture"],
)
def test_files_that_change_after_the_engine_opened_them_are_the_operators_to_mend(
    tmp_path: Path, start: Callable[..., MultiProcessExecutor], damage: Callable[[Path], None], told: str
) -> None:
    TinyModel().write(tmp_path)
    executor = start(tmp_path, num_stages=1)
    stop(executor.worker_pids[0])
    damage(tmp_path)
    os.kill(executor.worker_pids[0], signal.SIGCONT)
    with pytest.raises(ConfigError, match=told) as caught:
        executor.load()
    assert "Traceback" not in str(caught.value)
    with pytest.raises(ConfigError, match=told):
        executor.load()


def test_forged_messages_that_are_well_formed_are_noticed(llm: LLM, home: Path) -> None:
    """A second allocation would wipe the KV cache under a prefix that the engine believes cached."""
    generate(llm, list(range(40)), 2)
    limits = MicrobatchLimits(4, 16, 260, 4, 64, 64)
    send_frames(home, "s1.control", [msgspec.msgpack.encode(Allocate(limits))])
    with pytest.raises(StagelineError, match=r"Allocated that nobody asked for|FrameError"):
        generate(llm, list(range(40)), 400)
    assert worker_pids() == []


# ---- no false alarms ----


@pytest.mark.timeout(240)
def test_a_stage_that_only_computes_for_long_is_not_lost(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most of the time is a slowdown's, which costs no core: far beyond the limit, also where computing is quick."""
    monkeypatch.setenv("STAGELINE_INJECT_SLOWDOWN", "s0:6")
    num_tokens = 4000
    TinyModel(
        num_layers=2, hidden_size=512, intermediate_size=4096, max_position_embeddings=num_tokens + 1
    ).write(tmp_path)
    with LLM(str(tmp_path), heartbeat_timeout_s=HEARTBEAT_S, max_num_batched_tokens=num_tokens, **SETTINGS) as llm:
        assert worker_pids() != []
        generate(llm, [i % 250 for i in range(num_tokens)], 1)
        longest_s = max(span.duration_s for span in llm.spans() if span.kind == "forward")
    assert longest_s > 1.5 * HEARTBEAT_S


def test_an_engine_that_was_away_blames_nobody(unhurt_llm: LLM, model: Path) -> None:
    """Idle between calls, or stopped by Ctrl-Z: to the engine both are a clock that jumps."""
    expected = reference_greedy(load_reference(model), [9, 8, 7], 5)
    clock = unhurt_llm.clock
    for _ in range(3):
        assert generate(unhurt_llm, [9, 8, 7], 5) == expected
        clock.now_s = lambda now_s=clock.now_s: now_s() + 1000 * HEARTBEAT_S  # type: ignore[method-assign, misc]


def test_an_interrupted_call_leaves_the_engine_usable(unhurt_llm: LLM, model: Path) -> None:
    """Ctrl-C in a notebook. A stopped stage makes sure that the interrupt comes while the engine waits."""

    def interrupt(signum: int, frame: object) -> None:
        os.kill(last_stage, signal.SIGCONT)
        raise KeyboardInterrupt

    last_stage = worker_pids()[-1]
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        stream, _pids = under_way(unhurt_llm)
        stop(last_stage)
        signal.setitimer(signal.ITIMER_REAL, HEARTBEAT_S / 4)
        with pytest.raises(KeyboardInterrupt):
            list(stream)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert generate(unhurt_llm, [9, 8, 7], 5) == reference_greedy(load_reference(model), [9, 8, 7], 5)
