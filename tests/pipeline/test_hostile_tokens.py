"""The law for tokens that the last stage sends to the first: exactly those that were awaited, or they are refused.

The worker runs in a thread of the test, which plays the engine, the last stage and the one after the first.
"""

from __future__ import annotations

import gc
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stageline.errors import FrameError
from stageline.executor.messages import Allocate, Stop, WorkerConfig
from stageline.links.frames import activation_frame_bytes, encode_message
from stageline.links.sockets import Links
from stageline.links.token_frames import token_frame
from stageline.pipeline.microbatch import AddedRequest, Microbatch, MicrobatchResult
from stageline.sampling import SamplerSpec
from stageline.worker.worker import Worker
from tests.pipeline.test_hostile_frames import DEADLINE_S, HIDDEN_SIZE, LIMITS, LastStage, activations
from tests.pipeline.test_hostile_frames import MICROBATCHES as FOR_THE_LAST_STAGE
from tests.tiny_models import TINY_VOCAB_SIZE, TinyModel

TOKENS = [17, 250]
PROMPTS = Microbatch(
    epoch=0, number=0, removed=[], added=[AddedRequest(n, 3, [n], SamplerSpec(seed=0), []) for n in (1, 2)],
    extended=[], request_numbers=[1, 2], num_computed_tokens=[0, 0], num_scheduled_tokens=[3, 3],
    token_ids=[1, 2, 3, 4, 5, 6], sampling_rows=[0, 1],
)  # fmt: skip
KNOWN = Microbatch(
    epoch=0, number=1, removed=[], added=[], extended=[], request_numbers=[2, 1], num_computed_tokens=[3, 3],
    num_scheduled_tokens=[1, 1], token_ids=TOKENS, sampling_rows=[0, 1], oldest=0,
)  # fmt: skip
PENDING = msgspec.structs.replace(KNOWN, token_ids=[0, 0], pending_rows=[0, 1], pending_places=[1, 0])
GOOD = [token_frame(0, 1, 0, TOKENS)]


class FirstStage:
    """Stage 0 of 2 in a thread, with its prompts computed. `error` is set once it has left, None if in order."""

    def __init__(self, model: Path, folder: str) -> None:
        address = {name: f"ipc://{folder}/{name}" for name in ("engine", "control", "ping", "tokens", "next")}
        self._config = WorkerConfig(
            model=str(model), stage_index=0, num_stages=2, first_layer=0, end_layer=2, dtype="float32", device="cpu",
            quantization="none", max_model_len=LIMITS.max_model_len, max_num_seqs=LIMITS.max_num_seqs,
            max_num_batched_tokens=LIMITS.max_num_batched_tokens, num_threads=1, cores=[], log_level="ERROR",
            socket_folder=folder, engine_address=address["engine"], control_address=address["control"],
            ping_address=address["ping"], input_address=None, output_address=address["next"],
            token_input_address=address["tokens"],
        )  # fmt: skip
        self.error: BaseException | None = None
        self._links = Links()
        self._engine = self._links.receiver(address["engine"])
        self._next = self._links.receiver(address["next"])
        self._left = self._links.receiver(f"{address['next']}.left")
        self._thread = threading.Thread(target=self._work)
        self._thread.start()
        assert self._engine.poll(DEADLINE_S * 1000)
        self._senders = {name: self._links.sender(address[name]) for name in ("control", "tokens")}
        self.send("control", [encode_message(Allocate(LIMITS))])
        self.send("control", [encode_message(PROMPTS)])
        assert self.activation()

    def _work(self) -> None:
        links, config = Links(), self._config
        left = links.sender(f"{config.output_address}.left")
        try:
            Worker(config, links, links.receiver(config.control_address), links.sender(config.engine_address)).run()
        except BaseException as error:
            self.error = error
        finally:
            left.send(b"")
            links.close(linger_s=DEADLINE_S)

    def send(self, socket: str, frames: list[bytes]) -> None:
        self._senders[socket].send_multipart(frames)

    def activation(self) -> bytes | None:
        """The tensor that it sends to the next stage next; None if it leaves instead."""
        poller = zmq.Poller()
        for socket in (self._next, self._left):
            poller.register(socket, zmq.POLLIN)
        ready = dict(poller.poll(DEADLINE_S * 1000))
        assert ready, "it hangs"
        return self._next.recv()[activation_frame_bytes(0) :] if self._next in ready else None

    def close(self) -> None:
        self.send("control", [encode_message(Stop())])
        self._thread.join(DEADLINE_S)
        assert not self._thread.is_alive()
        self._links.close()


def run(
    model: Path, microbatch: Microbatch, tokens: Sequence[list[bytes]]
) -> tuple[bytes | None, BaseException | None]:
    """Returns: the stage's activations for the microbatch, if it has any, and its error."""
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        stage = FirstStage(model, folder)
        for frames in tokens:
            stage.send("tokens", frames)
        stage.send("control", [encode_message(microbatch)])
        activation = stage.activation()
        stage.close()
        return activation, stage.error


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TinyModel(hidden_size=HIDDEN_SIZE).write(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def expected(model: Path) -> bytes:
    activation, error = run(model, KNOWN, [])
    assert error is None and activation
    return activation


@pytest.fixture(autouse=True)
def stages_that_may_be_collected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc, "freeze", lambda: None)
    monkeypatch.setattr(gc, "collect", lambda: None)


def test_tokens_that_come_later_give_what_known_ones_give(model: Path, expected: bytes) -> None:
    assert run(model, PENDING, [GOOD]) == (expected, None)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_damaged_tokens_are_refused(model: Path, data: st.DataObject) -> None:
    """Whatever is still well-formed gives some activation: only the tokens themselves may differ."""
    frame = bytearray(GOOD[0])
    frame[data.draw(st.integers(0, len(frame) - 1))] ^= data.draw(st.integers(1, 255))
    frame = frame[: data.draw(st.integers(0, len(frame)))] if data.draw(st.booleans()) else frame
    activation, error = run(model, PENDING, [[bytes(frame)]])
    assert isinstance(error, FrameError) if activation is None else error is None and len(frame) == len(GOOD[0])


@pytest.mark.parametrize(
    "hostile",
    [
        [token_frame(0, 1, 1, TOKENS)],
        [token_frame(0, 2, 0, TOKENS)],
        [token_frame(1, 1, 0, TOKENS)],
        [token_frame(0, 1, 0, TOKENS[:1])],
        [token_frame(0, 1, 0, [17, TINY_VOCAB_SIZE])],
        [token_frame(0, 1, 0, [-1, 17])],
        [GOOD[0], b""],
        [b""],
    ],
    ids=range(8),
)
def test_tokens_that_were_not_awaited_are_refused(model: Path, hostile: list[bytes]) -> None:
    activation, error = run(model, PENDING, [hostile, GOOD])
    assert activation is None and isinstance(error, FrameError)


def test_tokens_that_nobody_awaits_change_nothing(model: Path, expected: bytes) -> None:
    assert run(model, KNOWN, [GOOD]) == (expected, None)


def test_a_last_stage_without_a_link_for_tokens_does_not_keep_them_to_itself(model: Path) -> None:
    """It is asked for tokens that it cannot hand on: an error at once, not a first stage that waits for ever."""
    pending = msgspec.structs.replace(
        FOR_THE_LAST_STAGE[1], oldest=0, pending_rows=[0], pending_places=[0], token_ids=[0, 7, 8, 9]
    )
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        stage = LastStage(model, folder)
        stage.send("control", [encode_message(Allocate(LIMITS))])
        stage.send("control", [encode_message(FOR_THE_LAST_STAGE[0])])
        stage.send("input", activations()[0])
        stage.wait_for(MicrobatchResult)
        stage.send("control", [encode_message(pending)])
        stage.wait_for(None)
        stage.close()
    assert isinstance(stage.error, FrameError)
