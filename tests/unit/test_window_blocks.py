"""Blocks of layers with a window: whatever a token sees is there, though what has left the window is given back."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from stageline.kv.kv_cache_manager import BlockTable, KVCacheManager, WindowBlocks
from stageline.kv.kv_plan import KVCacheMemory, WindowNeed, plan_kv_cache
from stageline.kv.kv_size import window_share
from stageline.scheduler.limits import SchedulerLimits
from stageline.scheduler.scheduler import Scheduler
from tests.unit.simulated_stages import engine_request
from tests.unit.virtual_pipeline import STAGE_COSTS, VirtualPipeline

BLOCK_SIZE = 4
ALL, WINDOW = "all", "window"


class Row:
    """A request: its tokens are 0 and 1, so that prefixes are shared."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.table = BlockTable()
        self.num_computed = 0


class WindowMachine(RuleBasedStateMachine):
    """A stage whose cache holds, in the place of a key, everything that the key depends on."""

    @initialize(window=st.integers(1, 14), num_window_blocks=st.integers(2, 12), prefix_caching=st.booleans())
    def start(self, window, num_window_blocks, prefix_caching):
        self.window = window
        self.kv = KVCacheManager(20, BLOCK_SIZE, prefix_caching, WindowBlocks(num_window_blocks, window))
        self.num_window_blocks = num_window_blocks
        self.rows: list[Row] = []
        self.memory: dict[tuple[str, int, int], tuple[int, ...]] = {}

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=40))
    @precondition(lambda self: len(self.rows) < 5)
    def open(self, tokens):
        row = Row(tokens)
        row.num_computed = self.kv.reuse_prefix(row.table, tokens)
        assert row.num_computed % BLOCK_SIZE == 0 and row.num_computed < len(tokens)
        self.rows.append(row)

    @rule(data=st.data())
    @precondition(lambda self: self.rows)
    def microbatch(self, data):
        """Some rows get tokens. All of a microbatch is stored before any of it is looked at."""
        computed = []
        for row in list(self.rows):
            left = len(row.tokens) - row.num_computed
            count = data.draw(st.integers(0, min(left, 9)))
            if count == 0:
                continue
            if self.kv.extend(row.table, row.num_computed + count) is None:
                if not any(row is other for other, _, _ in computed):
                    self.rows.remove(row)
                    self.kv.close(row.table)
                continue
            computed.append((row, row.num_computed, row.num_computed + count))
            row.num_computed += count
            self.kv.launched(row.table, row.tokens, row.num_computed)
        for row, begin, end in computed:
            for position in range(begin, end):
                for kind, block_id in self.blocks_at(row, position):
                    self.memory[kind, block_id, position % BLOCK_SIZE] = tuple(row.tokens[: position + 1])
        for row, begin, end in computed:
            for position in range(begin, end):
                for seen in range(position + 1):
                    for kind, block_id in self.blocks_at(row, seen):
                        if kind is ALL or seen > position - self.window:
                            found = self.memory.get((kind, block_id, seen % BLOCK_SIZE))
                            assert found == tuple(row.tokens[: seen + 1]), (kind, seen, position)

    def blocks_at(self, row, position):
        place = position // BLOCK_SIZE
        return (ALL, row.table.block_ids[place]), (WINDOW, row.table.window_block_ids[place])

    @rule(data=st.data())
    @precondition(lambda self: self.rows)
    def close(self, data):
        row = data.draw(st.sampled_from(self.rows))
        self.rows.remove(row)
        self.kv.close(row.table)

    @invariant()
    def no_block_is_lost(self):
        held = {i for row in self.rows for i in row.table.window_block_ids[row.table.first_in_window :]}
        assert self.kv._window_pool.num_free_blocks + len(held) == self.num_window_blocks
        for row in self.rows:
            assert len(row.table.window_block_ids) == len(row.table.block_ids)


TestWindows = WindowMachine.TestCase
TestWindows.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_a_long_request_holds_its_window_only():
    kv = KVCacheManager(100, BLOCK_SIZE, True, WindowBlocks(5, 8))
    table, tokens = BlockTable(), list(range(200))
    for num_tokens in range(4, 200, 4):
        assert kv.extend(table, num_tokens) is not None
        kv.launched(table, tokens, num_tokens)
        assert len(table.window_block_ids) - table.first_in_window <= 4


def test_a_prefix_whose_window_is_gone_is_reused_no_further_than_it_is_known():
    kv = KVCacheManager(100, BLOCK_SIZE, True, WindowBlocks(6, 8))
    table, tokens = BlockTable(), [7] * 100
    for num_tokens in (12, 24, 36):
        kv.extend(table, num_tokens)
        kv.launched(table, tokens, num_tokens)
    kv.close(table)
    assert kv.reuse_prefix(BlockTable(), tokens[:37]) == 36, "the end of it is there"
    assert kv.reuse_prefix(BlockTable(), tokens[:13]) == 0, "the window before its 12th token was used for others"


def test_the_plan_gives_windows_what_their_share_says_and_counts_both_kinds():
    need = WindowNeed(num_tokens=8, bytes_per_token=(30, 0), share=0.25, least_blocks=3)
    asked = [KVCacheMemory(num_bytes=4000)] * 2
    plan = plan_kv_cache(asked, [10**6] * 2, [10, 40], BLOCK_SIZE, 10**6, need)
    assert (plan.num_blocks, plan.limiting_stage, plan.window) == (25, 1, WindowBlocks(7, 8))
    assert plan.stages[0].used_bytes == BLOCK_SIZE * (25 * 10 + 7 * 30)
    assert plan.stages[0].num_possible_blocks == 56  # 56 * 10 + 14 * 30 is within 1000, 57 * 10 + 15 * 30 is not
    assert plan.stages[1].used_bytes == BLOCK_SIZE * 25 * 40


@pytest.mark.parametrize("num_blocks", [1, 3, 4, 12, 40, 1000])
def test_there_are_never_more_blocks_for_windows_than_others_nor_fewer_than_a_request_needs(num_blocks):
    need = WindowNeed(num_tokens=8, bytes_per_token=(1,), share=0.1, least_blocks=5)
    assert min(num_blocks, 5) <= need.blocks_beside(num_blocks) <= num_blocks


def test_the_memory_is_divided_for_the_requests_that_are_expected():
    """Of a window of 512 tokens: whoever says how long requests are gets room for most of them."""
    assert window_share(512, 16, 4096) == window_share(512, 16, 4096, 2048) == (512 + 32) / 2048
    assert window_share(512, 16, 4096, 256) == 1.0
    assert window_share(512, 16, 4096, 10**6) == (512 + 32) / 4096


def test_requests_wait_for_blocks_in_windows_as_for_others():
    """Let in for the other blocks alone, they would be preempted as soon as they grow, and computed again."""
    window = WindowBlocks(num_blocks=40, num_tokens=64)
    limits = SchedulerLimits(
        num_stages=2, window=2, max_num_seqs=64, max_num_batched_tokens=256, max_model_len=400, max_chunk_tokens=None,
        max_decode_slowdown=2.0,
    )  # fmt: skip
    pipeline = VirtualPipeline(Scheduler(KVCacheManager(1000, BLOCK_SIZE, False, window), limits), [STAGE_COSTS] * 2)
    for number in range(30):
        pipeline.arrive(engine_request(str(number), [1] * 32, 8))
    pipeline.run()
    assert all(record.is_finished for record in pipeline.records.values())
    assert sum(microbatch.num_tokens for microbatch in pipeline.launched) == 30 * (32 + 8 - 1)
    assert pipeline.scheduler.num_preemptions == 0


def test_what_is_used_most_is_what_counts_as_used():
    kv = KVCacheManager(100, BLOCK_SIZE, False, WindowBlocks(30, 8))
    short, long = BlockTable(), BlockTable()
    kv.extend(short, 15 * BLOCK_SIZE)
    assert kv.num_used_blocks == 50, "half of the windows' blocks, and 15 of the others"
    kv.close(short)
    for num_tokens in range(BLOCK_SIZE, 60 * BLOCK_SIZE + 1, BLOCK_SIZE):
        kv.extend(long, num_tokens)
        kv.launched(long, [0] * num_tokens, num_tokens)
    assert kv.num_used_blocks == 60


def test_a_long_request_that_has_its_window_waits_for_no_more_of_it():
    kv = KVCacheManager(100, BLOCK_SIZE, False, WindowBlocks(8, 8))
    table = BlockTable()
    for num_tokens in range(4, 41, 4):
        kv.extend(table, num_tokens)
        kv.launched(table, list(range(num_tokens)), num_tokens)
    assert kv.has_room([(table, 200)], num_spare=1) and not kv.has_room([(table, 400)], num_spare=1)
    assert kv.has_room([(BlockTable(), 200)], num_spare=2) and not kv.has_room([(BlockTable(), 200)], num_spare=3)
