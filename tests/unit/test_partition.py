"""The partition: the default rule users know, and everything that is refused before a start."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageline.config.environment import Variable, pp_layer_partition
from stageline.errors import ConfigError
from stageline.pipeline.partition import default_layer_counts, partition_layers


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "counts"),
    [
        (126, 4, (31, 32, 32, 31)),
        (61, 2, (31, 30)),
        (61, 4, (15, 15, 16, 15)),
        (30, 2, (15, 15)),
        (30, 1, (30,)),
        (7, 5, (1, 1, 2, 2, 1)),
        (5, 5, (1, 1, 1, 1, 1)),
    ],
)
def test_the_default_rule_gives_the_remainder_to_the_second_to_last_stage_and_backwards(num_layers, num_stages, counts):
    assert default_layer_counts(num_layers, num_stages) == counts


@given(st.integers(1, 64), st.integers(0, 200))
def test_every_layer_is_on_exactly_one_stage_and_sizes_differ_by_at_most_one(num_stages, extra):
    num_layers = num_stages + extra
    parts = partition_layers(num_layers, num_stages, None)
    assert [layer for part in parts for layer in part.layers] == list(range(num_layers))
    sizes = [len(part.layers) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert [part.is_first for part in parts] == [index == 0 for index in range(num_stages)]
    assert [part.is_last for part in parts] == [index == num_stages - 1 for index in range(num_stages)]


def test_an_explicit_partition_is_taken_as_it_is():
    parts = partition_layers(30, 3, " 1, 28,1 ")
    assert [part.layers for part in parts] == [range(1), range(1, 29), range(29, 30)]


@pytest.mark.parametrize(
    ("asked", "num_layers", "num_stages", "numbers"),
    [
        ("16,14,1", 30, 2, ["3 entries", "2 stages"]),
        ("16,15", 30, 2, ["31", "30 layers"]),
        ("30,0", 30, 2, ["0 layers", "every stage needs one"]),
        ("31,-1", 30, 2, ["-1 layers"]),
        ("15,15.0", 30, 2, ["'15.0' is not an integer"]),
        ("15,", 30, 2, ["'' is not an integer"]),
        ("fifteen,15", 30, 2, ["'fifteen'"]),
        ("１５,15", 30, 2, ["not an integer"]),
    ],
)
def test_a_wrong_partition_is_refused_with_both_numbers_and_the_way_out(asked, num_layers, num_stages, numbers):
    with pytest.raises(ConfigError) as caught:
        partition_layers(num_layers, num_stages, asked)
    for number in ["--pp-layer-partition", *numbers, "15,15"]:
        assert number in str(caught.value)


def test_fewer_layers_than_stages_is_refused():
    with pytest.raises(ConfigError, match=r"3 stages for 2 layers.*at most 2"):
        partition_layers(2, 3, None)


def test_the_variable_users_have_set_for_vllm_is_honoured_and_ours_wins():
    theirs, ours = Variable("VLLM_PP_LAYER_PARTITION", "16,14"), Variable("STAGELINE_PP_LAYER_PARTITION", "17,13")
    assert pp_layer_partition({theirs.name: theirs.value}) == theirs
    assert pp_layer_partition({theirs.name: theirs.value, ours.name: ours.value}) == ours
    assert pp_layer_partition({"VLLM_PP_LAYER_PARTITION": ""}) is None
