"""Sampled tokens for the first stage: what is kept until it is asked for, and what of a frame is believed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageline.errors import FrameError
from stageline.links.token_frames import check_token_frame, max_token_frame_bytes, token_frame
from stageline.pipeline.microbatch import Microbatch, MicrobatchLimits, MicrobatchResult, check_microbatch
from stageline.worker.sampled_tokens import SampledTokens

VOCAB_SIZE = 1000
LIMITS = MicrobatchLimits(100, 4, VOCAB_SIZE, 8, 32, 64)


def microbatch(number: int, oldest: int = -1, rows: list[int] | None = None, places: list[int] | None = None):
    rows = rows or []
    num_rows = max(rows, default=0) + 1
    return Microbatch(
        epoch=0, number=number, removed=[], added=[], extended=[], request_numbers=list(range(num_rows)),
        num_computed_tokens=[3] * num_rows, num_scheduled_tokens=[1] * num_rows, token_ids=[0] * num_rows,
        sampling_rows=list(range(num_rows)), oldest=oldest, pending_rows=rows, pending_places=places or [],
    )  # fmt: skip


def result(number: int, token_ids: list[int]) -> MicrobatchResult:
    return MicrobatchResult(0, number, token_ids, [], [])


@given(token_ids=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=8))
def test_tokens_arrive_as_they_were_sent(token_ids):
    frame = token_frame(2, 17, 5, token_ids)
    assert len(frame) == max_token_frame_bytes(len(token_ids))
    assert check_token_frame(memoryview(frame), 2, 17, 5, len(token_ids), VOCAB_SIZE).tolist() == token_ids


@given(frame=st.binary(max_size=64))
def test_any_other_bytes_are_refused(frame):
    with pytest.raises(FrameError):
        check_token_frame(memoryview(frame), 0, 1, 0, 2, VOCAB_SIZE)


@pytest.mark.parametrize(
    ("frame", "expected"),
    [
        (token_frame(1, 1, 0, [5, 6]), "(epoch, microbatch, sequence) [1, 1, 0]; expected [0, 1, 0]"),
        (token_frame(0, 2, 0, [5, 6]), "[0, 2, 0]; expected [0, 1, 0]"),
        (token_frame(0, 1, 3, [5, 6]), "[0, 1, 3]; expected [0, 1, 0]"),
        (token_frame(0, 1, 0, [5]), "expected 32"),
        (token_frame(0, 1, 0, [5, 6, 7]), "expected 32"),
        (b"", "expected 32"),
        (token_frame(0, 1, 0, [5, -1]), "outside [0, 1000)"),
        (token_frame(0, 1, 0, [VOCAB_SIZE, 6]), "outside [0, 1000)"),
    ],
)
def test_tokens_that_were_not_awaited_are_refused_with_what_was(frame, expected):
    with pytest.raises(FrameError) as refusal:
        check_token_frame(memoryview(frame), 0, 1, 0, 2, VOCAB_SIZE)
    assert expected in str(refusal.value)


@pytest.mark.parametrize("is_announced_first", [True, False])
def test_tokens_are_handed_out_once_whatever_comes_first(is_announced_first):
    tokens, successor = SampledTokens(), microbatch(2, 0, [1, 2], [3, 0])
    tokens.announce(microbatch(0, 0))
    if is_announced_first:
        tokens.announce(successor)
        assert tokens.take() is None
        tokens.add(result(0, [10, 11, 12, 13]))
    else:
        tokens.add(result(0, [10, 11, 12, 13]))
        assert tokens.take() is None
        tokens.announce(successor)
    awaited = tokens.take()
    assert awaited is not None and awaited.microbatch is successor and awaited.token_ids == [13, 10]
    assert tokens.take() is None


def test_tokens_are_handed_out_in_the_order_of_those_who_await_them():
    tokens = SampledTokens()
    tokens.announce(microbatch(2, 0, [0], [0]))
    tokens.announce(microbatch(3, 1, [0], [0]))
    tokens.add(result(1, [21]))
    assert tokens.take() is None
    tokens.add(result(0, [20]))
    assert [awaited.token_ids for awaited in iter(tokens.take, None) if awaited] == [[20], [21]]


def test_nothing_is_kept_that_nobody_can_ask_for():
    tokens = SampledTokens()
    for number in range(100):
        tokens.announce(microbatch(number, max(0, number - 2)))
        tokens.add(result(number, [1]))
        assert len(tokens._sampled) <= 3
    with pytest.raises(FrameError, match="awaits tokens of m50; the oldest is m97"):
        tokens.announce(microbatch(100, 50, [0], [0]))


@pytest.mark.parametrize("sampled", [[4], [4, -1]])
def test_a_token_that_was_not_sampled_cannot_be_awaited(sampled):
    tokens = SampledTokens()
    tokens.announce(microbatch(1, 0, [0], [1]))
    tokens.add(result(0, sampled))
    with pytest.raises(FrameError, match="m1: awaits"):
        tokens.take()


@pytest.mark.parametrize(
    "hostile",
    [
        microbatch(1, 1, [0], [0]),
        microbatch(1, -1, [0], [0]),
        microbatch(1, 2),
        microbatch(1, -2),
        microbatch(1, 0, [0], []),
        microbatch(1, 0, [], [0]),
        microbatch(1, 0, [0], [8]),
        microbatch(1, 0, [0], [-1]),
        microbatch(1, 0, [1, 0], [0, 1]),
        microbatch(1, 0, [0, 0], [0, 1]),
        microbatch(1, 0, [-1, 0], [0, 1]),
    ],
    ids=str,
)
def test_rows_that_cannot_await_tokens_are_refused(hostile):
    check_microbatch(microbatch(1, 0, [0, 2], [1, 0]), LIMITS)
    with pytest.raises(FrameError, match="m1"):
        check_microbatch(hostile, LIMITS)


def test_only_a_decode_awaits_its_token():
    prompt = Microbatch(
        epoch=0, number=1, removed=[], added=[], extended=[], request_numbers=[1, 2], num_computed_tokens=[3, 0],
        num_scheduled_tokens=[1, 2], token_ids=[0, 0, 0], sampling_rows=[0, 1], oldest=0, pending_rows=[1],
        pending_places=[0],
    )  # fmt: skip
    with pytest.raises(FrameError, match="are not decodes"):
        check_microbatch(prompt, LIMITS)
