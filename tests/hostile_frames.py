"""True messages of every kind that crosses a link, and an endless stream of what an enemy, or a bug, makes of them."""

from __future__ import annotations

import math
import random
from typing import Any

import msgspec

from stageline.cluster.messages import (
    AreYouThere,
    Declined,
    FindWay,
    FromNode,
    Hello,
    Here,
    Offer,
    Ready,
    Refused,
    Software,
    StageEnded,
    ToNode,
    WayFound,
    Welcome,
)
from stageline.errors import FrameError
from stageline.executor.messages import (
    Allocate,
    AssignLayers,
    CollectSpans,
    Failed,
    FromWorker,
    Loading,
    Ping,
    Pong,
    StageLoaded,
    ToResponder,
    ToWorker,
)
from stageline.links.frames import MessageDecoder, activation_frame, check_activation, encode_message
from stageline.links.token_frames import check_token_frame, token_frame
from stageline.pipeline.microbatch import (
    AddedRequest,
    ExtendedTable,
    Microbatch,
    MicrobatchLimits,
    MicrobatchResult,
    TokenMasks,
    check_microbatch,
)
from stageline.sampling import SamplerSpec

LIMITS = MicrobatchLimits(
    num_blocks=100, block_size=16, vocab_size=1000, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=256
)

MICROBATCH = Microbatch(
    epoch=0,
    number=3,
    removed=[1],
    added=[AddedRequest(5, 3, [7, 8], SamplerSpec(seed=1, bad_words=((1, 2),), logit_bias=((5, 1.0),)), [1, 2, 3])],
    extended=[ExtendedTable(2, [9])],
    request_numbers=[2, 5],
    num_computed_tokens=[16, 0],
    num_scheduled_tokens=[1, 3],
    token_ids=[4, 1, 2, 3],
    sampling_rows=[0, 1],
)

_HELLO = Hello(
    software=Software(1, "0.1.0", "2.13.0"),
    node_id="a1",
    host_name="b",
    rank=1,
    num_stages=1,
    address="10.0.0.2:29501",
    settings={"--dtype": "auto"},
)

TRUE_MESSAGES: list[tuple[Any, msgspec.Struct]] = [
    *((ToWorker, message) for message in (
        MICROBATCH, TokenMasks(0, 3, [0], [bytes(128)]), Allocate(LIMITS), AssignLayers(0, 4),
    )),
    *((ToResponder, message) for message in (Ping(), CollectSpans(0.0, 100))),
    *((FromWorker, message) for message in (
        Loading(0, 1, 2), StageLoaded(1, 100, 200, "host", "bfloat16"), MicrobatchResult(0, 3, [5, 6], [], []),
        Pong(1), Failed(0, "it broke", "Traceback", False),
    )),
    *((FromNode, message) for message in (
        _HELLO, Ready("ab"), Declined("model", "none"), StageEnded(1, 1, "it ended"), Here(1, 2.0),
        WayFound(1, "tcp://10.0.0.1:0;10.0.0.2:5", "good"),
    )),
    *((ToNode, message) for message in (
        Offer(model="m", model_digest="ab"), Refused("key", "x"), Welcome(1), AreYouThere(4),
        FindWay(1, ["10.0.0.2:5"], 1000),
    )),
]  # fmt: skip
"""With the type that their reader expects."""

_EXTREMES: list[Any] = [
    None, True, 0, -1, 1, 2**31, -(2**31), 2**32, 2**63 - 1, -(2**63), 2**64 - 1, math.nan, math.inf, -1e308, "", b"",
    "x" * 1000, [], {}, [[]] * 10, [0] * 1000,
]  # fmt: skip


class Enemy:
    """Args: seed: the same one says the same."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._true = [(kind, encode_message(message)) for kind, message in TRUE_MESSAGES]
        self._decoders = {id(kind): MessageDecoder[Any](kind) for kind, _ in self._true}

    def control_frame(self) -> tuple[Any, bytes]:
        """A frame, and the type of the messages that its reader expects."""
        kind, frame = self._random.choice(self._true)
        way = self._random.random()
        if way < 0.5:
            frame = self._with_bytes_changed(frame)
        elif way < 0.9:
            frame = msgspec.msgpack.encode(self._changed(msgspec.msgpack.decode(frame)))
        elif way < 0.95:
            frame = self._random.randbytes(self._random.randrange(200))
        else:
            frame = self._deep()
        return kind, frame

    def activation_frames(self) -> list[bytes]:
        """Close to what comes after (epoch, microbatch, sequence) (1, 7, 2) with 12 bytes of tensor."""
        return self._as_hostile([activation_frame(b"x" * 12, 1, 7, 2, 0.5, 0.25, 1.0)])

    def token_frames(self) -> list[bytes]:
        """Close to four tokens for the same microbatch."""
        return self._as_hostile([token_frame(1, 7, 2, [5, 6, 7, 999])])

    def attack_parsers(self) -> None:
        """One hostile message of each kind, through what reads it. Raises: whatever is no refusal, AssertionError."""
        kind, frame = self.control_frame()
        try:
            message = self._decoders[id(kind)].decode(frame)
            if isinstance(message, Microbatch):
                check_microbatch(message, LIMITS)
                assert all(0 <= token_id < LIMITS.vocab_size for token_id in message.token_ids)
        except FrameError:
            pass
        try:
            for frame in self.activation_frames():
                assert len(check_activation(memoryview(frame), 1, 7, 2, 12).body) == 12
        except FrameError:
            pass
        try:
            for frame in self.token_frames():
                tokens = check_token_frame(memoryview(frame), 1, 7, 2, 4, LIMITS.vocab_size)
                assert len(tokens) == 4 and all(0 <= token_id < LIMITS.vocab_size for token_id in tokens)
        except FrameError:
            pass

    def _as_hostile(self, frames: list[bytes]) -> list[bytes]:
        place = self._random.randrange(len(frames))
        match self._random.randrange(6):
            case 0:
                frames.pop(place)
            case 1:
                frames.insert(place, self._random.randbytes(self._random.randrange(40)))
            case 2:
                frames[place] = self._random.randbytes(len(frames[place]))
            case _:
                frames[place] = self._with_bytes_changed(frames[place])
        return frames

    def _with_bytes_changed(self, frame: bytes) -> bytes:
        changed = bytearray(frame)
        for _ in range(self._random.randrange(1, 5)):
            if not changed:
                break
            place = self._random.randrange(len(changed))
            match self._random.randrange(4):
                case 0 | 1:
                    changed[place] = self._random.randrange(256)
                case 2:
                    del changed[place:]
                case _:
                    changed[place:place] = self._random.randbytes(self._random.randrange(1, 9))
        return bytes(changed)

    def _changed(self, value: Any) -> Any:
        """The value with one of its parts, however deep, replaced by something extreme."""
        if isinstance(value, list) and value and self._random.random() < 0.9:
            place = self._random.randrange(len(value))
            return [*value[:place], self._changed(value[place]), *value[place + 1 :]]
        if isinstance(value, dict) and value and self._random.random() < 0.9:
            key = self._random.choice(list(value))
            return {**value, key: self._changed(value[key])}
        return self._random.choice(_EXTREMES)

    def _deep(self) -> bytes:
        """Lists in lists, or a promise of billions of entries."""
        if self._random.random() < 0.5:
            return b"\x91" * self._random.randrange(1, 5000) + b"\x00"
        return b"\xdd\xff\xff\xff\xff" + self._random.randbytes(3)
