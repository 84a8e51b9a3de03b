"""A frame cut for its senders is whole again where it arrives."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stageline.worker.activation_slices import joined, slice_of


@given(st.binary(max_size=200), st.integers(1, 9))
def test_parts_join_to_the_frame(frame: bytes, count: int) -> None:
    view = memoryview(frame)
    parts = [view[slice_of(len(frame), index, count)] for index in range(count)]
    assert joined(parts) == view
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_one_sender_s_frame_is_not_copied() -> None:
    view = memoryview(b"activations")
    assert joined([view]) is view
