"""Block tables of requests over one pool of block ids, with a prefix cache.

All stages use the same block ids: a stage keeps the blocks of its own layers only, and every stage has the same number
of them. Full blocks are named by a hash of their tokens and of the block before, the first also by its request's salt:
equal prefixes have equal names, and requests with different salts never share. A block is shareable as soon as the
microbatch that fills it is launched, because stages run microbatches in order.

Layers with a sliding window have blocks of their own, from a second pool: a request's second table has as many places
as the first, but what has left the window is given back, and its place is not looked at any more. A prefix is reused as
far as the first table's blocks reach and the second's are there for the window that its next token sees.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from stageline.kv.block_pool import BlockPool


@dataclass
class BlockTable:
    """One request's blocks.

    Args:
        salt: what the name of its first block depends on besides the tokens.
        block_ids: in the order of its tokens.
        window_block_ids: the same for layers with a window; empty if there are no blocks for them.
        first_in_window: places before this one hold nothing any more.
        num_launched: leading tokens that are computed or launched.
        names: content names of its full blocks as far as they were computed; they outlive a preemption.
        num_filled: leading blocks whose content the prefix cache knows.
    """

    salt: str = ""
    block_ids: list[int] = field(default_factory=list)
    window_block_ids: list[int] = field(default_factory=list)
    first_in_window: int = 0
    num_launched: int = 0
    names: list[bytes] = field(default_factory=list)
    num_filled: int = 0


@dataclass(frozen=True)
class WindowBlocks:
    """Blocks of layers with a window. Args: num_tokens: the window, a token itself included."""

    num_blocks: int
    num_tokens: int


class KVCacheManager:
    """Decides which blocks a request uses.

    Args:
        num_blocks: blocks that every stage has room for.
        block_size: tokens per block.
        enable_prefix_caching: share full blocks between requests that begin alike.
        window: blocks of their own for layers with a window; None if they use the same as all.
    """

    def __init__(
        self, num_blocks: int, block_size: int, enable_prefix_caching: bool, window: WindowBlocks | None = None
    ) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._pool = BlockPool(num_blocks)
        self._window_tokens = window.num_tokens if window is not None else 0
        self._window_pool = BlockPool(window.num_blocks) if window is not None else None

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free_blocks

    @property
    def num_used_blocks(self) -> int:
        """Of `num_blocks`, those that some table has; or as large a part as of the blocks of layers with a window, if
        that is larger: who waits for blocks waits for either kind."""
        used = self._pool.num_blocks - self._pool.num_free_blocks
        if self._window_pool is None:
            return used
        in_window = self._window_pool.num_blocks - self._window_pool.num_free_blocks
        return max(used, -(-in_window * self._pool.num_blocks // self._window_pool.num_blocks))

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def has_room(self, tables: Iterable[tuple[BlockTable, int]], num_spare: int) -> bool:
        """Whether these tables could grow to so many tokens each, and of each kind of blocks `num_spare` were left.

        Of layers with a window, what a table keeps once it is that long counts; a chunk may need more for a moment.
        """
        missing = missing_in_window = num_spare
        for table, num_tokens in tables:
            missing += self.blocks_for(num_tokens) - len(table.block_ids)
            kept = min(self.blocks_for(num_tokens), self.blocks_for(self._window_tokens) + 1)
            missing_in_window += max(0, kept - len(table.window_block_ids) + table.first_in_window)
        if missing > self._pool.num_free_blocks:
            return False
        return self._window_pool is None or missing_in_window <= self._window_pool.num_free_blocks

    def reuse_prefix(self, table: BlockTable, token_ids: Sequence[int]) -> int:
        """Begin an empty table with the cached blocks that hold the beginning of `token_ids`.

        At least the last token is left to compute: its logits are needed.

        Returns: the number of tokens the table holds now.
        """
        if not self.enable_prefix_caching:
            return 0
        for index in range((len(token_ids) - 1) // self.block_size):
            block_id = self._pool.find_content(self._name(table, token_ids, index))
            if block_id is None:
                break
            table.block_ids.append(block_id)
        if self._window_pool is not None:
            self._reuse_window(table, self._window_pool)
        self._pool.share(table.block_ids)
        table.num_filled = len(table.block_ids)
        table.num_launched = table.num_filled * self.block_size
        return table.num_launched

    def _reuse_window(self, table: BlockTable, pool: BlockPool) -> None:
        """Shorten a reused prefix to where the window before its end is known, and share that window's blocks."""
        found = [pool.find_content(name) for name in table.names[: len(table.block_ids)]]
        end = start = len(found)
        while end > 0 and start > self._first_seen(end * self.block_size):
            start -= 1
            if found[start] is None:
                end = start
        del table.block_ids[end:]
        table.first_in_window = start = self._first_seen(end * self.block_size) if end else 0
        shared = [block_id for block_id in found[start:end] if block_id is not None]
        pool.share(shared)
        table.window_block_ids = [0] * start + shared

    def _first_seen(self, position: int) -> int:
        """The place of the first block that a token at this position sees through the window."""
        return max(0, position - self._window_tokens + 1) // self.block_size

    def extend(self, table: BlockTable, num_tokens: int) -> list[int] | None:
        """Make room for the first `num_tokens` tokens of a request.

        Returns: the blocks added to its table, perhaps none; None, with nothing changed, if the pool has too few.
        """
        if self._window_pool is not None:
            self._leave_behind(table, self._window_pool)
        num_missing = self.blocks_for(num_tokens) - len(table.block_ids)
        if num_missing <= 0:
            return []
        added = self._pool.take(num_missing)
        if added is None:
            return None
        if self._window_pool is not None:
            in_window = self._window_pool.take(num_missing)
            if in_window is None:
                self._pool.release(added)
                return None
            table.window_block_ids.extend(in_window)
        table.block_ids.extend(added)
        return added

    def _leave_behind(self, table: BlockTable, pool: BlockPool) -> None:
        """Give back what neither the next token nor a later one sees. Earlier ones are launched, and run before."""
        first = min(self._first_seen(table.num_launched), len(table.window_block_ids))
        if first > table.first_in_window:
            pool.release(table.window_block_ids[table.first_in_window : first])
            table.first_in_window = first

    def launched(self, table: BlockTable, token_ids: Sequence[int], num_tokens: int) -> None:
        """Publish the full blocks of the first `num_tokens` tokens: the microbatch that fills them is on its way."""
        table.num_launched = num_tokens
        if not self.enable_prefix_caching:
            return
        for index in range(table.num_filled, num_tokens // self.block_size):
            name = self._name(table, token_ids, index)
            self._pool.set_content(table.block_ids[index], name)
            if self._window_pool is not None:
                self._window_pool.set_content(table.window_block_ids[index], name)
            table.num_filled = index + 1

    def close(self, table: BlockTable) -> None:
        """Give a request's blocks back."""
        self._pool.release(table.block_ids)
        if self._window_pool is not None:
            self._window_pool.release(table.window_block_ids[table.first_in_window :])
        table.block_ids, table.window_block_ids = [], []
        table.num_filled = table.first_in_window = table.num_launched = 0

    def _name(self, table: BlockTable, token_ids: Sequence[int], index: int) -> bytes:
        """Content name of a full block; needs the names of the blocks before it."""
        if index == len(table.names):
            parent = table.names[-1] if table.names else _hash(table.salt.encode("utf-8", "surrogatepass"), b"")
            tokens = token_ids[index * self.block_size : (index + 1) * self.block_size]
            table.names.append(_hash(array("q", tokens).tobytes(), parent))
        return table.names[index]


def _hash(content: bytes, parent: bytes) -> bytes:
    return hashlib.blake2b(content, key=parent, digest_size=32).digest()
