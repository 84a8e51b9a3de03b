"""The KV plan: sizes as operators write them, one agreed number of blocks, the limiting stage named."""

from __future__ import annotations

import pytest

from stageline.errors import ConfigError
from stageline.kv.kv_plan import KVCacheMemory, parse_kv_cache_memory, plan_kv_cache


@pytest.mark.parametrize(
    ("text", "memory"),
    [
        ("4GiB", KVCacheMemory(num_bytes=4 * 2**30)),
        ("1.5 GB", KVCacheMemory(num_bytes=1_500_000_000)),
        ("1000000", KVCacheMemory(num_bytes=1_000_000)),
        ("512mib", KVCacheMemory(num_bytes=512 * 2**20)),
        ("0.25", KVCacheMemory(fraction_of_free=0.25)),
        (".5", KVCacheMemory(fraction_of_free=0.5)),
        ("1.0", KVCacheMemory(fraction_of_free=1.0)),
    ],
)
def test_sizes_and_fractions_are_read(text, memory):
    assert parse_kv_cache_memory(text, 2) == (memory, memory)


def test_a_list_gives_one_value_per_stage():
    assert parse_kv_cache_memory("1GiB,0.5", 2) == (KVCacheMemory(num_bytes=2**30), KVCacheMemory(fraction_of_free=0.5))
    with pytest.raises(ConfigError, match="has 2 values for 3 stages; give 1 or 3"):
        parse_kv_cache_memory("1GiB,0.5", 3)


@pytest.mark.parametrize("text", ["", "much", "-1", "0", "0.0", "1.5", "4 XB", "nan", "1e9", "1,,2"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ConfigError, match="--kv-cache-memory"):
        parse_kv_cache_memory(text, 3)


def test_the_smallest_stage_sets_the_number_of_blocks_and_the_rest_of_the_others_is_unused():
    plan = plan_kv_cache(
        parse_kv_cache_memory("1000,900", 2), [10_000, 10_000], [10, 20], block_size=4, max_useful_blocks=1000
    )
    assert (plan.num_blocks, plan.limiting_stage, plan.num_tokens) == (11, 1, 44)
    assert [stage.num_possible_blocks for stage in plan.stages] == [25, 11]
    assert [stage.unused_bytes for stage in plan.stages] == [1000 - 440, 900 - 880]


def test_no_more_blocks_are_made_than_requests_could_use():
    plan = plan_kv_cache(parse_kv_cache_memory("0.5", 1), [10_000], [10], block_size=4, max_useful_blocks=3)
    assert (plan.num_blocks, plan.limiting_stage) == (3, None)


def test_more_than_is_free_is_refused_with_both_numbers():
    with pytest.raises(ConfigError, match=r"stage 1: .* asks for 2,000 bytes, but 1,500 are free"):
        plan_kv_cache(parse_kv_cache_memory("2000", 2), [2000, 1500], [10, 10], 4, 100)


def test_no_room_for_a_single_block_is_refused():
    with pytest.raises(ConfigError, match=r"stage 0: 39 bytes .* no block of 4 tokens \(40 bytes\)"):
        plan_kv_cache(parse_kv_cache_memory("39", 1), [2000], [10], 4, 100)
