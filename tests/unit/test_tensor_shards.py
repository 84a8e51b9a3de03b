"""Which part of a model is a rank's: every number is somebody's, and what cannot be shared is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from stageline.checkpoint.checkpoint import Checkpoint
from stageline.checkpoint.model_spec import ModelSpec, MoeSpec, RopeSpec
from stageline.checkpoint.tensor_shards import RankCuts, as_shared, check_shards, rank_spec, vocabulary_of
from stageline.errors import ConfigError
from stageline.pipeline.rank_layout import RankLayout, StageRank

SPEC = ModelSpec(
    family="llama",
    num_layers=2,
    hidden_size=64,
    num_heads=8,
    num_kv_heads=4,
    head_dim=16,
    intermediate_size=96,
    vocab_size=101,
    max_position_embeddings=128,
    rms_norm_eps=1e-6,
    rope=RopeSpec(),
    tie_word_embeddings=False,
)
EXPERTS = replace(SPEC, moe=MoeSpec(num_experts=4, num_experts_per_token=2, intermediate_size=40))
DEALT = as_shared(Checkpoint("m", EXPERTS, {}), deals_experts=True).spec
ATTENTION, MLP = "model.layers.1.self_attn.", "model.layers.1.mlp."


@given(st.integers(1, 1000), st.integers(1, 9))
def test_every_token_is_one_ranks(vocab_size: int, size: int) -> None:
    parts = [vocabulary_of(vocab_size, rank, size) for rank in range(size)]
    assert [token for part in parts for token in part] == list(range(vocab_size))
    assert max(map(len, parts)) == -(-vocab_size // size)


@pytest.mark.parametrize("name", ["q_proj.weight", "q_proj.bias", "o_proj.weight", "qkv_proj.weight", "v_proj.weight"])
@pytest.mark.parametrize("size", [2, 4])
def test_every_number_of_attention_is_one_ranks(name: str, size: int) -> None:
    cuts = [RankCuts(SPEC, rank, size).cut_of(ATTENTION + name) for rank in range(size)]
    places = sorted(place for cut in cuts if cut for run in cut.runs for place in run)
    full_size = {"v_proj.weight": 64, "qkv_proj.weight": 256}.get(name, 128)
    assert places == list(range(full_size)) and all(cut and cut.full_size == full_size for cut in cuts)


def test_kv_heads_are_copied_to_ranks_whose_queries_need_them() -> None:
    cuts = [RankCuts(SPEC, rank, 8).cut_of(ATTENTION + "k_proj.weight") for rank in range(8)]
    # Query head h attends to KV head h // 2.
    assert [cut.runs[0].start // 16 for cut in cuts if cut] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert rank_spec(SPEC, 8).num_kv_heads == 1


def test_biases_behind_a_sum_are_added_once() -> None:
    names = [ATTENTION + "o_proj.bias", MLP + "down_proj.bias"]
    assert not any(RankCuts(SPEC, 0, 2).is_of_another(name) for name in names)
    assert all(RankCuts(SPEC, 1, 2).is_of_another(name) for name in names)
    assert not RankCuts(SPEC, 1, 2).is_of_another(MLP + "up_proj.bias")


def test_experts_and_mlps_are_cut_by_their_own_sizes() -> None:
    cuts = RankCuts(EXPERTS, 1, 2)
    expert = cuts.cut_of(MLP + "experts.3.down_proj.weight")
    assert expert is not None and (expert.dimension, expert.runs, expert.full_size) == (1, (range(20, 40),), 40)
    dense = cuts.cut_of(MLP + "gate_up_proj.weight")
    assert dense is not None and dense.runs == (range(48, 96), range(144, 192))
    assert cuts.cut_of(MLP + "gate.weight") is None


def test_dealt_experts_are_one_ranks_each_and_whole() -> None:
    names = [f"{MLP}experts.{expert}.{part}" for expert in range(4) for part in ("w1.weight", "w2.bias")]
    of_first, of_second = (RankCuts(DEALT, rank, 2) for rank in range(2))
    assert [of_first.own_bytes(name, 7) for name in names] == [7] * 4 + [0] * 4
    assert [of_second.own_bytes(name, 7) for name in names] == [0] * 4 + [7] * 4
    assert all(of_first.cut_of(name) is None for name in names)
    own = rank_spec(DEALT, 2, 1).moe
    assert own is not None and own.own == range(2, 4) and own.intermediate_size == 40
    # All experts' in one tensor: a rank reads its own matrices one by one, and its own rows of the biases.
    packed = MLP + "experts.down_proj"
    assert of_second.cut_of(packed) is None and of_second.own_bytes(packed, 8) == 4
    biases = of_second.cut_of(packed + "_bias")
    assert biases is not None and (biases.dimension, biases.runs) == (0, (range(2, 4),))
    assert not of_second.is_of_another(packed + "_bias")
    # What all tokens go through is shared as ever.
    assert of_second.cut_of(MLP + "gate_up_proj.weight") == RankCuts(EXPERTS, 1, 2).cut_of(MLP + "gate_up_proj.weight")


def test_a_model_without_experts_has_none_to_deal() -> None:
    with pytest.raises(ConfigError, match=r"--enable-expert-parallel .* m is a dense model.*leave it out"):
        as_shared(Checkpoint("m", SPEC, {}), deals_experts=True)


@pytest.mark.parametrize(
    ("spec", "size", "reason"),
    [
        (SPEC, 3, "8 attention heads cannot be shared evenly by 3 ranks; possible are 1, 2, 4, 8"),
        (SPEC, 16, "8 attention heads cannot be shared evenly by 16 ranks"),
        (replace(SPEC, num_kv_heads=6, num_heads=12), 4, "6 KV heads can neither be shared evenly by 4 ranks nor"),
        (replace(SPEC, intermediate_size=100), 8, "the MLP's 100 inner numbers .* by 8 ranks; possible are 1, 2, 4"),
        (EXPERTS, 16, "8 attention heads"),
        (replace(EXPERTS, num_heads=16), 16, "an expert's 40 inner numbers .*; possible are 1, 2, 4, 8"),
        (DEALT, 8, "4 experts cannot be dealt evenly to 8 ranks; possible are 1, 2, 4; or leave out --enable-expert"),
        (
            replace(EXPERTS, num_heads=16, moe=replace(EXPERTS.moe, num_experts=16)),
            16,
            "an expert's 40 inner numbers .* by 16 ranks; possible are .*8; or give --enable-expert-parallel",
        ),
    ],
)
def test_uneven_shares_are_refused_with_what_would_work(spec: ModelSpec, size: int, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_shards(spec, size)


def test_processes_count_on_from_stage_to_stage() -> None:
    layout = RankLayout((2, 1, 3))
    assert layout.leaders == [0, 2, 3] and layout.num_processes == 6
    assert list(layout.of_stage(2)) == [3, 4, 5] and layout.all[4] == StageRank(2, 1)
    assert all(layout.process_of(place.stage_index, place.rank) == process for process, place in enumerate(layout.all))
    assert not layout.has(1, 1) and not layout.has(3, 0) and not layout.has(0, -1)
