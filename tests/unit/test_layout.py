"""Stages of one memory pool share it as their layers need it, so that no stage's share decides for all."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from stageline.checkpoint.model_spec import MlaSpec, ModelSpec, RopeSpec
from stageline.checkpoint.tensor_shards import rank_spec
from stageline.engine.layout import free_bytes_per_stage
from stageline.executor.messages import StageLoaded
from stageline.executor.multi_process import together
from stageline.kv.kv_plan import KVCacheMemory, parse_kv_cache_memory, plan_kv_cache
from stageline.kv.kv_size import kv_bytes_by_kind

GIB = 2**30
SPEC = ModelSpec(
    family="llama",
    num_layers=2,
    hidden_size=64,
    num_heads=8,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=96,
    vocab_size=101,
    max_position_embeddings=128,
    rms_norm_eps=1e-6,
    rope=RopeSpec(),
    tie_word_embeddings=False,
)


def loaded(stage_index: int, free_bytes: int, pool: str = "cpu") -> StageLoaded:
    return StageLoaded(stage_index, weight_bytes=GIB, free_bytes=free_bytes, memory_pool=pool, dtype="bfloat16")


def test_a_pool_is_shared_by_what_the_layers_need_and_no_stage_limits() -> None:
    reports = [loaded(0, 9 * GIB), loaded(1, 8 * GIB)]
    asked = parse_kv_cache_memory("0.5", 2)
    needs = [30_000, 10_000]
    assert free_bytes_per_stage(asked, reports, needs) == [6 * GIB, 2 * GIB]
    plan = plan_kv_cache(asked, free_bytes_per_stage(asked, reports, needs), needs, 16, 10**9)
    assert max(stage.unused_bytes for stage in plan.stages) < 16 * max(needs)


def test_stages_with_memory_of_their_own_have_all_of_it() -> None:
    reports = [loaded(0, 9 * GIB, "cuda:0"), loaded(1, 8 * GIB, "cuda:1"), loaded(2, 6 * GIB), loaded(3, 6 * GIB)]
    free = free_bytes_per_stage(parse_kv_cache_memory("0.5", 4), reports, [10, 10, 20, 10])
    assert free == [9 * GIB, 8 * GIB, 4 * GIB, 2 * GIB]


def test_a_number_of_bytes_is_given_first_whatever_the_layers_need() -> None:
    reports = [loaded(0, 8 * GIB), loaded(1, 8 * GIB)]
    asked = [KVCacheMemory(num_bytes=6 * GIB), KVCacheMemory(fraction_of_free=0.5)]
    assert free_bytes_per_stage(asked, reports, [10, 90]) == [8 * GIB, 2 * GIB]
    both = [KVCacheMemory(num_bytes=6 * GIB)] * 2
    assert free_bytes_per_stage(both, reports, [10, 90]) == [2 * GIB, 2 * GIB]


@pytest.mark.parametrize("asked", ["7GiB,0.5", "0.5,9GiB"])
def test_what_others_were_promised_is_not_there(asked: str) -> None:
    reports = [loaded(0, 6 * GIB), loaded(1, 6 * GIB)]
    assert min(free_bytes_per_stage(parse_kv_cache_memory(asked, 2), reports, [10, 10])) == 0


def test_what_ranks_of_a_stage_found_is_told_as_one() -> None:
    shared = together([loaded(0, 8 * GIB), replace(loaded(0, 7 * GIB), rank=1)])
    assert (shared.weight_bytes, shared.free_bytes, shared.memory_pool) == (2 * GIB, 7 * GIB, "cpu")
    assert shared.num_ranks == 2
    apart = together([loaded(0, 8 * GIB, "cuda:0"), replace(loaded(0, 7 * GIB, "cuda:1"), rank=1)])
    assert (apart.free_bytes, apart.memory_pool) == (14 * GIB, "cuda:0 + cuda:1")


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (SPEC, [1, 1, 2]),  # two KV heads
        (replace(SPEC, mla=MlaSpec(q_lora_rank=None, kv_lora_rank=24, qk_nope_head_dim=14, qk_rope_head_dim=8,
                                   v_head_dim=10)), [1, 2, 4]),
    ],
)  # fmt: skip
def test_copies_of_keys_and_values_are_counted(spec: ModelSpec, expected: list[int]) -> None:
    per_token = [size * kv_bytes_by_kind(rank_spec(spec, size), range(2), 4, None)[0] for size in (1, 2, 4)]
    assert [num_bytes // per_token[0] for num_bytes in per_token] == expected
