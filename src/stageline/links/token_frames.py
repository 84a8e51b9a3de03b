"""Sampled tokens on their way from the last stage straight to the first: a small frame per microbatch that awaits some.

One idea: it is checked like an activation. The first stage knows which microbatch is next to get tokens and how many,
and takes exactly that.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from stageline.errors import FrameError

_HEADER = struct.Struct("<4sIQQ")
_MAGIC = b"SLT1"
_BYTES_PER_TOKEN = 4


def max_token_frame_bytes(num_rows: int) -> int:
    """The most that the tokens of `num_rows` rows can take."""
    return _HEADER.size + _BYTES_PER_TOKEN * num_rows


def token_frame(epoch: int, microbatch: int, sequence: int, token_ids: Sequence[int]) -> bytes:
    """Args: microbatch: the one that awaits the tokens. sequence: how many such frames went over this link before."""
    return _HEADER.pack(_MAGIC, epoch, microbatch, sequence) + struct.pack(f"<{len(token_ids)}i", *token_ids)


def check_token_frame(
    frame: memoryview, epoch: int, microbatch: int, sequence: int, num_tokens: int, vocab_size: int
) -> npt.NDArray[np.int32]:
    """Check received tokens against what is expected next.

    Returns: token ids int32 [num_tokens], each in [0, vocab_size).
    Raises: FrameError with what was expected and found.
    """
    num_bytes = max_token_frame_bytes(num_tokens)
    if len(frame) != num_bytes:
        raise FrameError(f"tokens for m{microbatch} in {len(frame)} bytes; expected {num_bytes}")
    magic, *found = _HEADER.unpack_from(frame)
    expected = [epoch, microbatch, sequence]
    if magic != _MAGIC or found != expected:
        raise FrameError(f"tokens for (epoch, microbatch, sequence) {found}; expected {expected}")
    token_ids = np.frombuffer(frame, dtype="<i4", offset=_HEADER.size)
    # Negative ones are large as unsigned numbers.
    if token_ids.view("<u4").max(initial=0) >= vocab_size:
        raise FrameError(f"tokens for m{microbatch} outside [0, {vocab_size})")
    return token_ids
