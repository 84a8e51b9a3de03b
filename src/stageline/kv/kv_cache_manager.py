"""Block tables of requests over one pool of block ids, with a prefix cache.

All stages use the same block ids: a stage keeps the blocks of its own layers only, and every stage has the same number
of them. Full blocks are named by a hash of their tokens and of the block before, the first also by its request's salt:
equal prefixes have equal names, and requests with different salts never share. A block is shareable as soon as the
microbatch that fills it is launched, because stages run microbatches in order.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from stageline.kv.block_pool import BlockPool


@dataclass
class BlockTable:
    """One request's blocks.

    Args:
        salt: what the name of its first block depends on besides the tokens.
        block_ids: in the order of its tokens.
        names: content names of its full blocks as far as they were computed; they outlive a preemption.
        num_filled: leading blocks whose content the prefix cache knows.
    """

    salt: str = ""
    block_ids: list[int] = field(default_factory=list)
    names: list[bytes] = field(default_factory=list)
    num_filled: int = 0


class KVCacheManager:
    """Decides which blocks a request uses.

    Args:
        num_blocks: blocks that every stage has room for.
        block_size: tokens per block.
        enable_prefix_caching: share full blocks between requests that begin alike.
    """

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._pool = BlockPool(num_blocks)

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free_blocks

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

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
        self._pool.share(table.block_ids)
        table.num_filled = len(table.block_ids)
        return table.num_filled * self.block_size

    def extend(self, table: BlockTable, num_tokens: int) -> list[int] | None:
        """Make room for the first `num_tokens` tokens of a request.

        Returns: the blocks added to its table, perhaps none; None, with nothing changed, if the pool has too few.
        """
        num_missing = self.blocks_for(num_tokens) - len(table.block_ids)
        if num_missing <= 0:
            return []
        added = self._pool.take(num_missing)
        if added is not None:
            table.block_ids.extend(added)
        return added

    def launched(self, table: BlockTable, token_ids: Sequence[int], num_tokens: int) -> None:
        """Publish the full blocks of the first `num_tokens` tokens: the microbatch that fills them is on its way."""
        if not self.enable_prefix_caching:
            return
        for index in range(table.num_filled, num_tokens // self.block_size):
            self._pool.set_content(table.block_ids[index], self._name(table, token_ids, index))
            table.num_filled = index + 1

    def close(self, table: BlockTable) -> None:
        """Give a request's blocks back."""
        self._pool.release(table.block_ids)
        table.block_ids = []
        table.num_filled = 0

    def _name(self, table: BlockTable, token_ids: Sequence[int], index: int) -> bytes:
        """Content name of a full block; needs the names of the blocks before it."""
        if index == len(table.names):
            parent = table.names[-1] if table.names else _hash(table.salt.encode("utf-8", "surrogatepass"), b"")
            tokens = token_ids[index * self.block_size : (index + 1) * self.block_size]
            table.names.append(_hash(array("q", tokens).tobytes(), parent))
        return table.names[index]


def _hash(content: bytes, parent: bytes) -> bytes:
    return hashlib.blake2b(content, key=parent, digest_size=32).digest()
