"""Attention over a paged cache in plain torch, on any device: the fallback beside hand-written kernels.

One idea: the blocks of a head lie in one run of memory, so gathering them with `index_select` over
[num_blocks * num_kv_heads, block_size * head_dim] copies whole runs, and the gathered keys are already in the order
that a batched matmul wants. What to gather depends on the microbatch only, not on the layer: it is planned once.

Decode rows are gathered and multiplied in groups of similar length, small enough to stay in the CPU's cache; the
queries of a key head form one matrix. Rows with more tokens go one by one, in tiles of queries, each against no
more keys than its last query may see.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from stageline.attention.backend import AttentionMetadata, LayerCache, Rotation

_MIN_TILE_TOKENS, _MAX_TILE_TOKENS = 16, 128
_ALWAYS_GROUPED_BLOCKS = 4


@dataclass(frozen=True)
class WorkingSet:
    """How much one step may touch: what stays in a CPU's cache, or keeps a GPU busy without filling its memory.

    Args:
        gathered_bytes: keys of a group of decode rows.
        num_scores: scores of a tile of a prefill row.
    """

    gathered_bytes: int
    num_scores: int

    @staticmethod
    def of(device: torch.device) -> WorkingSet:
        if device.type == "cpu":
            return WorkingSet(gathered_bytes=1 << 20, num_scores=1 << 20)
        return WorkingSet(gathered_bytes=1 << 28, num_scores=1 << 26)


@dataclass(frozen=True)
class _ScoreRule:
    """What becomes of products before and in the softmax; see `AttentionBackend.attend`."""

    scale: float
    cap: float | None
    sinks: torch.Tensor | None

    def capped(self, scores: torch.Tensor) -> torch.Tensor:
        return scores if self.cap is None else scores.div_(self.cap).tanh_().mul_(self.cap)

    def weights(self, scores: torch.Tensor, has_tokens: bool) -> torch.Tensor:
        """scores: [..., num_kv_heads, heads per key head, tokens if it has them, keys]; hidden ones are -infinity."""
        if self.sinks is None:
            return torch.softmax(scores, -1)
        behind = (1, 1) if has_tokens else (1,)
        sinks = self.sinks.to(scores.dtype).view(scores.shape[-2 - len(behind)], -1, *behind)
        with_sink = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), -1)
        return torch.softmax(with_sink, -1)[..., :-1]


@dataclass(frozen=True)
class _DecodeGroup:
    """Rows attended together.

    Args:
        tokens: int64 [rows] their tokens, which are also their rows.
        runs: int64 [rows * num_kv_heads * blocks] runs of the cache to gather.
        is_hidden: bool [rows, 1, 1, blocks * block_size] keys that are padding, or older than the window.
    """

    tokens: torch.Tensor
    runs: torch.Tensor
    is_hidden: torch.Tensor


@dataclass(frozen=True)
class _PrefillRow:
    """A row attended by itself: tokens first_token:end_token, the first of them at position first_position.

    Args:
        runs: int64 [num_kv_heads * blocks] runs of the cache to gather.
        first_key: position of the first gathered key.
    """

    first_token: int
    end_token: int
    first_position: int
    runs: torch.Tensor
    first_key: int


@dataclass(frozen=True)
class _WindowPlan:
    decode_groups: list[_DecodeGroup]
    prefill_rows: list[_PrefillRow]


@dataclass(frozen=True)
class _Plan:
    """What one microbatch reads and writes in every layer's cache, for each sliding window that a layer has."""

    metadata: AttentionMetadata
    store_rows: torch.Tensor
    by_window: dict[int | None, _WindowPlan] = field(default_factory=dict)


class TorchPagedAttention:
    """The torch implementation of `AttentionBackend`; see there for shapes. Keeps the latest microbatch's plans: one,
    or two if layers with a window have blocks of their own."""

    def __init__(self, device: torch.device, working_set: WorkingSet | None = None) -> None:
        self._working_set = working_set or WorkingSet.of(device)
        self._is_future = torch.ones(_MAX_TILE_TOKENS, _MAX_TILE_TOKENS, dtype=torch.bool, device=device).triu_(1)
        self._latest_plans: tuple[_Plan, ...] = ()

    def rotate_and_store(
        self, heads: torch.Tensor, rotation: Rotation | None, metadata: AttentionMetadata, cache: LayerCache
    ) -> torch.Tensor:
        num_kv_heads = cache.keys.shape[1]
        num_heads = heads.shape[1] - 2 * num_kv_heads
        rotated = heads[:, : num_heads + num_kv_heads]
        if rotation is not None:
            rotated = rotation(rotated, metadata.positions)
        self.store(rotated[:, num_heads:], heads[:, num_heads + num_kv_heads :], metadata, cache)
        return rotated[:, :num_heads]

    def store(self, keys: torch.Tensor, values: torch.Tensor, metadata: AttentionMetadata, cache: LayerCache) -> None:
        head_dim = keys.shape[2]
        rows = self._plan(metadata, cache).store_rows
        cache.keys.view(-1, head_dim).index_copy_(0, rows, keys.reshape(-1, head_dim))
        # A hidden key has a weight of zero, and zero times infinity is NaN: one request's overflow would reach others
        # through the unused end of a block.
        finite = torch.nan_to_num(values)
        cache.values.view(-1, head_dim).index_copy_(0, rows, finite.reshape(-1, head_dim))

    def attend(
        self,
        queries: torch.Tensor,
        metadata: AttentionMetadata,
        cache: LayerCache,
        scale: float,
        sliding_window: int | None,
        cap: float | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        rule = _ScoreRule(scale, cap, sinks)
        window_plan = self._window_plan(metadata, cache, sliding_window)
        attended = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        for group in window_plan.decode_groups:
            self._attend_decodes(queries, attended, group, cache, rule)
        for row in window_plan.prefill_rows:
            self._attend_prefill(queries, attended, row, cache, rule, sliding_window)
        return attended

    def _attend_decodes(
        self, queries: torch.Tensor, attended: torch.Tensor, group: _DecodeGroup, cache: LayerCache, rule: _ScoreRule
    ) -> None:
        num_rows, num_kv_heads, head_dim = group.tokens.shape[0], cache.keys.shape[1], cache.keys.shape[3]
        grouped = queries.index_select(0, group.tokens).mul_(rule.scale).view(num_rows, num_kv_heads, -1, head_dim)
        keys = _gather(cache.keys, group.runs, num_rows)
        scores = rule.capped(torch.matmul(grouped, keys.transpose(2, 3))).masked_fill_(group.is_hidden, -math.inf)
        result = torch.matmul(rule.weights(scores, has_tokens=False), _gather(cache.values, group.runs, num_rows))
        attended.index_copy_(0, group.tokens, result.view(num_rows, -1, head_dim))

    def _attend_prefill(
        self,
        queries: torch.Tensor,
        attended: torch.Tensor,
        row: _PrefillRow,
        cache: LayerCache,
        rule: _ScoreRule,
        sliding_window: int | None,
    ) -> None:
        keys = _gather(cache.keys, row.runs, 1)[0]
        values = _gather(cache.values, row.runs, 1)[0]
        tile_tokens = self._tile_tokens(queries.shape[1], keys.shape[1])
        for first in range(row.first_token, row.end_token, tile_tokens):
            end = min(first + tile_tokens, row.end_token)
            position = row.first_position + first - row.first_token
            first_key = _first_seen_key(position, sliding_window)
            seen = slice(first_key - row.first_key, position + end - first - row.first_key)
            scores = rule.capped(_tile_scores(queries[first:end], keys[:, seen], rule.scale))
            self._hide_keys(scores, position, first_key, sliding_window)
            weights = rule.weights(scores, has_tokens=True).flatten(1, 2)
            result = torch.matmul(weights, values[:, seen]).view(*scores.shape[:3], -1)
            attended[first:end].view(end - first, *scores.shape[:2], -1).copy_(result.permute(2, 0, 1, 3))

    def _hide_keys(self, scores: torch.Tensor, position: int, first_key: int, sliding_window: int | None) -> None:
        """Put minus infinity where a query may not look.

        Args:
            scores: [..., tokens, keys]; the first token is at `position`, the first key at `first_key`, the last of
                both are the same token.
        """
        num_tokens = scores.shape[-2]
        scores[..., -num_tokens:].masked_fill_(self._is_future[:num_tokens, :num_tokens], -math.inf)
        if sliding_window is None or position + num_tokens - sliding_window <= first_key:
            return
        edge = scores[..., :num_tokens]
        is_too_old = torch.ones(edge.shape[-2:], dtype=torch.bool, device=scores.device)
        edge.masked_fill_(is_too_old.tril_(position - sliding_window - first_key), -math.inf)

    def _tile_tokens(self, num_heads: int, num_keys: int) -> int:
        fitting = self._working_set.num_scores // (num_heads * num_keys)
        return min(max(fitting, _MIN_TILE_TOKENS), _MAX_TILE_TOKENS)

    def _plan(self, metadata: AttentionMetadata, cache: LayerCache) -> _Plan:
        plan = next((plan for plan in self._latest_plans if plan.metadata is metadata), None)
        if plan is None:
            block_size, num_kv_heads = cache.block_size, cache.keys.shape[1]
            blocks = torch.div(metadata.slot_mapping, block_size, rounding_mode="floor")
            heads = torch.arange(num_kv_heads, device=blocks.device)
            runs = blocks.unsqueeze(1) * num_kv_heads + heads
            rows = runs * block_size + (metadata.slot_mapping - blocks * block_size).unsqueeze(1)
            plan = _Plan(metadata, rows.view(-1))
            self._latest_plans = (*self._latest_plans[-1:], plan)
        return plan

    def _window_plan(self, metadata: AttentionMetadata, cache: LayerCache, sliding_window: int | None) -> _WindowPlan:
        by_window = self._plan(metadata, cache).by_window
        if sliding_window not in by_window:
            by_window[sliding_window] = self._make_window_plan(metadata, cache, sliding_window)
        return by_window[sliding_window]

    def _make_window_plan(
        self, metadata: AttentionMetadata, cache: LayerCache, sliding_window: int | None
    ) -> _WindowPlan:
        planner = _Planner(metadata, cache, sliding_window)
        block_bytes = cache.keys[0].numel() * cache.keys.element_size()
        decode_blocks = planner.num_blocks[: metadata.num_decode_rows]
        groups = group_by_length(decode_blocks, block_bytes, self._working_set.gathered_bytes)
        prefills = range(metadata.num_decode_rows, len(metadata.num_scheduled_tokens))
        return _WindowPlan([planner.decode_group(rows) for rows in groups], planner.prefill_rows(prefills))


class _Planner:
    """Finds, for every row of a microbatch, the blocks that its queries can see.

    num_blocks: [rows] from the first visible block to the last, per row.
    """

    def __init__(self, metadata: AttentionMetadata, cache: LayerCache, sliding_window: int | None) -> None:
        self._metadata = metadata
        self._block_size = cache.block_size
        self._device = cache.keys.device
        self._heads = torch.arange(cache.keys.shape[1], device=self._device)
        self._sliding_window = sliding_window
        computed, scheduled = metadata.num_computed_tokens, metadata.num_scheduled_tokens
        self._context_lens = [a + b for a, b in zip(computed, scheduled, strict=True)]
        self._first_blocks = [self._first_seen_key(position) // self._block_size for position in computed]
        self.num_blocks = [
            -(-length // self._block_size) - first
            for length, first in zip(self._context_lens, self._first_blocks, strict=True)
        ]

    def decode_group(self, rows: list[int]) -> _DecodeGroup:
        num_blocks = max(self.num_blocks[row] for row in rows)
        tokens = torch.tensor(rows, device=self._device)
        first_blocks = torch.tensor([self._first_blocks[row] for row in rows], device=self._device).unsqueeze(1)
        columns = first_blocks + torch.arange(num_blocks, device=self._device)
        tables = self._metadata.block_tables.index_select(0, tokens).long()
        blocks = tables.gather(1, columns.clamp_(max=tables.shape[1] - 1))
        keys = first_blocks * self._block_size + torch.arange(num_blocks * self._block_size, device=self._device)
        context_lens = torch.tensor([self._context_lens[row] for row in rows], device=self._device).unsqueeze(1)
        is_hidden = keys >= context_lens
        if self._sliding_window is not None:
            is_hidden |= keys < context_lens - self._sliding_window
        return _DecodeGroup(tokens, self._runs(blocks), is_hidden[:, None, None, :])

    def prefill_rows(self, rows: range) -> list[_PrefillRow]:
        prefills = []
        first_token = self._metadata.num_decode_rows
        for row in rows:
            end_token = first_token + self._metadata.num_scheduled_tokens[row]
            first, count = self._first_blocks[row], self.num_blocks[row]
            blocks = self._metadata.block_tables[row : row + 1, first : first + count].long()
            position = self._metadata.num_computed_tokens[row]
            prefills.append(
                _PrefillRow(first_token, end_token, position, self._runs(blocks), first * self._block_size)
            )
            first_token = end_token
        return prefills

    def _runs(self, blocks: torch.Tensor) -> torch.Tensor:
        """blocks: [rows, blocks]. Returns: the runs to gather, [rows * num_kv_heads * blocks]."""
        return (blocks.unsqueeze(1) * self._heads.numel() + self._heads[:, None]).view(-1)

    def _first_seen_key(self, position: int) -> int:
        return _first_seen_key(position, self._sliding_window)


def group_by_length(num_blocks: list[int], block_bytes: int, limit_bytes: int) -> list[list[int]]:
    """Group rows to be padded to the longest of their group.

    Args:
        num_blocks: [rows] blocks per row.
        block_bytes: bytes of a block's keys.
        limit_bytes: most bytes of a group's padded keys; a longer row is a group of its own.
    Returns: the rows of each group; unless rows are very short, less than half of any row in a group is padding.
    """
    groups: list[list[int]] = []
    longest = 0
    for row in sorted(range(len(num_blocks)), key=lambda row: -num_blocks[row]):
        is_similar = num_blocks[row] * 2 > longest or longest <= _ALWAYS_GROUPED_BLOCKS
        if groups and is_similar and (len(groups[-1]) + 1) * longest * block_bytes <= limit_bytes:
            groups[-1].append(row)
        else:
            groups.append([row])
            longest = num_blocks[row]
    return groups


def _gather(blocks: torch.Tensor, runs: torch.Tensor, num_rows: int) -> torch.Tensor:
    """blocks: [num_blocks, num_kv_heads, block_size, head_dim]. Returns: [num_rows, num_kv_heads, keys, head_dim]."""
    num_blocks, num_kv_heads, block_size, head_dim = blocks.shape
    flat = blocks.view(num_blocks * num_kv_heads, block_size * head_dim)
    return flat.index_select(0, runs).view(num_rows, num_kv_heads, -1, head_dim)


def _tile_scores(queries: torch.Tensor, keys: torch.Tensor, scale: float) -> torch.Tensor:
    """Scaled products of a tile's queries with the keys that one of them may see.

    Args:
        queries: [tokens, num_heads, head_dim].
        keys: [num_kv_heads, keys, head_dim].
    Returns: [num_kv_heads, heads per key head, tokens, keys].
    """
    num_tokens, num_kv_heads, head_dim = queries.shape[0], keys.shape[0], keys.shape[2]
    grouped = (queries.view(num_tokens, num_kv_heads, -1, head_dim) * scale).permute(1, 2, 0, 3)
    scores = torch.matmul(grouped.reshape(num_kv_heads, -1, head_dim), keys.transpose(1, 2))
    return scores.view(num_kv_heads, -1, num_tokens, keys.shape[1])


def _first_seen_key(position: int, sliding_window: int | None) -> int:
    return 0 if sliding_window is None else max(0, position - sliding_window + 1)
