"""The law: whatever arrives at a stage's sockets, it is refused as such or changes nothing, without a hang or a guess.

The worker runs in a thread of the test, which plays the engine and the stage before, so hundreds of them can be hurt.
"""

from __future__ import annotations

import gc
import random
import resource
import tempfile
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stageline import LLM
from stageline.errors import StagelineError
from stageline.executor.messages import Allocate, CollectItemTimes, FromWorker, StageLoaded, Stop, WorkerConfig
from stageline.links.frames import activation_frame, activation_frame_bytes, encode_message
from stageline.links.sockets import Links
from stageline.pipeline.microbatch import AddedRequest, ExtendedTable, Microbatch, MicrobatchLimits, MicrobatchResult
from stageline.sampling import SamplerSpec
from stageline.worker.worker import Worker
from tests.pipeline.failing import SETTINGS, generate, send_frames
from tests.tiny_models import TINY_VOCAB_SIZE, TinyModel, load_reference, reference_greedy

DEADLINE_S = 30.0
THE_END = b""
HIDDEN_SIZE = 64

LIMITS = MicrobatchLimits(
    num_blocks=8, block_size=4, vocab_size=TINY_VOCAB_SIZE, max_num_seqs=4, max_num_batched_tokens=32, max_model_len=24
)
MICROBATCHES = [
    Microbatch(
        epoch=0, number=0, removed=[], added=[AddedRequest(1, 5, [0, 1], SamplerSpec(seed=0), [])], extended=[],
        request_numbers=[1], num_computed_tokens=[0], num_scheduled_tokens=[5], token_ids=[1, 2, 3, 4, 5],
        sampling_rows=[0],
    ),
    Microbatch(
        epoch=0, number=1, removed=[], added=[AddedRequest(2, 3, [3], SamplerSpec(seed=1, temperature=0.5), [])],
        extended=[ExtendedTable(1, [2])], request_numbers=[1, 2], num_computed_tokens=[5, 0],
        num_scheduled_tokens=[1, 3], token_ids=[6, 7, 8, 9], sampling_rows=[0, 1],
    ),
]  # fmt: skip


class LastStage:
    """Stage 1 of 2 in a thread. `ended` and `error` (None: in order) are set once it has left."""

    def __init__(self, model: Path, folder: str) -> None:
        address = {name: f"ipc://{folder}/{name}" for name in ("engine", "control", "ping", "input")}
        self.config = WorkerConfig(
            model=str(model), stage_index=1, num_stages=2, first_layer=2, end_layer=4, dtype="float32", device="cpu",
            quantization="none", max_model_len=LIMITS.max_model_len, max_num_seqs=LIMITS.max_num_seqs,
            max_num_batched_tokens=LIMITS.max_num_batched_tokens, num_threads=1, cores=[], log_level="ERROR",
            socket_folder=folder, engine_address=address["engine"], control_address=address["control"],
            ping_address=address["ping"], input_address=address["input"], output_address=None,
        )  # fmt: skip
        self.ended = False
        self.error: BaseException | None = None
        self.answers: list[Any] = []
        self._links = Links()
        self._incoming = self._links.receiver(address["engine"])
        self._decode = msgspec.msgpack.Decoder(FromWorker).decode
        self._thread = threading.Thread(target=self._work)
        self._thread.start()
        self.wait_for(StageLoaded)
        self._senders = {name: self._links.sender(address[name]) for name in ("control", "input")}

    def _work(self) -> None:
        links = Links()
        engine = links.sender(self.config.engine_address)
        try:
            Worker(self.config, links, links.receiver(self.config.control_address), engine).run()
        except BaseException as error:
            self.error = error
        finally:
            engine.send(THE_END)
            links.close(linger_s=DEADLINE_S)

    def send(self, socket: str, frames: list[bytes]) -> None:
        self._senders[socket].send_multipart(frames)

    def wait_for(self, kind: type | None) -> None:
        """Until it has given an answer of this kind, or has left."""
        while not self.ended:
            assert self._incoming.poll(DEADLINE_S * 1000), f"it hangs after {self.answers}"
            frame = self._incoming.recv()
            if frame == THE_END:
                self.ended = True
                self._thread.join()
                return
            self.answers.append(self._decode(frame))
            if kind is not None and isinstance(self.answers[-1], kind):
                return

    def close(self) -> None:
        if not self.ended:
            self.send("control", [encode_message(Stop())])
            self.wait_for(None)
        self._links.close()

    @property
    def results(self) -> list[tuple[int, list[int]]]:
        """(number, sampled tokens) of each microbatch it answered."""
        return [(answer.number, answer.token_ids) for answer in self.answers if isinstance(answer, MicrobatchResult)]


def activations() -> list[list[bytes]]:
    """What the first stage sends for MICROBATCHES: any numbers do, as long as they are always the same."""
    generator = torch.Generator().manual_seed(0)
    bodies = [torch.randn(len(m.token_ids), HIDDEN_SIZE, generator=generator) for m in MICROBATCHES]
    return [[activation_frame(body.numpy().tobytes(), 0, place, place)] for place, body in enumerate(bodies)]


def run(
    model: Path,
    place: int = 0,
    socket: str = "control",
    hostile: list[list[bytes]] | None = None,
    is_replaced: bool = False,
) -> LastStage:
    """Run MICROBATCHES, with hostile messages for a socket before the one in this place (or instead of it), or last."""
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        stage = LastStage(model, folder)
        stage.send("control", [encode_message(Allocate(LIMITS))])
        for index, activation in enumerate(activations()):
            for frames in hostile or [] if index == place else []:
                stage.send(socket, frames)
            if not (is_replaced and index == place):
                stage.send("control", [encode_message(MICROBATCHES[index])])
            stage.send("input", activation)
            stage.wait_for(MicrobatchResult)
        for frames in hostile or [] if place == len(MICROBATCHES) else []:
            stage.send(socket, frames)
        stage.close()
        return stage


# ---- what an attacker, or a bug, might send ----

VALID: list[bytes] = [
    encode_message(Allocate(LIMITS)),
    *map(encode_message, MICROBATCHES),
    encode_message(CollectItemTimes()),
    encode_message(Stop()),
    *[frame for activation in activations() for frame in activation],
]
# Whoever may send activations says what their numbers are; only what is before them, and how many, can be wrong.
NUM_CHECKED_BYTES = {frame: activation_frame_bytes(0) for activation in activations() for frame in activation}


@st.composite
def damaged_frames(draw: st.DrawFn) -> bytes:
    """A valid frame with some of its bytes changed, or cut off."""
    valid = draw(st.sampled_from(VALID))
    frame = bytearray(valid)
    for _ in range(draw(st.integers(1, 4))):
        if frame:
            frame[draw(st.integers(0, NUM_CHECKED_BYTES.get(valid, len(frame)) - 1))] = draw(st.integers(0, 255))
    return bytes(frame[: draw(st.integers(0, len(frame)))] if draw(st.booleans()) else frame)


NUMBERS = st.one_of(st.integers(-3, 30), st.integers(-(2**63), 2**64 - 1), st.sampled_from([2**31, 2**32, 2**63]))


@st.composite
def implausible_messages(draw: st.DrawFn) -> tuple[int, bytes]:
    """A well-formed message with one of its entries replaced, and where it could do harm."""
    place = draw(st.integers(0, len(MICROBATCHES) - 1))
    message = msgspec.to_builtins(draw(st.sampled_from([MICROBATCHES[place], MICROBATCHES[place], Allocate(LIMITS)])))
    holder: Any = message
    path = []
    while isinstance(holder, list | dict) and holder:
        keys = range(len(holder)) if isinstance(holder, list) else sorted(holder)
        path.append((holder, draw(st.sampled_from(list(keys)))))
        holder = holder[path[-1][1]]
    container, key = path[-1]
    kinds = {int: NUMBERS, float: st.one_of(st.floats(), NUMBERS), list: st.lists(NUMBERS, max_size=3)}
    container[key] = draw(kinds.get(type(container[key]), st.text(max_size=3)))
    return place, msgspec.msgpack.encode(message)


FRAMES = st.one_of(st.binary(max_size=64), damaged_frames(), st.sampled_from(VALID))
MESSAGES = st.lists(st.lists(FRAMES, min_size=1, max_size=3), min_size=1, max_size=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TinyModel(hidden_size=HIDDEN_SIZE).write(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def expected(model: Path) -> list[tuple[int, list[int]]]:
    stage = run(model)
    assert stage.error is None
    return stage.results


@pytest.fixture(autouse=True)
def stages_that_may_be_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage freezes what it has loaded, for it lives as long as its process. Here hundreds live in one."""
    monkeypatch.setattr(gc, "freeze", lambda: None)
    monkeypatch.setattr(gc, "collect", lambda: None)


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    """A number in a message that makes a stage allocate without bounds fails here instead of the machine."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + 2**31, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def test_undisturbed_the_stage_answers_every_microbatch(expected: list[tuple[int, list[int]]]) -> None:
    assert [(number, len(token_ids)) for number, token_ids in expected] == [(0, 1), (1, 2)]


def check(stage: LastStage, expected: list[tuple[int, list[int]]]) -> None:
    if stage.error is not None:
        assert isinstance(stage.error, StagelineError), "".join(traceback.format_exception(stage.error))
    else:
        assert stage.results[: len(expected)] == expected


MANY = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@MANY
@given(place=st.integers(0, len(MICROBATCHES)), socket=st.sampled_from(["control", "input"]), hostile=MESSAGES)
def test_hostile_frames_are_refused_or_change_nothing(
    model: Path, expected: list[tuple[int, list[int]]], place: int, socket: str, hostile: list[list[bytes]]
) -> None:
    if not any(encode_message(Stop()) in frames for frames in hostile):
        check(run(model, place, socket, hostile), expected)


@MANY
@given(message=implausible_messages())
def test_implausible_messages_are_refused_or_change_nothing(
    model: Path, expected: list[tuple[int, list[int]]], message: tuple[int, bytes]
) -> None:
    """What is plausible in itself is noticed when the true message comes, or the engine gets an answer too many."""
    place, frame = message
    check(run(model, place, "control", [[frame]]), expected)


@MANY
@given(message=implausible_messages())
def test_implausible_messages_in_the_place_of_true_ones_are_refused_or_answered(
    model: Path, message: tuple[int, bytes]
) -> None:
    """Nobody could tell what is plausible from the truth; but it must not trip the stage."""
    place, frame = message
    is_allocation = b"allocate" in frame
    stage = run(model, place, "control", [[frame]], is_replaced=not is_allocation)
    assert stage.error is None or isinstance(stage.error, StagelineError), "".join(
        traceback.format_exception(stage.error)
    )


# ---- the same on stages in their own processes ----


def test_pings_may_be_anything(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)
    with tempfile.TemporaryDirectory(prefix="home-") as home:
        monkeypatch.setattr(tempfile, "tempdir", home)
        with LLM(str(model), pipeline_parallel_size=2, **SETTINGS) as llm:
            for _ in range(100):
                frames = [rng.randbytes(rng.randrange(200)) for _ in range(rng.randrange(1, 4))]
                send_frames(Path(home), f"s{rng.randrange(2)}.ping", frames)
            assert generate(llm, [3, 1, 4], 20) == reference_greedy(load_reference(model), [3, 1, 4], 20)
