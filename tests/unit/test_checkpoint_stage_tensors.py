"""What each stage loads: every tensor on some stage, both ends of tied embeddings, nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageline.checkpoint import (
    Checkpoint,
    open_checkpoint,
    stage_file_bytes,
    stage_tensor_names,
    stage_weight_bytes,
)
from tests.unit.checkpoint_files import HIDDEN, NUM_LAYERS, VOCAB, write_hf_directory

EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    directory = write_hf_directory(tmp_path_factory.mktemp("m"), {"tie_word_embeddings": request.param})
    return open_checkpoint(str(directory))


@given(cut=st.integers(1, NUM_LAYERS - 1))
def test_two_stages_load_everything_and_share_only_a_tied_embedding(checkpoint: Checkpoint, cut: int) -> None:
    first = stage_tensor_names(checkpoint, range(cut), is_first=True, is_last=False)
    last = stage_tensor_names(checkpoint, range(cut, NUM_LAYERS), is_first=False, is_last=True)
    is_tied = checkpoint.spec.tie_word_embeddings
    assert set(first) & set(last) == ({EMBEDDING} if is_tied else set())
    assert set(first) | set(last) == set(checkpoint.tensors) - ({"lm_head.weight"} if is_tied else set())


def test_layer_one_is_not_layer_ten(checkpoint: Checkpoint) -> None:
    names = stage_tensor_names(checkpoint, range(1, 2), is_first=False, is_last=False)
    assert names and all(name.startswith("model.layers.1.") for name in names)


def test_tied_embeddings_count_on_both_ends_and_once_on_a_single_stage(checkpoint: Checkpoint) -> None:
    everything = range(NUM_LAYERS)
    middle = stage_weight_bytes(checkpoint, everything, is_first=False, is_last=False, itemsize=2)
    first = stage_weight_bytes(checkpoint, everything, is_first=True, is_last=False, itemsize=2)
    last = stage_weight_bytes(checkpoint, everything, is_first=False, is_last=True, itemsize=2)
    both = stage_weight_bytes(checkpoint, everything, is_first=True, is_last=True, itemsize=2)
    embedding, norm = VOCAB * HIDDEN * 2, HIDDEN * 2
    assert (first - middle, last - middle) == (embedding, embedding + norm)
    assert both - middle == norm + embedding * (1 if checkpoint.spec.tie_word_embeddings else 2)


def test_bytes_in_the_file_follow_its_encoding(checkpoint: Checkpoint) -> None:
    everything = range(NUM_LAYERS)
    in_file = stage_file_bytes(checkpoint, everything, is_first=True, is_last=True)
    assert in_file == 2 * stage_weight_bytes(checkpoint, everything, is_first=True, is_last=True, itemsize=2)
