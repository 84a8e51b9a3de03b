"""Attention kernels: near float64 for every shape, and the same bits for a token in every company and every chunk."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from stageline.attention.backend import AttentionBackend, AttentionMetadata, LayerCache
from stageline.attention.cpu_kernels import CpuKernelAttention
from stageline.attention.select import select_backend
from stageline.checkpoint.model_spec import RopeSpec
from stageline.kernels import CpuKernels
from stageline.layers.rotary import Rotary
from tests.model.kernel_variants import library, variant

__all__ = ["library", "variant"]

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
DTYPES = list(TOLERANCE)


@dataclass(frozen=True)
class Row:
    """A request in the batch: its last `tokens` tokens, of `context` in all, are new."""

    tokens: int
    context: int


def store_metadata(slots: torch.Tensor) -> AttentionMetadata:
    """One request whose new tokens, all there are, go into these slots; its positions begin at 0."""
    return AttentionMetadata(
        num_decode_rows=0,
        num_scheduled_tokens=[len(slots)],
        num_computed_tokens=[0],
        query_starts=torch.tensor([0, len(slots)], dtype=torch.int32),
        context_lens=torch.tensor([len(slots)], dtype=torch.int32),
        block_tables=torch.zeros(1, 1, dtype=torch.int32),
        slot_mapping=slots,
        positions=torch.arange(len(slots)),
    )


class Batch:
    """Rows with random queries, keys and values; their blocks lie in random places of the cache, the rest is noise."""

    def __init__(
        self, rows: list[Row], heads: tuple[int, int], head_dim: int, block_size: int, dtype: torch.dtype, seed: int = 0
    ) -> None:
        self.rows, self.heads, self.block_size, self.dtype = rows, heads, block_size, dtype
        self.cap: float | None = None
        self.sinks: torch.Tensor | None = None
        generator = torch.Generator().manual_seed(seed)
        needed = [-(-row.context // block_size) for row in rows]
        shape = (sum(needed) + 1, heads[1], block_size, head_dim)
        self.keys, self.values = torch.randn(2, *shape, generator=generator).to(dtype).unbind()
        blocks = iter((torch.randperm(shape[0] - 1, generator=generator) + 1).tolist())
        self.tables = [[next(blocks) for _ in range(count)] for count in needed]
        num_tokens = sum(row.tokens for row in rows)
        fused = torch.randn(num_tokens, heads[0] + 2 * heads[1], head_dim, generator=generator).to(dtype)
        self.queries = list(fused[:, : heads[0]].split([row.tokens for row in rows]))

    def attend(self, backend: AttentionBackend, rows: list[int], window: int | None) -> list[torch.Tensor]:
        """Run these rows as one microbatch. Returns: a tensor [tokens, heads, head_dim] per row."""
        return self.attend_to([(self.rows[row], self.tables[row], self.queries[row]) for row in rows], backend, window)

    def attend_to(
        self, parts: list[tuple[Row, list[int], torch.Tensor]], backend: AttentionBackend, window: int | None
    ) -> list[torch.Tensor]:
        given = torch.cat([part for _, _, part in parts])
        beside = given.new_zeros(len(given), 2 * self.heads[1], given.shape[2])
        queries = torch.cat((given, beside), 1)[:, : self.heads[0]]  # as they lie in a fused projection
        width = max(len(table) for _, table, _ in parts)
        metadata = AttentionMetadata(
            num_decode_rows=next((i for i, (row, _, _) in enumerate(parts) if row.tokens != 1), len(parts)),
            num_scheduled_tokens=[row.tokens for row, _, _ in parts],
            num_computed_tokens=[row.context - row.tokens for row, _, _ in parts],
            query_starts=torch.tensor([0, *(row.tokens for row, _, _ in parts)], dtype=torch.int32).cumsum(0).int(),
            context_lens=torch.tensor([row.context for row, _, _ in parts], dtype=torch.int32),
            block_tables=torch.tensor([table + [0] * (width - len(table)) for _, table, _ in parts], dtype=torch.int32),
            slot_mapping=torch.zeros(len(queries), dtype=torch.int64),
            positions=torch.zeros(len(queries), dtype=torch.int64),
        )
        cache, scale = self._stored_by(backend), queries.shape[2] ** -0.5
        out = backend.attend(queries, metadata, cache, scale, window, self.cap, self.sinks)
        return list(out.split([row.tokens for row, _, _ in parts]))

    def _stored_by(self, backend: AttentionBackend) -> LayerCache:
        """All blocks' keys and values, also those that are noise, in the order that this backend reads."""
        cache = LayerCache(torch.zeros_like(self.keys), torch.zeros_like(self.values))
        by_token = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (self.keys, self.values))
        backend.store(*by_token, store_metadata(torch.arange(len(self.keys) * self.block_size)), cache)
        return cache

    def expected(self, row: int, window: int | None) -> torch.Tensor:
        """The textbook formula in float64."""
        group = self.heads[0] // self.heads[1]
        keys, values = (self._dense(row, cache) for cache in (self.keys, self.values))
        scores = torch.einsum("thd,khd->htk", self.queries[row].double(), keys.repeat_interleave(group, 1))
        context, tokens = self.rows[row].context, self.rows[row].tokens
        at, key = torch.arange(context - tokens, context)[:, None], torch.arange(context)
        is_hidden = (key > at) | (key <= at - (window or context))
        scores = scores * keys.shape[2] ** -0.5
        if self.cap is not None:
            scores = self.cap * (scores / self.cap).tanh()
        scores = scores.masked_fill(is_hidden, -torch.inf)
        if self.sinks is not None:
            scores = torch.cat((scores, self.sinks.double()[:, None, None].expand(-1, tokens, 1)), -1)
        weights = scores.softmax(-1)[..., :context]
        return torch.einsum("htk,khd->thd", weights, values.repeat_interleave(group, 1))

    def _dense(self, row: int, cache: torch.Tensor) -> torch.Tensor:
        return cache[self.tables[row]].transpose(1, 2).flatten(0, 1)[: self.rows[row].context].double()


MIXED = [Row(1, 1), Row(1, 16), Row(1, 200), Row(40, 40), Row(3, 65), Row(90, 150), Row(2, 64)]


def check(batch: Batch, window: int | None = None) -> None:
    rows = list(range(len(batch.rows)))
    for row, out in zip(rows, batch.attend(select_backend(CPU), rows, window), strict=True):
        tolerance = TOLERANCE[batch.dtype]
        torch.testing.assert_close(out.double(), batch.expected(row, window), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [8, 20, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("heads", [(9, 3), (5, 1), (3, 3), (32, 2)], ids=str)
def test_every_head_count_and_size_is_near_float64(
    variant: str, dtype: torch.dtype, head_dim: int, heads: tuple[int, int]
) -> None:
    check(Batch(MIXED, heads, head_dim, 16, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 1, 17, 64, 100])
@pytest.mark.parametrize("block_size", [1, 4, 5, 16, 32, 48, 64, 100])
def test_every_block_size_and_window_is_near_float64(
    variant: str, dtype: torch.dtype, window: int | None, block_size: int
) -> None:
    for head_dim in (24, 48):
        check(Batch(MIXED, (6, 2), head_dim, block_size, dtype), window)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("cap", "has_sinks"), [(1.5, False), (None, True), (50.0, True)])
def test_caps_and_sinks_are_near_float64(
    variant: str, dtype: torch.dtype, cap: float | None, has_sinks: bool
) -> None:
    for block_size in (16, 5):
        batch = Batch(MIXED, (6, 2), 48, block_size, dtype)
        batch.cap = cap
        # From a sink that takes nothing to one that takes nearly everything.
        batch.sinks = torch.tensor([-40.0, -1.0, 0.0, 2.0, 6.0, 30.0]) if has_sinks else None
        check(batch)
        check(batch, window=17)


def test_random_batches_are_near_float64(variant: str) -> None:
    draw = random.Random(7)
    for seed in range(15):
        rows = [Row(1, draw.randint(1, 400)) for _ in range(draw.randint(0, 6))]
        for tokens in draw.choices(range(2, 300), k=draw.randint(1, 3)):
            rows.append(Row(tokens, tokens + draw.randint(0, 200)))
        num_kv_heads = draw.randint(1, 3)
        heads = (num_kv_heads * draw.randint(1, 5), num_kv_heads)
        head_dim, block_size = draw.choice([8, 16, 40, 64]), draw.choice([16, 32, draw.randint(1, 40)])
        batch = Batch(rows, heads, head_dim, block_size, draw.choice(DTYPES), seed)
        check(batch, draw.choice([None, draw.randint(1, 300)]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_long_context_is_near_float64(variant: str, dtype: torch.dtype) -> None:
    check(Batch([Row(1, 5000), Row(70, 3000)], (6, 2), 64, 16, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_scores_do_not_overflow(variant: str, dtype: torch.dtype) -> None:
    batch = Batch([Row(1, 300), Row(30, 100)], (4, 2), 64, 16, dtype)
    batch.queries = [queries * 100 for queries in batch.queries]
    for out in batch.attend(select_backend(CPU), [0, 1], None):
        assert out.isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 50])
def test_a_row_has_the_same_bits_in_every_company(library: CpuKernels, dtype: torch.dtype, window: int | None) -> None:
    batch = Batch(MIXED, (9, 3), 64, 16, dtype)
    backend = CpuKernelAttention(library)
    together = batch.attend(backend, list(range(len(MIXED))), window)
    for row in range(len(MIXED)):
        assert torch.equal(batch.attend(backend, [row], window)[0], together[row])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 50])
def test_a_token_has_the_same_bits_in_every_chunk(library: CpuKernels, dtype: torch.dtype, window: int | None) -> None:
    """As the last of a decode, in small chunks, or in one with all the others."""
    batch = Batch([Row(200, 230)], (9, 3), 64, 16, dtype)
    backend, table, queries = CpuKernelAttention(library), batch.tables[0], batch.queries[0]
    whole = batch.attend(backend, [0], window)[0]
    for first, end in ((0, 1), (1, 8), (8, 71), (71, 72), (72, 199), (199, 200)):
        part = (Row(end - first, 30 + end), table, queries[first:end])
        assert torch.equal(batch.attend_to([part], backend, window)[0], whole[first:end])


def test_a_row_without_tokens_is_passed_over(library: CpuKernels) -> None:
    batch = Batch([Row(0, 30), Row(1, 30), Row(0, 5), Row(0, 1), Row(7, 9), Row(0, 40)], (4, 2), 16, 16, torch.float32)
    backend = CpuKernelAttention(library)
    outs = batch.attend(backend, list(range(6)), None)
    for row in (1, 4):
        torch.testing.assert_close(outs[row].double(), batch.expected(row, None), rtol=1e-5, atol=1e-5)
    assert batch.attend(backend, [0, 2], None)[0].shape == (0, 4, 16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("block_size", "head_dim"), [(16, 64), (32, 16), (48, 80), (7, 64), (16, 20)])
def test_a_token_is_stored_in_its_place_and_nowhere_else(
    library: CpuKernels, dtype: torch.dtype, block_size: int, head_dim: int
) -> None:
    """Rotated or not, in whatever order tokens come: each slot has the bits of its last token."""
    backend, num_tokens, num_heads, num_kv_heads = CpuKernelAttention(library), 5 * block_size, 3, 2
    generator = torch.Generator().manual_seed(3)
    heads = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim, generator=generator).to(dtype)
    rotary = Rotary(RopeSpec(), head_dim, num_tokens, CPU)
    metadata = store_metadata(torch.randperm(num_tokens, generator=generator))
    keys = rotary(heads[:, num_heads:-num_kv_heads], metadata.positions)
    values = heads[:, -num_kv_heads:]
    shape = (5, num_kv_heads, block_size, head_dim)
    rotated, one_by_one = (LayerCache(*torch.full((2, *shape), 7.0).to(dtype).unbind()) for _ in range(2))
    backend.rotate_and_store(heads.clone(), rotary, metadata, rotated)
    for token in range(num_tokens):
        here = slice(token, token + 1)
        before = torch.cat((one_by_one.keys, one_by_one.values))
        backend.store(keys[here], values[here], store_metadata(metadata.slot_mapping[here]), one_by_one)
        after = torch.cat((one_by_one.keys, one_by_one.values))
        assert (before != after).sum() == 2 * num_kv_heads * head_dim
    assert torch.equal(rotated.keys, one_by_one.keys) and torch.equal(rotated.values, one_by_one.values)
    blocks = metadata.slot_mapping // block_size
    for tensor, tokens in ((rotated.keys, keys), (rotated.values, values)):
        for block in range(5):
            stored, given = tensor[block].flatten(1).sort().values, tokens[blocks == block]
            assert torch.equal(stored, given.transpose(0, 1).flatten(1).sort().values)


@pytest.mark.parametrize("block_size", [16, 32])
def test_what_stands_in_unused_places_does_not_reach_a_row(library: CpuKernels, block_size: int) -> None:
    """Keys there may be anything; values are finite, as the store makes them."""
    batch = Batch([Row(1, 70), Row(20, 33)], (4, 2), 64, block_size, torch.bfloat16)
    backend = CpuKernelAttention(library)
    clean = batch.attend(backend, [0, 1], None)
    for row, table in zip(batch.rows, batch.tables, strict=True):
        batch.keys[table[-1], :, (row.context - 1) % block_size + 1 :] = torch.nan
        batch.values[table[-1], :, (row.context - 1) % block_size + 1 :] = torch.inf
    for row, out in enumerate(batch.attend(backend, [0, 1], None)):
        assert torch.equal(out, clean[row])
