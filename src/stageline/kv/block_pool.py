"""Block ids: who may use them, which hold content worth keeping. Knows nothing of requests or bytes.

A block is *free* when nobody refers to it. A free block may still be *cached*: it keeps the content it was filled with
until it is handed out again. Free blocks form one queue. Those that hold nothing are handed out first, the last freed
before all, because its memory is the likeliest to be in a cache and to have been touched at all; then cached ones,
least recently freed first. Allocation and release are O(1) per block.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from stageline.errors import InternalError


class BlockPool:
    """Blocks 0 .. num_blocks - 1, reference counted, with a content index.

    Raises: InternalError when a block is released more often than it was taken, or a free block is referred to.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._num_references = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._block_of_content: dict[bytes, int] = {}
        self._content_of_block: dict[int, bytes] = {}

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    def take(self, num_blocks: int) -> list[int] | None:
        """Hand out blocks with one reference each, forgetting their old content. None if there are not enough."""
        if num_blocks > len(self._free):
            return None
        taken = []
        for _ in range(num_blocks):
            block_id, _ = self._free.popitem(last=False)
            content = self._content_of_block.pop(block_id, None)
            if content is not None:
                del self._block_of_content[content]
            self._num_references[block_id] = 1
            taken.append(block_id)
        return taken

    def share(self, block_ids: Iterable[int]) -> None:
        """Add one reference to each block; cached free blocks come back to life with their content."""
        for block_id in block_ids:
            if self._num_references[block_id] == 0:
                if block_id not in self._content_of_block:
                    raise InternalError(f"block {block_id} is free and holds nothing to share")
                del self._free[block_id]
            self._num_references[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Drop one reference to each block of a request's table, given in table order.

        The end of a table is freed first: it is the part least likely to be asked for again.
        """
        for block_id in reversed(block_ids):
            if self._num_references[block_id] < 1:
                raise InternalError(f"block {block_id} was released more often than it was taken")
            self._num_references[block_id] -= 1
            if self._num_references[block_id] == 0:
                self._free[block_id] = None
                if block_id not in self._content_of_block:
                    self._free.move_to_end(block_id, last=False)

    def set_content(self, block_id: int, content: bytes) -> None:
        """Remember what a full block holds; the first block with some content stays the one that is shared."""
        if self._num_references[block_id] < 1:
            raise InternalError(f"block {block_id} is free and cannot be filled")
        if content not in self._block_of_content and block_id not in self._content_of_block:
            self._block_of_content[content] = block_id
            self._content_of_block[block_id] = content

    def find_content(self, content: bytes) -> int | None:
        """The block that holds this content, in use or free."""
        return self._block_of_content.get(content)
