"""Costs of items: what stages measured, what shapes say, and what is kept of it for the next start."""

from __future__ import annotations

import msgspec
import pytest

from stageline.checkpoint.checkpoint import Checkpoint, TensorEntry
from stageline.checkpoint.model_spec import ModelSpec, RopeSpec
from stageline.cost.layer_costs import (
    analytic_costs,
    costs_from_measured,
    item_bytes,
    layer_kinds,
    layers_to_time,
    rooms_of,
)
from stageline.cost.profile import Profile, ProfileKey, load_profile, profile_key, save_profile
from stageline.errors import InternalError
from stageline.pipeline.item_times import PlannedMicrobatch, StageItemTimes, times_of_ranks
from stageline.pipeline.partition_by_cost import ItemCosts, StageRoom

HIDDEN, INNER, VOCAB = 8, 32, 100


def _checkpoint(encodings: list[str], path: str = "/m", tied: bool = False) -> Checkpoint:
    """A model whose layers are one matrix each."""
    shapes = {"model.embed_tokens.weight": ((VOCAB, HIDDEN), "BF16"), "model.norm.weight": ((HIDDEN,), "BF16")}
    if not tied:
        shapes["lm_head.weight"] = ((VOCAB, HIDDEN), "BF16")
    for layer, encoding in enumerate(encodings):
        shapes[f"model.layers.{layer}.mlp.up_proj.weight"] = ((INNER, HIDDEN), encoding)
    tensors = {
        name: TensorEntry(name, "f", 0, 2, shape, encoding, name) for name, (shape, encoding) in shapes.items()
    }
    spec = ModelSpec(
        family="llama", num_layers=len(encodings), hidden_size=HIDDEN, num_heads=2, num_kv_heads=1, head_dim=4,
        intermediate_size=INNER, vocab_size=VOCAB, max_position_embeddings=64, rms_norm_eps=1e-5, rope=RopeSpec(),
        tie_word_embeddings=tied,
    )  # fmt: skip
    return Checkpoint(path, spec, tensors)


def _times(stage: int, layers: dict[int, float], head_s: float | None = None, pool: str = "cpu") -> StageItemTimes:
    embedding_s = 0.001 if stage == 0 else None
    return StageItemTimes(stage, 9, 32, list(layers), list(layers.values()), embedding_s, head_s, 1000, pool)


def test_layers_with_the_same_tensors_are_of_one_kind_and_a_few_of_each_are_timed() -> None:
    kinds = layer_kinds(_checkpoint(["BF16", "Q4_1", "BF16", "BF16", "Q4_1"]))
    assert kinds == (0, 1, 0, 0, 1)
    assert layers_to_time(kinds, 2) == [0, 1, 2, 4]
    assert layers_to_time(kinds, 1) == [0, 1]


def test_layers_that_were_not_timed_cost_what_others_of_their_kind_do() -> None:
    found = costs_from_measured([_times(0, {0: 0.010, 1: 0.030}), _times(1, {0: 0.010}, head_s=0.2)], (0, 1, 0, 1))
    assert found.items == ItemCosts(0.001, (0.010, 0.030, 0.010, 0.030), 0.2)
    assert found.speeds == (1.0, 1.0)


def test_a_slower_stage_is_recognised_by_layers_of_a_kind_that_both_timed() -> None:
    found = costs_from_measured([_times(0, {0: 0.010}), _times(1, {1: 0.020}, head_s=0.4)], (0, 0, 0))
    assert found.speeds == (1.0, 0.5)
    assert found.items == ItemCosts(0.001, (0.010, 0.010, 0.010), 0.2)


def test_a_difference_that_may_be_noise_is_taken_for_none() -> None:
    found = costs_from_measured([_times(0, {0: 0.0100}), _times(1, {1: 0.0103}, head_s=0.1)], (0, 0))
    assert found.speeds == (1.0, 1.0)
    assert found.items.layers_s == (0.0100, 0.0103)


def test_one_disturbed_layer_makes_no_stage_slow() -> None:
    calm, disturbed = {0: 0.010, 1: 0.010, 2: 0.010}, {3: 0.010, 4: 0.070, 5: 0.010}
    found = costs_from_measured([_times(0, calm), _times(1, disturbed, head_s=0.1)], (0,) * 6)
    assert found.speeds == (1.0, 1.0)


def test_what_was_not_timed_at_all_is_a_bug() -> None:
    with pytest.raises(InternalError, match="kinds"):
        costs_from_measured([_times(0, {0: 0.01}, head_s=0.1)], (0, 1))
    with pytest.raises(InternalError, match="LM head"):
        costs_from_measured([_times(0, {0: 0.01})], (0, 0))


def test_memory_limits_a_stage_only_if_it_shares_it_with_no_other() -> None:
    apart = [_times(0, {0: 0.1}, pool="cuda:0"), _times(1, {1: 0.1}, head_s=0.1, pool="cuda:1")]
    assert rooms_of(apart, (1.0, 2.0)) == (StageRoom(1.0, 1000), StageRoom(2.0, 1000))
    shared = [_times(0, {0: 0.1}), _times(1, {1: 0.1}, head_s=0.1)]
    assert rooms_of(shared, (1.0, 1.0)) == (StageRoom(), StageRoom())


def test_an_estimate_from_shapes_has_the_ratios_of_the_matrices() -> None:
    checkpoint = _checkpoint(["BF16"] * 3)
    sizes = item_bytes(checkpoint, 2, False, 0)
    assert sizes.layers == (2 * INNER * HIDDEN,) * 3
    assert sizes.head == 2 * (VOCAB + 1) * HIDDEN and sizes.embedding == 2 * VOCAB * HIDDEN
    costs = analytic_costs(checkpoint, PlannedMicrobatch(4096, 0), sizes, 16)
    assert costs.head_s / costs.layers_s[0] == pytest.approx((VOCAB + 1) / INNER)
    attending = analytic_costs(checkpoint, PlannedMicrobatch(4096, 1000), sizes, 16)
    assert attending.layers_s[0] > costs.layers_s[0] and attending.head_s == costs.head_s


def test_a_window_bounds_what_a_layer_reads_and_makes_it_of_another_kind() -> None:
    plain = _checkpoint(["BF16"] * 3)
    checkpoint = msgspec.structs.replace(plain, spec=msgspec.structs.replace(plain.spec, layer_windows=(8, None, 2000)))
    sizes = item_bytes(checkpoint, 2, False, [0, 5, 7])
    assert [size - sizes.layers[0] for size in sizes.layers] == [0, 5, 7]
    costs = analytic_costs(checkpoint, PlannedMicrobatch(4096, 1000), item_bytes(checkpoint, 2, False, 0), 16)
    assert costs.layers_s[0] < costs.layers_s[1] == costs.layers_s[2]
    assert len(set(layer_kinds(checkpoint))) == 3


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def _profile(checkpoint: Checkpoint) -> Profile:
    key = profile_key(checkpoint, "cpu", "bfloat16", "none", 1)
    rooms = (StageRoom(), StageRoom(2.0))
    return Profile(key, "/m", PlannedMicrobatch(32, 256), ItemCosts(0.1, (0.2, 0.3), 0.4), rooms)


def test_a_kept_profile_is_found_again(cache) -> None:
    profile = _profile(_checkpoint(["BF16"] * 2))
    assert load_profile(profile.key) is None
    path = save_profile(profile)
    assert path.is_relative_to(cache)
    assert load_profile(profile.key) == profile
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert profile.rooms_for(2) == profile.rooms
    assert profile.rooms_for(3) == (StageRoom(),) * 3


def test_a_profile_is_believed_for_nothing_but_what_it_was_measured_of(cache) -> None:
    checkpoint = _checkpoint(["BF16"] * 2)
    profile = _profile(checkpoint)
    path = save_profile(profile)
    others = [
        profile_key(_checkpoint(["BF16"] * 3), "cpu", "bfloat16", "none", 1),
        profile_key(_checkpoint(["BF16", "Q4_1"]), "cpu", "bfloat16", "none", 1),
        profile_key(checkpoint, "cuda", "bfloat16", "none", 1),
        profile_key(checkpoint, "cpu", "float32", "none", 1),
        profile_key(checkpoint, "cpu", "bfloat16", "int8", 1),
        profile_key(checkpoint, "cpu", "bfloat16", "none", 2),
        profile_key(checkpoint, "cpu", "bfloat16", "none", 1, (2, 2)),
        profile_key(checkpoint, "cpu", "bfloat16", "none", 1, (2, 1)),
    ]
    for key in others:
        assert load_profile(key) is None
        # A file moved there says what it is of.
        key.path.write_bytes(path.read_bytes())
        assert load_profile(key) is None
    assert profile_key(_checkpoint(["BF16"] * 2, path="/elsewhere"), "cpu", "bfloat16", "none", 1) == profile.key


def test_a_profile_holds_for_any_number_of_stages_whose_ranks_are_equally_many() -> None:
    def key(*ranks_per_stage: int) -> ProfileKey:
        return profile_key(_checkpoint(["BF16"] * 2), "cpu", "bfloat16", "none", 1, ranks_per_stage)

    assert key(1) == key(1, 1) and key(2, 2) == key(2, 2, 2) == key(2)
    assert len({key(1), key(2), key(2, 1), key(1, 2)}) == 4
    assert b"ranks" not in msgspec.json.encode(key(1, 1))  # profiles from before there were ranks are found


def test_a_stage_is_as_fast_as_its_slowest_rank_and_has_the_memory_of_all() -> None:
    ranks = [
        StageItemTimes(1, 5, 4, [0, 2], [0.1, 0.4], None, 0.5, 900, "cuda:1", 0),
        StageItemTimes(1, 5, 4, [0, 2], [0.2, 0.3], None, 0.6, 700, "cuda:2", 1),
    ]
    together = times_of_ranks(ranks)
    assert together == StageItemTimes(1, 5, 4, [0, 2], [0.2, 0.4], None, 0.6, 1400, "cuda:1 + cuda:2", 0)
    on_one = times_of_ranks([msgspec.structs.replace(one, memory_pool="cpu") for one in ranks])
    assert (on_one.free_bytes, on_one.memory_pool) == (700, "cpu")


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"\xff", msgspec.json.encode({"key": 1})])
def test_a_broken_file_is_no_profile(cache, body: bytes) -> None:
    profile = _profile(_checkpoint(["BF16"] * 2))
    save_profile(profile).write_bytes(body)
    assert load_profile(profile.key) is None
