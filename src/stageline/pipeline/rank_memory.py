"""How much memory the ranks of a stage share; who makes it imports no kernels, so its size is told here.

Each rank has a line of its own and two slots, for steps in turn; see kernels/source/ranks.cpp.
"""

from __future__ import annotations

LINE_BYTES = 128
SLOT_BYTES = 2**22
"""Of one rank in one step; what is larger takes several."""


def shared_bytes(num_ranks: int) -> int:
    """Memory, zeroed, that so many ranks share."""
    return num_ranks * (LINE_BYTES + 2 * SLOT_BYTES)
