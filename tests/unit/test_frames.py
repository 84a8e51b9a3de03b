"""Frames: what is promised is accepted, anything else is refused, nothing crashes."""

from __future__ import annotations

import math

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from stageline.errors import FrameError
from stageline.executor.messages import FromWorker, ToWorker
from stageline.links.frames import MessageDecoder, activation_frame, check_activation, encode_message
from stageline.links.sockets import receive_frame
from stageline.pipeline.microbatch import AddedRequest, ExtendedTable, Microbatch, MicrobatchLimits, check_microbatch
from stageline.sampling import SamplerSpec

LIMITS = MicrobatchLimits(
    num_blocks=100, block_size=16, vocab_size=1000, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=256
)


def microbatch(**changes) -> Microbatch:
    fields = {
        "epoch": 0,
        "number": 3,
        "removed": [1],
        "added": [AddedRequest(5, 3, [7, 8], SamplerSpec(seed=1, bad_words=((1, 2),)), [1, 2, 3])],
        "extended": [ExtendedTable(2, [9])],
        "request_numbers": [2, 5],
        "num_computed_tokens": [16, 0],
        "num_scheduled_tokens": [1, 3],
        "token_ids": [4, 1, 2, 3],
        "sampling_rows": [0, 1],
    }
    return Microbatch(**{**fields, **changes})


def test_a_microbatch_survives_the_wire():
    decoder = MessageDecoder(ToWorker)
    assert decoder.decode(encode_message(microbatch())) == microbatch()
    check_microbatch(microbatch(), LIMITS)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"number": -1}, "at least 0"),
        ({"num_computed_tokens": [16]}, "columns of different lengths"),
        ({"num_scheduled_tokens": [4, 0]}, "without tokens"),
        ({"token_ids": [4, 1, 2]}, "3 token ids for 4 scheduled"),
        ({"token_ids": [4, 1, 2, 1000]}, r"token id outside \[0, 1000\)"),
        ({"token_ids": [4, 1, 2, -1]}, r"token id outside \[0, 1000\)"),
        ({"request_numbers": [2, 2]}, "two rows"),
        ({"sampling_rows": [1, 0]}, "not ascending"),
        ({"sampling_rows": [0, 0]}, "not ascending"),
        ({"sampling_rows": [2]}, r"sampling row outside \[0, 2\)"),
        ({"num_computed_tokens": [256, 0]}, "max_model_len 256"),
        ({"num_computed_tokens": [-1, 0]}, "max_model_len 256"),
        ({"extended": [ExtendedTable(2, [100])]}, r"block id outside \[0, 100\)"),
        ({"extended": [ExtendedTable(2, [1] * 17)]}, "17 blocks for one request, limit 16"),
        ({"added": [AddedRequest(5, 3, [-1], SamplerSpec(seed=1), [])]}, "block id"),
        ({"added": [AddedRequest(5, 0, [1], SamplerSpec(seed=1), [])]}, "history or prompt"),
        ({"added": [AddedRequest(5, 3, [1], SamplerSpec(seed=1), [1000])]}, "in a history"),
        ({"added": [AddedRequest(5, 3, [1], SamplerSpec(seed=1, logit_bias=((5000, 1.0),)), [])]}, "biased token"),
        ({"added": [AddedRequest(5, 3, [1], SamplerSpec(seed=1, bad_words=((),)), [])]}, "empty bad word"),
        (
            {
                "request_numbers": [1, 2, 3, 4, 5],
                "num_computed_tokens": [0] * 5,
                "num_scheduled_tokens": [1] * 5,
                "token_ids": [1] * 5,
            },
            "more than max_num_seqs 4",
        ),
        ({"num_scheduled_tokens": [1, 64], "token_ids": [1] * 65}, "65 tokens, limit 64"),
    ],
)
def test_a_microbatch_outside_its_limits_is_refused_by_what_is_wrong(changes, what):
    with pytest.raises(FrameError, match=what):
        check_microbatch(microbatch(**changes), LIMITS)


@settings(max_examples=500)
@given(st.binary(max_size=200))
def test_random_bytes_are_refused_or_are_a_message(frame):
    for kind in (ToWorker, FromWorker):
        try:
            message = MessageDecoder(kind).decode(frame)
        except FrameError:
            continue
        assert isinstance(message, msgspec.Struct)


@settings(max_examples=500)
@given(st.data())
def test_a_corrupted_microbatch_is_refused_or_within_its_limits(data):
    """Bytes flipped, cut or inserted anywhere: never another exception, never a microbatch that points outside."""
    frame = bytearray(encode_message(microbatch()))
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(frame) - 1))
        kind = data.draw(st.sampled_from(["flip", "cut", "insert"]))
        if kind == "flip":
            frame[position] = data.draw(st.integers(0, 255))
        elif kind == "cut":
            del frame[position:]
            frame = frame or bytearray(b"\x00")
        else:
            frame[position:position] = data.draw(st.binary(min_size=1, max_size=8))
    try:
        message = MessageDecoder(ToWorker).decode(bytes(frame))
        if not isinstance(message, Microbatch):
            return
        check_microbatch(message, LIMITS)
    except FrameError:
        return
    assert all(0 <= token_id < LIMITS.vocab_size for token_id in message.token_ids)
    tables = [added.block_ids for added in message.added] + [table.block_ids for table in message.extended]
    assert all(0 <= block_id < LIMITS.num_blocks for block_ids in tables for block_id in block_ids)
    assert message.num_tokens == sum(message.num_scheduled_tokens)


def frame(epoch=1, number=7, sequence=2, body=b"x" * 12, times=()):
    return memoryview(activation_frame(body, epoch, number, sequence, *times))


def test_a_promised_activation_is_handed_over_without_a_copy():
    received = frame()
    activation = check_activation(received, 1, 7, 2, 12)
    assert activation.body == b"x" * 12 and activation.body.obj is received.obj


@pytest.mark.parametrize(
    "received",
    [
        frame(epoch=2),
        frame(number=8),
        frame(sequence=3),
        frame(body=b"x" * 11),
        frame(body=b"x" * 13),
        frame(body=b""),
        frame()[:-12],
        memoryview(b"short"),
        memoryview(b"BAD!" + bytes(frame())[4:]),
        memoryview(b""),
    ],
)
def test_any_other_activation_is_refused(received):
    with pytest.raises(FrameError):
        check_activation(received, 1, 7, 2, 12)


@pytest.mark.parametrize("times", [(math.nan, 0.0), (1.0, math.nan), (math.inf, 1.0), (1.0, 2.0), (1.0, -1.0)])
def test_absurd_stage_times_are_refused(times):
    with pytest.raises(FrameError, match="stage times"):
        check_activation(frame(times=times), 1, 7, 2, 12)


def test_stage_times_travel_with_the_activation():
    activation = check_activation(frame(times=(0.5, 0.25, 3.0)), 1, 7, 2, 12)
    assert (activation.computing_s, activation.slowest_s, activation.sent_s) == (0.5, 0.25, 3.0)


@given(st.integers(0, 23), st.integers(1, 255))
def test_a_header_that_names_another_activation_is_refused(position, change):
    received = bytearray(frame())
    received[position] ^= change
    with pytest.raises(FrameError):
        check_activation(memoryview(bytes(received)), 1, 7, 2, 12)


def test_a_message_of_several_frames_is_refused_where_one_is_expected():
    with zmq.Context() as context, context.socket(zmq.PULL) as receiver, context.socket(zmq.PUSH) as sender:
        receiver.bind("inproc://frames")
        sender.connect("inproc://frames")
        sender.send(b"one")
        sender.send_multipart([b"head", b"body"])
        assert bytes(receive_frame(receiver).buffer) == b"one"
        with pytest.raises(FrameError, match="several frames, the first of 4 bytes"):
            receive_frame(receiver)
