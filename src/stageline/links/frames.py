"""What goes over a socket: control messages as msgpack, activations as one raw frame behind a small fixed header.

Nothing received is trusted: a control message is decoded into one of the types its reader expects, and an activation
must be exactly the bytes that the microbatch promised, from the microbatch and place in line that were expected.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

from stageline.errors import FrameError

Message = TypeVar("Message")

_HEADER = struct.Struct("<4sIQQddd")
_MAGIC = b"SLA2"


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


def activation_header(
    epoch: int,
    microbatch: int,
    sequence: int,
    computing_s: float = 0.0,
    slowest_s: float = 0.0,
    sent_s: float = 0.0,
) -> bytes:
    """The frame before an activation's bytes.

    Args:
        sequence: how many activations went over this link before.
        computing_s, slowest_s: time the stages so far computed this microbatch, in all and the slowest one alone.
        sent_s: when the sender began to send, on its clock.
    """
    return _HEADER.pack(_MAGIC, epoch, microbatch, sequence, computing_s, slowest_s, sent_s)


def stage_times(header: memoryview) -> tuple[float, float]:
    """(computing_s, slowest_s) of a header that `check_activation` let pass."""
    *_, computing_s, slowest_s, _ = _HEADER.unpack(header)
    return computing_s, slowest_s


def sent_time_s(header: memoryview) -> float:
    """When the sender began to send, on its clock, as it claims: any number, or none at all (NaN)."""
    return float(_HEADER.unpack(header)[-1])


def check_activation(
    frames: Sequence[memoryview], epoch: int, microbatch: int, sequence: int, num_bytes: int
) -> memoryview:
    """Check a received activation against what is expected next.

    Returns: the frame with the tensor's bytes, exactly `num_bytes` long.
    Raises: FrameError with what was expected and found.
    """
    if len(frames) != 2 or len(frames[0]) != _HEADER.size:
        raise FrameError(f"an activation in {len(frames)} frames; expected a {_HEADER.size}-byte header and a tensor")
    magic, *found, computing_s, slowest_s, _ = _HEADER.unpack(frames[0])
    expected = [epoch, microbatch, sequence]
    if magic != _MAGIC or found != expected:
        raise FrameError(f"activation of (epoch, microbatch, sequence) {found}; expected {expected}")
    if not 0.0 <= slowest_s <= computing_s < math.inf:
        raise FrameError(f"activation of m{microbatch} claims stage times {computing_s} s and {slowest_s} s")
    if len(frames[1]) != num_bytes:
        raise FrameError(f"activation of m{microbatch} has {len(frames[1])} bytes; the microbatch promised {num_bytes}")
    return frames[1]
