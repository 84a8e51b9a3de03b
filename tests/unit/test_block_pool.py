"""Blocks: none lost, none freed twice, content shared only while it is there."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from stageline.errors import InternalError
from stageline.kv.block_pool import BlockPool
from stageline.kv.kv_cache_manager import BlockTable, KVCacheManager

BLOCK_SIZE = 4


class KVCacheMachine(RuleBasedStateMachine):
    """Random requests are started, extended, launched and closed; the model is a dict of who owns which block."""

    tables = Bundle("tables")

    @initialize(num_blocks=st.integers(1, 12), prefix_caching=st.booleans())
    def start(self, num_blocks, prefix_caching):
        self.kv = KVCacheManager(num_blocks, BLOCK_SIZE, prefix_caching)
        self.open: dict[int, tuple[BlockTable, list[int]]] = {}
        self.contents: dict[int, tuple[int, ...]] = {}

    @rule(target=tables, token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=30))
    def open_table(self, token_ids):
        table = BlockTable()
        num_reused = self.kv.reuse_prefix(table, token_ids)
        assert num_reused == len(table.block_ids) * BLOCK_SIZE < len(token_ids)
        for index, block_id in enumerate(table.block_ids):
            assert self.contents[block_id] == tuple(token_ids[: (index + 1) * BLOCK_SIZE])
        key = len(self.contents) + id(table)
        self.open[key] = (table, token_ids)
        return key

    @rule(key=tables, num_tokens=st.integers(1, 30))
    def extend(self, key, num_tokens):
        table, token_ids = self.open[key]
        num_tokens = min(num_tokens, len(token_ids))
        free_before, before = self.kv.num_free_blocks, list(table.block_ids)
        needed = max(0, self.kv.blocks_for(num_tokens) - len(before))
        added = self.kv.extend(table, num_tokens)
        if needed > free_before:
            assert added is None and table.block_ids == before and self.kv.num_free_blocks == free_before
            return
        assert added is not None and len(added) == needed and table.block_ids == before + added
        in_use = [block for other, _ in self.open.values() if other is not table for block in other.block_ids]
        assert not set(added) & set(in_use)
        for block_id in added:
            self.contents.pop(block_id, None)
        first_new = table.num_filled
        self.kv.launched(table, token_ids, num_tokens)
        if self.kv.enable_prefix_caching:
            for index in range(first_new, num_tokens // BLOCK_SIZE):
                self.contents[table.block_ids[index]] = tuple(token_ids[: (index + 1) * BLOCK_SIZE])

    @rule(key=consumes(tables))
    def close(self, key):
        table, _ = self.open.pop(key)
        self.kv.close(table)
        assert table.block_ids == []

    @invariant()
    def no_block_is_lost(self):
        in_use = {block for table, _ in self.open.values() for block in table.block_ids}
        assert self.kv.num_free_blocks + len(in_use) == self.kv.num_blocks


TestKVCache = KVCacheMachine.TestCase
TestKVCache.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_a_block_released_twice_is_an_error():
    pool = BlockPool(2)
    blocks = pool.take(1)
    pool.release(blocks)
    with pytest.raises(InternalError, match="more often than it was taken"):
        pool.release(blocks)


def test_content_survives_release_until_the_block_is_handed_out_least_recently_freed_first():
    pool = BlockPool(3)
    a, b, c = pool.take(3)
    for block, content in ((a, b"a"), (b, b"b"), (c, b"c")):
        pool.set_content(block, content)
    pool.release([b])
    pool.release([a])
    assert pool.take(1) == [b]
    assert pool.find_content(b"b") is None
    assert pool.find_content(b"a") == a
    pool.share([a])
    assert pool.num_free_blocks == 0
    assert pool.take(1) is None


def test_blocks_that_hold_nothing_are_reused_before_untouched_and_cached_ones():
    pool = BlockPool(4)
    cached, plain = pool.take(2)
    pool.set_content(cached, b"kept")
    pool.release([cached])
    pool.release([plain])
    assert pool.take(3) == [plain, 2, 3]
    assert pool.find_content(b"kept") == cached


def test_a_prompt_that_is_cached_whole_still_computes_its_last_token():
    kv = KVCacheManager(8, BLOCK_SIZE, True)
    token_ids = list(range(8))
    table = BlockTable()
    kv.extend(table, 8)
    kv.launched(table, token_ids, 8)
    again = BlockTable()
    assert kv.reuse_prefix(again, token_ids) == 4
    longer = BlockTable()
    assert kv.reuse_prefix(longer, [*token_ids, 9]) == 8
    assert longer.block_ids == table.block_ids


def test_equal_blocks_behind_different_prefixes_are_different_content():
    kv = KVCacheManager(8, BLOCK_SIZE, True)
    table = BlockTable()
    kv.extend(table, 8)
    kv.launched(table, [1, 1, 1, 1, 2, 2, 2, 2], 8)
    other = BlockTable()
    assert kv.reuse_prefix(other, [2, 2, 2, 2, 2, 2, 2, 2, 0]) == 0
