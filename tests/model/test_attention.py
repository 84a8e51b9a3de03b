"""Paged attention equals the textbook formula in float64, whatever the shapes, the block table and the batch's mix."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stageline.attention.backend import AttentionBackend, LayerCache
from stageline.attention.select import select_backend
from stageline.attention.torch_paged import TorchPagedAttention, WorkingSet, group_by_length
from stageline.pipeline.microbatch import MicrobatchLimits
from stageline.worker.input_buffers import InputBuffers
from tests.model.requests_under_test import RequestsUnderTest

CPU = torch.device("cpu")


def naive_attention(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, first: int, scale: float, window: int | None
) -> torch.Tensor:
    """queries: [tokens, heads, head_dim] from position `first` on; keys, values: [context, kv heads, head_dim]."""
    queries, keys, values = queries.double(), keys.double(), values.double()
    group = queries.shape[1] // keys.shape[1]
    out = torch.empty_like(queries)
    for token in range(queries.shape[0]):
        position = first + token
        oldest = 0 if window is None else max(0, position - window + 1)
        for head in range(queries.shape[1]):
            seen = keys[oldest : position + 1, head // group]
            weights = torch.softmax(seen @ queries[token, head] * scale, 0)
            out[token, head] = weights @ values[oldest : position + 1, head // group]
    return out


@dataclass(frozen=True)
class Shape:
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    window: int | None = None
    dtype: torch.dtype = torch.float32


class PagedAndDense:
    """Runs microbatches through a backend and remembers every key and value densely beside it."""

    def __init__(
        self, shape: Shape, max_model_len: int = 512, max_num_seqs: int = 64, backend: AttentionBackend | None = None
    ) -> None:
        num_blocks = max_num_seqs * 4 + -(-max_model_len // shape.block_size) * 4
        self.limits = MicrobatchLimits(num_blocks, shape.block_size, 1000, max_num_seqs, 4096, max_model_len)
        self.shape = shape
        self.requests = RequestsUnderTest(self.limits)
        self.buffers = InputBuffers(self.limits, CPU)
        self.backend = backend or select_backend(CPU)
        size = (num_blocks, shape.num_kv_heads, shape.block_size, shape.head_dim)
        self.cache = LayerCache(torch.zeros(size, dtype=shape.dtype), torch.zeros(size, dtype=shape.dtype))
        self.dense: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._generator = torch.Generator().manual_seed(0)

    def check(self, rows: dict[int, int], tolerance: float) -> None:
        """Run one microbatch with random queries, keys and values; compare every token with the naive formula."""
        shape, microbatch = self.shape, self.requests.microbatch(rows)
        metadata = self.buffers.apply_and_build(microbatch)
        num_tokens = microbatch.num_tokens
        fused = self._noise(num_tokens, shape.num_heads + 2 * shape.num_kv_heads)
        queries, keys, values = fused.split([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], 1)
        scale = shape.head_dim**-0.5
        self.backend.store(keys, values, metadata, self.cache)
        out = self.backend.attend(queries, metadata, self.cache, scale, shape.window)
        assert out.shape == queries.shape and out.dtype == shape.dtype
        for row, (number, end) in enumerate(zip(microbatch.request_numbers, microbatch.row_ends, strict=True)):
            tokens = slice(end - microbatch.num_scheduled_tokens[row], end)
            all_keys, all_values = self._remember(number, keys[tokens], values[tokens])
            first = microbatch.num_computed_tokens[row]
            expected = naive_attention(queries[tokens], all_keys, all_values, first, scale, shape.window)
            torch.testing.assert_close(out[tokens].double(), expected, rtol=tolerance, atol=tolerance)
        self.requests.append(microbatch, [1] * len(microbatch.sampling_rows))

    def _remember(self, number: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if number in self.dense:
            old_keys, old_values = self.dense[number]
            keys, values = torch.cat((old_keys, keys)), torch.cat((old_values, values))
        self.dense[number] = keys, values
        return keys, values

    def _noise(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, self.shape.head_dim, generator=self._generator).to(self.shape.dtype)


def run_mixed_batches(shape: Shape, tolerance: float) -> None:
    """Prompts in chunks, prompts beside decodes, decodes alone."""
    pair = PagedAndDense(shape)
    for number, length in enumerate([40, 1, 17, shape.block_size, 2 * shape.block_size + 1]):
        pair.requests.add(number, list(range(length)))
    pair.check({0: 7, 1: 1, 2: 17}, tolerance)
    pair.check({0: 33, 1: 1, 2: 1, 3: shape.block_size}, tolerance)
    pair.check({0: 1, 1: 1, 2: 1, 3: 1, 4: shape.block_size}, tolerance)
    pair.check({3: 1, 0: 1, 4: shape.block_size + 1}, tolerance)
    for _ in range(3):
        pair.check({4: 1, 0: 1, 2: 1, 1: 1, 3: 1}, tolerance)


@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (9, 3), (5, 1)], ids=["gqa", "mha", "odd gqa", "mqa"])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
def test_every_head_count_and_size_equals_the_formula(heads: tuple[int, int], head_dim: int) -> None:
    run_mixed_batches(Shape(num_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim), 1e-5)


@pytest.mark.parametrize("block_size", [1, 5, 16, 32])
def test_every_block_size_equals_the_formula(block_size: int) -> None:
    run_mixed_batches(Shape(block_size=block_size, head_dim=16), 1e-5)


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 33, 500])
@pytest.mark.parametrize("block_size", [4, 16])
def test_a_sliding_window_hides_older_tokens_only(window: int, block_size: int) -> None:
    run_mixed_batches(Shape(window=window, block_size=block_size, head_dim=16), 1e-5)


@pytest.mark.parametrize("window", [None, 20])
def test_bfloat16_stays_within_its_precision_of_the_formula(window: int | None) -> None:
    run_mixed_batches(Shape(dtype=torch.bfloat16, window=window), 2e-2)


@pytest.mark.parametrize("window", [None, 100, 130])
def test_prompts_longer_than_a_tile_of_queries_equal_the_formula(window: int | None) -> None:
    pair = PagedAndDense(Shape(num_heads=2, num_kv_heads=1, head_dim=16, window=window))
    pair.requests.add(0, list(range(400)))
    for chunk in (129, 255, 16):
        pair.check({0: chunk}, 1e-5)
    pair.check({0: 1}, 1e-5)


def test_decodes_of_very_different_lengths_equal_the_formula() -> None:
    pair = PagedAndDense(Shape(num_heads=2, num_kv_heads=1, head_dim=16, block_size=4))
    lengths = [300, 3, 50, 4, 150, 299, 5, 1]
    for number, length in enumerate(lengths):
        pair.requests.add(number, list(range(length)))
        pair.check({number: length}, 1e-5)
    pair.check(dict.fromkeys(range(len(lengths)), 1), 1e-5)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_sequence_of_mixed_batches_equals_the_formula(data: st.DataObject) -> None:
    num_kv_heads = data.draw(st.integers(1, 3))
    shape = Shape(
        num_heads=num_kv_heads * data.draw(st.integers(1, 3)),
        num_kv_heads=num_kv_heads,
        head_dim=data.draw(st.sampled_from([8, 20])),
        block_size=data.draw(st.integers(1, 9)),
        window=data.draw(st.one_of(st.none(), st.integers(1, 30))),
    )
    pair = PagedAndDense(shape, max_model_len=64, max_num_seqs=4)
    for number in range(4):
        pair.requests.add(number, list(range(data.draw(st.integers(1, 30)))))
    for _ in range(4):
        pending = {n: len(r.tokens) - r.num_computed for n, r in pair.requests.requests.items()}
        chosen = data.draw(st.sets(st.sampled_from(sorted(pending)), min_size=1))
        pair.check({number: data.draw(st.integers(1, pending[number])) for number in chosen}, 1e-5)


def test_another_requests_overflow_does_not_reach_a_row() -> None:
    """Values past a row's end are masked; a request that overflowed may have left infinity there."""
    shape = Shape(head_dim=16)
    pair = PagedAndDense(shape)
    for number in (0, 1):
        pair.requests.add(number, [1] * 20)
    metadata = pair.buffers.apply_and_build(pair.requests.microbatch({0: 20}))
    overflowed = torch.full((20, 2, 16), math.inf)
    pair.backend.store(overflowed, overflowed, metadata, pair.cache)
    pair.requests.remove(0)
    pair.check({1: 20}, 1e-5)
    pair.check({1: 1}, 1e-5)


def test_a_microbatch_without_tokens_attends_to_nothing() -> None:
    pair = PagedAndDense(Shape(head_dim=16))
    pair.check({}, 1e-5)


def test_groups_and_tiles_are_for_speed_only() -> None:
    """Every row alone and the smallest tiles give what large groups and tiles give."""
    pair = PagedAndDense(Shape(head_dim=16), backend=TorchPagedAttention(CPU))
    alone = TorchPagedAttention(CPU, WorkingSet(gathered_bytes=1, num_scores=1))
    for number in range(20):
        pair.requests.add(number, list(range(30 + number)))
        pair.check({number: 30 + number}, 1e-5)
    pair.requests.add(20, list(range(100)))
    microbatch = pair.requests.microbatch({**dict.fromkeys(range(20), 1), 20: 100})
    metadata = pair.buffers.apply_and_build(microbatch)
    fused = torch.randn(120, 8, 16, generator=torch.Generator().manual_seed(1))
    pair.backend.store(fused[:, 4:6], fused[:, 6:], metadata, pair.cache)
    together = pair.backend.attend(fused[:, :4], metadata, pair.cache, 0.25, None)
    torch.testing.assert_close(alone.attend(fused[:, :4], metadata, pair.cache, 0.25, None), together)


@given(st.lists(st.integers(1, 300), max_size=40), st.integers(1, 5000))
def test_groups_hold_every_row_once_within_the_limit_and_waste_less_than_half(
    num_blocks: list[int], limit_bytes: int
) -> None:
    groups = group_by_length(num_blocks, 10, limit_bytes)
    assert sorted(row for rows in groups for row in rows) == list(range(len(num_blocks)))
    for rows in groups:
        longest = max(num_blocks[row] for row in rows)
        assert len(rows) == 1 or len(rows) * longest * 10 <= limit_bytes
        assert longest <= 4 or all(num_blocks[row] * 2 > longest for row in rows)
