"""What goes over a socket: control messages as msgpack, activations as raw bytes behind a small fixed header.

Nothing received is trusted: a control message is decoded into one of the types its reader expects, and an activation
must be exactly the bytes that the microbatch promised, from the microbatch and place in line that were expected.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from stageline.errors import FrameError

Message = TypeVar("Message")

_HEADER = struct.Struct("<4sIQQddd")
_MAGIC = b"SLA3"


class MessageDecoder(Generic[Message]):
    """Decodes control messages of one type, or of a union of tagged types."""

    def __init__(self, kind: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(kind)

    def decode(self, frame: bytes | memoryview) -> Message:
        """Raises: FrameError if the frame is no message of the expected type."""
        try:
            return self._decoder.decode(frame)
        except (msgspec.DecodeError, UnicodeDecodeError, OverflowError, RecursionError) as error:
            raise FrameError(f"a control frame of {len(frame)} bytes is no expected message: {error}") from None


def encode_message(message: msgspec.Struct) -> bytes:
    return msgspec.msgpack.encode(message)


@dataclass(frozen=True, slots=True)
class Activation:
    """A received activation that is the one expected.

    Args:
        body: the tensor's bytes, still in the frame.
        computing_s, slowest_s: time the stages so far computed this microbatch, in all and the slowest one alone.
        sent_s: when the sender began to send, on its clock, as it claims: any number, or none at all (NaN).
    """

    body: memoryview
    computing_s: float
    slowest_s: float
    sent_s: float


def activation_frame_bytes(num_bytes: int) -> int:
    """Of an activation with a tensor of so many bytes."""
    return _HEADER.size + num_bytes


def activation_frame(
    body: memoryview | bytes,
    epoch: int,
    microbatch: int,
    sequence: int,
    computing_s: float = 0.0,
    slowest_s: float = 0.0,
    sent_s: float = 0.0,
) -> bytes:
    """An activation behind its header, as one frame: a second one would cost more than copying a small tensor does.

    Args:
        sequence: how many activations went over this link before.
        computing_s, slowest_s, sent_s: see `Activation`.
    """
    return b"".join((_HEADER.pack(_MAGIC, epoch, microbatch, sequence, computing_s, slowest_s, sent_s), body))


def check_activation(frame: memoryview, epoch: int, microbatch: int, sequence: int, num_bytes: int) -> Activation:
    """Check a received activation, whose tensor must have exactly `num_bytes`, against what is expected next.

    Raises: FrameError with what was expected and found.
    """
    if len(frame) != activation_frame_bytes(num_bytes):
        raise FrameError(
            f"activation of m{microbatch} in {len(frame)} bytes; "
            f"the microbatch promised {num_bytes} behind a header of {_HEADER.size}"
        )
    magic, *found, computing_s, slowest_s, sent_s = _HEADER.unpack_from(frame)
    expected = [epoch, microbatch, sequence]
    if magic != _MAGIC or found != expected:
        raise FrameError(f"activation of (epoch, microbatch, sequence) {found}; expected {expected}")
    if not 0.0 <= slowest_s <= computing_s < math.inf:
        raise FrameError(f"activation of m{microbatch} claims stage times {computing_s} s and {slowest_s} s")
    return Activation(frame[_HEADER.size :], computing_s, slowest_s, sent_s)
