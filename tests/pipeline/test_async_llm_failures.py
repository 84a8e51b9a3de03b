"""The law: whatever ends an engine, every open stream hears of it, and no process, socket or folder remains."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from stageline import AsyncLLM, SamplingParams
from stageline.checkpoint import open_checkpoint
from stageline.config.engine_config import EngineConfig
from stageline.engine.engine_process import EngineProcess
from stageline.engine.messages import AddRequests, Drained, EngineFailed, EngineReady, ToOwner
from stageline.engine.request_stream import RequestStream
from stageline.errors import ConfigError, EngineLost, NotReady, RequestError, StagelineError, WorkerLost
from stageline.links.frames import encode_message
from stageline.request import EngineRequest
from stageline.sampling import SamplerSpec
from tests.pipeline.failing import DEADLINE_S, SETTINGS, Program, is_alive, stop, wait_for_end, worker_pids
from tests.tiny_models import TinyModel

pytestmark = pytest.mark.timeout(120)

LONG = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
SHORT = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
NUM_STREAMS = 8
MAX_MODEL_LEN = 4096
HEARTBEAT_S = 3.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    # A request without an end shall still be running when something is done to its engine, however late that is.
    return str(TinyModel(max_position_embeddings=MAX_MODEL_LEN).write(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where this test's sockets are; empty again afterwards."""
    with tempfile.TemporaryDirectory(prefix="home-") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)
        assert list(Path(folder).iterdir()) == []
        assert worker_pids() == []


def _config(model: str, **others: Any) -> EngineConfig:
    return EngineConfig(model=model, **{**SETTINGS, "kv_cache_memory": "64MiB", "pipeline_parallel_size": 2, **others})


async def _started(model: str, **others: Any) -> tuple[AsyncLLM, int, list[int]]:
    """Returns: an engine that is ready, its process, and its stages' processes."""
    llm = await AsyncLLM.start(_config(model, **others))
    [engine_pid] = worker_pids()
    stages = worker_pids(engine_pid)
    assert len(stages) == 2
    return llm, engine_pid, stages


async def _under_way(llm: AsyncLLM) -> list[RequestStream]:
    streams = [await llm.submit([index], LONG) for index in range(NUM_STREAMS)]
    for stream in streams:
        await stream.__anext__()
    return streams


async def _expect_all_to_fail(
    llm: AsyncLLM, streams: list[RequestStream], kind: type[StagelineError], message: str
) -> None:
    async def read_on(stream: RequestStream) -> None:
        with pytest.raises(kind, match=message):
            while True:
                await stream.__anext__()
        with pytest.raises(StopAsyncIteration):
            await stream.__anext__()

    async with asyncio.timeout(DEADLINE_S):
        await asyncio.gather(*(read_on(stream) for stream in streams))
    for later in (llm.submit([1], SHORT), llm.stats(), llm.wait_until_ready()):
        with pytest.raises(kind, match=message):
            await later
    with pytest.raises(kind, match=message):
        llm.check_health()


@pytest.mark.parametrize(("stage_index", "hurt"), [(0, "killed"), (1, "frozen")])
def test_a_lost_stage_ends_every_stream_and_the_engine(model: str, home: Path, stage_index: int, hurt: str) -> None:
    async def lose() -> None:
        llm, engine_pid, stages = await _started(model, heartbeat_timeout_s=HEARTBEAT_S)
        streams = await _under_way(llm)
        if hurt == "killed":
            os.kill(stages[stage_index], signal.SIGKILL)
        else:
            stop(stages[stage_index])
        reason = "killed by SIGKILL" if hurt == "killed" else "no sign of life"
        await _expect_all_to_fail(llm, streams, WorkerLost, f"stage {stage_index} .*{reason}")
        assert all(wait_for_end(pid) for pid in [*stages, engine_pid])
        await llm.close()

    asyncio.run(lose())


@pytest.mark.parametrize("hurt", ["killed", "frozen"])
def test_a_stage_lost_while_nothing_is_asked_is_noticed(model: str, home: Path, hurt: str) -> None:
    async def lose() -> None:
        llm, engine_pid, stages = await _started(model, heartbeat_timeout_s=HEARTBEAT_S)
        if hurt == "killed":
            os.kill(stages[1], signal.SIGKILL)
        else:
            stop(stages[1])
        assert await asyncio.to_thread(wait_for_end, engine_pid)
        await _expect_all_to_fail(llm, [], WorkerLost, "stage 1")
        assert all(wait_for_end(pid) for pid in stages)
        await llm.close()

    asyncio.run(lose())


def test_a_killed_engine_ends_every_stream_and_its_stages(model: str, home: Path) -> None:
    async def lose() -> None:
        llm, engine_pid, stages = await _started(model)
        streams = await _under_way(llm)
        os.kill(engine_pid, signal.SIGKILL)
        await _expect_all_to_fail(llm, streams, EngineLost, f"{engine_pid}")
        assert all(wait_for_end(pid) for pid in stages)
        await llm.close()
        await llm.close()

    asyncio.run(lose())


def test_closing_ends_open_streams_and_leaves_nothing(model: str, home: Path) -> None:
    async def close() -> None:
        llm, engine_pid, stages = await _started(model)
        streams = await _under_way(llm)
        finished = await llm.submit([1], SHORT)
        [await stream.aclose() for stream in streams[1:]]
        async for output in llm.generate([1], SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)):
            del output
        await llm.close()
        await _expect_all_to_fail(llm, streams[:1], EngineLost, "was closed")
        assert not any(is_alive(pid) for pid in [engine_pid, *stages])
        # What had come in full can be read.
        assert [output.is_finished async for output in finished] == [True]
        await llm.close()

    asyncio.run(close())


def test_an_engine_that_cannot_start_says_why_and_leaves_nothing(model: str, home: Path) -> None:
    async def start(**settings: Any) -> None:
        await AsyncLLM.start(_config(model, **settings))

    with pytest.raises(ConfigError, match="max-model-len"):
        asyncio.run(start(max_model_len=100_000))
    with pytest.raises(ConfigError, match="50"):
        asyncio.run(start(pipeline_parallel_size=50))


def test_a_start_that_is_cancelled_leaves_nothing(model: str, home: Path) -> None:
    async def cancel() -> None:
        loading = asyncio.Event()
        start = asyncio.ensure_future(AsyncLLM.start(_config(model), lambda *_: loading.set()))
        await asyncio.wait([start, asyncio.ensure_future(loading.wait())], return_when=asyncio.FIRST_COMPLETED)
        [engine_pid] = worker_pids()
        stages = worker_pids(engine_pid)
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
        assert all(wait_for_end(pid) for pid in [engine_pid, *stages])

    asyncio.run(cancel())


OWNER = f"""
import asyncio, sys
from stageline import AsyncLLM, SamplingParams
from stageline.config.engine_config import EngineConfig
from tests.pipeline.failing import worker_pids
async def main():
    llm = await AsyncLLM.start(EngineConfig(model=sys.argv[1], pipeline_parallel_size=2, **{SETTINGS!r}))
    stream = await llm.submit([1], SamplingParams(max_tokens=None, ignore_eos=True))
    await stream.__anext__()
    [engine_pid] = worker_pids()
    print(*worker_pids(engine_pid), flush=True)
    print("ready", flush=True)
    async for _ in stream:
        pass
    await asyncio.to_thread(sys.stdin.read)
asyncio.run(main())
"""


def test_nothing_outlives_a_killed_owner(model: str) -> None:
    with tempfile.TemporaryDirectory(prefix="home-") as home:
        program = Program(OWNER, model, home=Path(home))
        try:
            assert program.process.stdout is not None
            stages = [int(word) for word in program.process.stdout.readline().split()]
            program.wait_for_line("ready")
            program.workers += stages
            assert len(program.workers) == 3
            program.process.kill()
            assert program.leftovers() == []
        finally:
            program.destroy()


# ---- several clients, an owner, and bad ones ----


@pytest.fixture
def process(model: str, home: Path) -> Iterator[EngineProcess]:
    process = EngineProcess(_config(model), open_checkpoint(model).path, num_clients=2)
    yield process
    process.end(DEADLINE_S)
    assert process.exit_status() == 0
    assert not is_alive(process.pid)


def _told(process: EngineProcess, kind: type[ToOwner]) -> ToOwner:
    """The next message of that kind."""
    while (messages := process.read()) is not None:
        for message in messages:
            assert not isinstance(message, EngineFailed), message
            if isinstance(message, kind):
                return message
    raise AssertionError("the engine ended")


def test_clients_of_one_engine_do_not_hear_of_each_other(model: str, process: EngineProcess) -> None:
    async def use(process: EngineProcess) -> None:
        one, other = [await AsyncLLM.attach(_config(model), link) for link in process.links]
        for client in (one, other):
            with pytest.raises(NotReady):
                client.check_health()
            with pytest.raises(NotReady):
                await client.submit([1], SHORT)
        for client in (one, other):
            await client.wait_until_ready()
            client.check_health()
            assert "s1" in client.startup_table()
        streams = [await client.submit([1, 2], SHORT) for client in (one, other)]
        await (await one.submit([1], LONG)).aclose()
        texts = ["".join([output.outputs[0].text async for output in stream]) for stream in streams]
        assert texts[0] == texts[1] != ""
        await one.close()
        assert (await other.stats()).requests.num_finished == {"stop": 0, "length": 2, "abort": 1, "error": 0}
        await other.close()

    asyncio.run(use(process))
    assert isinstance(_told(process, EngineReady), EngineReady)


def test_a_drained_engine_finishes_what_runs_and_takes_no_more(model: str, process: EngineProcess) -> None:
    async def drain() -> None:
        llm = await AsyncLLM.attach(_config(model), process.links[0])
        await llm.wait_until_ready()
        _told(process, EngineReady)
        running = await llm.submit([1], SamplingParams(temperature=0.0, max_tokens=600, ignore_eos=True))
        await running.__anext__()
        process.drain()
        with pytest.raises(NotReady, match="shutting down"):
            while True:  # until the order has arrived
                await (await llm.submit([1], SHORT)).aclose()
        tokens = [token async for output in running for token in output.outputs[0].token_ids]
        assert len(tokens) > 500
        await asyncio.to_thread(_told, process, Drained)
        await llm.close()

    asyncio.run(drain())


def test_what_no_client_should_send_harms_nobody(model: str, process: EngineProcess) -> None:
    def request(**others: Any) -> EngineRequest:
        values: dict[str, Any] = {
            "request_id": "bad",
            "prompt_token_ids": [1],
            "sampler": SamplerSpec(seed=1),
            "max_tokens": 1,
            "eos_token_ids": (),
            "stop_token_ids": (),
            "arrival_s": 0.0,
        }
        return EngineRequest(**{**values, **others})

    bad = [
        {"prompt_token_ids": [10**6]},
        {"prompt_token_ids": [-1]},
        {"prompt_token_ids": []},
        {"max_tokens": 0},
        {"max_tokens": 10**9},
        {"arrival_s": float("nan")},
        {"sampler": SamplerSpec(seed=1, temperature=float("nan"))},
        {"sampler": SamplerSpec(seed=1, bad_words=((),))},
        {"sampler": SamplerSpec(seed=1, allowed_token_ids=(10**6,))},
        {"sampler": SamplerSpec(seed=2**63)},
    ]

    async def send() -> None:
        llm = await AsyncLLM.attach(_config(model), process.links[0])
        await llm.wait_until_ready()
        context = zmq.Context()
        socket = context.socket(zmq.PUSH)
        socket.connect(process.links[0].engine_address)
        for frame in (b"", b"\xc1", b"x" * 1000, encode_message(AddRequests(7, [request()]))):
            socket.send(frame)
        for others in bad:
            with pytest.raises(RequestError):
                await llm._replicas.add([request(request_id="good"), request(**others)])
        assert [output.is_finished async for output in llm.generate([1], SHORT)][-1]
        now = (await llm.stats()).scheduler
        assert (now.num_running, now.num_waiting, now.num_used_blocks) == (0, 0, 0)
        context.destroy(linger=0)
        await llm.close()

    asyncio.run(send())
