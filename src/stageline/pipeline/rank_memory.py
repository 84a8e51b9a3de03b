"""Memory of the ranks of a stage: how much of it they share to talk, and what they have for a model's layers.

Each rank has a line of its own and two slots, for steps in turn; see kernels/source/ranks.cpp. Who makes them imports
no kernels, so their size is told here.
"""

from __future__ import annotations

from collections.abc import Sequence

LINE_BYTES = 128
SLOT_BYTES = 2**22
"""Of one rank in one step; what is larger takes several."""


def shared_bytes(num_ranks: int) -> int:
    """Memory, zeroed, that so many ranks share."""
    return num_ranks * (LINE_BYTES + 2 * SLOT_BYTES)


def memory_of_ranks(pools: Sequence[str], free_bytes: Sequence[int]) -> tuple[str, int]:
    """The memory pool of all ranks of a stage, and what is free there. Ranks with memory of their own are as good as
    the one that has least.

    Args:
        pools, free_bytes: [ranks]
    """
    if len(set(pools)) == 1:
        return pools[0], min(free_bytes)
    return " + ".join(pools), min(free_bytes) * len(pools)
