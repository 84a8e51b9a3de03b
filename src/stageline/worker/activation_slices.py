"""Activations between stages that ranks share: each sending rank has all of them, and sends a part to every receiver.

One idea: a frame's bytes are cut into equal runs, one for each sender, whatever they stand for.
"""

from __future__ import annotations

from collections.abc import Sequence


def slice_of(num_bytes: int, index: int, count: int) -> slice:
    """The bytes that sender `index` of `count` sends of a frame."""
    return slice(index * num_bytes // count, (index + 1) * num_bytes // count)


def joined(parts: Sequence[memoryview]) -> memoryview:
    """The frame whose parts these are; not copied if it is one."""
    return parts[0] if len(parts) == 1 else memoryview(bytearray().join(parts))
