"""The law for masks: one that nobody asked for, or of the wrong size, is refused; late and repeated ones do no harm."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stageline.errors import FrameError
from stageline.executor.messages import Allocate
from stageline.links.frames import encode_message
from stageline.pipeline.microbatch import NO_TOKEN, Microbatch, MicrobatchResult, TokenMasks, mask_bytes
from tests.pipeline.test_hostile_frames import HIDDEN_SIZE, LIMITS, MICROBATCHES, LastStage, activations
from tests.tiny_models import TINY_VOCAB_SIZE, TinyModel

ONLY = 77
MASKED = [
    msgspec.structs.replace(microbatch, masked_rows=[0]) if microbatch.number else microbatch
    for microbatch in MICROBATCHES
]
"""The second one's first row asks for a mask."""


def mask_of(*token_ids: int) -> bytes:
    bits = np.zeros(8 * mask_bytes(TINY_VOCAB_SIZE), dtype=np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").tobytes()


GOOD = TokenMasks(0, 1, [0], [mask_of(ONLY)])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TinyModel(hidden_size=HIDDEN_SIZE).write(tmp_path_factory.mktemp("tiny"))


def run(
    model: Path,
    masks: Sequence[TokenMasks],
    after: Sequence[TokenMasks] = (),
    microbatches: Sequence[Microbatch] = MASKED,
) -> LastStage:
    """Both microbatches, the masks between the second's announcement and its activations; others when it is done."""
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        stage = LastStage(model, folder)
        stage.send("control", [encode_message(Allocate(LIMITS))])
        for microbatch, activation in zip(microbatches, activations(), strict=True):
            stage.send("control", [encode_message(microbatch)])
            for message in masks if microbatch.number == 1 else ():
                stage.send("control", [encode_message(message)])
            stage.send("input", activation)
            stage.wait_for(MicrobatchResult)
        for message in after:
            stage.send("control", [encode_message(message)])
        stage.close()
        return stage


@pytest.fixture(scope="module")
def unmasked(model: Path) -> list[tuple[int, list[int]]]:
    return run(model, [], microbatches=MICROBATCHES).results


def test_a_mask_decides_its_row_and_no_other(model: Path, unmasked: list[tuple[int, list[int]]]) -> None:
    stage = run(model, [GOOD])
    assert stage.error is None
    assert stage.results == [unmasked[0], (1, [ONLY, unmasked[1][1][1]])]


def test_a_row_without_its_mask_has_no_token_and_the_others_have_theirs(
    model: Path, unmasked: list[tuple[int, list[int]]]
) -> None:
    stage = run(model, [])
    assert stage.error is None
    assert stage.results == [unmasked[0], (1, [NO_TOKEN, unmasked[1][1][1]])]


def test_a_late_mask_and_a_repeated_one_change_nothing(model: Path) -> None:
    other = TokenMasks(0, 1, [0], [mask_of(5)])
    stage = run(model, [GOOD, other, TokenMasks(0, 0, [0], [mask_of(5)])], after=[GOOD, other])
    assert stage.error is None
    assert stage.results[1][1][0] == ONLY


@pytest.mark.parametrize(
    "masks",
    [
        TokenMasks(0, 2, [0], [mask_of(1)]),
        TokenMasks(1, 0, [0], [mask_of(1)]),
        TokenMasks(-1, 1, [0], [mask_of(1)]),
        TokenMasks(0, 1, [1], [mask_of(1)]),
        TokenMasks(0, 1, [-1], [mask_of(1)]),
        TokenMasks(0, 1, [7], [mask_of(1)]),
        TokenMasks(0, 1, [0], [mask_of(1)[:-1]]),
        TokenMasks(0, 1, [0], [mask_of(1) + b"\0"]),
        TokenMasks(0, 1, [0], [b""]),
        TokenMasks(0, 1, [0, 0], [mask_of(1)]),
        TokenMasks(0, 1, [0], []),
        TokenMasks(0, 1, [0], [mask_of()]),
        TokenMasks(0, 1, [0], [mask_of(TINY_VOCAB_SIZE)]),
    ],
    ids=str,
)
def test_a_mask_that_is_not_what_was_asked_for_is_refused(model: Path, masks: TokenMasks) -> None:
    stage = run(model, [masks])
    assert isinstance(stage.error, FrameError)


@pytest.mark.parametrize("masked_rows", [[2], [-1], [1, 0], [0, 0]])
def test_masked_rows_that_are_no_sampling_rows_are_refused(model: Path, masked_rows: list[int]) -> None:
    stage = run(model, [], microbatches=[MASKED[0], msgspec.structs.replace(MASKED[1], masked_rows=masked_rows)])
    assert isinstance(stage.error, FrameError)


NUMBERS = st.one_of(st.integers(-2, 3), st.integers(-(2**63), 2**63 - 1))
ANY_MASKS = st.builds(
    TokenMasks,
    NUMBERS,
    NUMBERS,
    st.lists(NUMBERS, max_size=3),
    st.lists(st.one_of(st.binary(max_size=64), st.just(mask_of(1))), max_size=3),
)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(masks=st.lists(ANY_MASKS, min_size=1, max_size=3))
def test_any_masks_are_refused_as_such_or_change_only_the_row_that_asked(
    model: Path, unmasked: list[tuple[int, list[int]]], masks: list[TokenMasks]
) -> None:
    stage = run(model, masks)
    if stage.error is None:
        assert stage.results[0] == unmasked[0]
        assert stage.results[1][1][1] == unmasked[1][1][1]
    else:
        assert isinstance(stage.error, FrameError)
