"""How many blocks every stage has room for: the operator's wish, each stage's free memory, one agreed number."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from stageline.errors import ConfigError
from stageline.kv.kv_cache_manager import WindowBlocks

_MOST_BLOCKS = 2**40
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY_UNITS = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


@dataclass(frozen=True)
class KVCacheMemory:
    """One stage's share as asked for: exactly one of the two is set."""

    num_bytes: int | None = None
    fraction_of_free: float | None = None


def parse_kv_cache_memory(text: str, num_stages: int) -> tuple[KVCacheMemory, ...]:
    """Read `--kv-cache-memory`: one value for all stages, or a comma-separated value per stage.

    Raises: ConfigError if a value is neither a size nor a fraction, or their number does not match the stages.
    """
    values = tuple(_parse_one(entry.strip(), text) for entry in text.split(","))
    if len(values) == 1:
        return values * num_stages
    if len(values) != num_stages:
        raise ConfigError(
            f"--kv-cache-memory {text!r} has {len(values)} values for {num_stages} stages; give 1 or {num_stages}"
        )
    return values


def _parse_one(entry: str, text: str) -> KVCacheMemory:
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*([kmgt]i?|)b?", entry.lower(), flags=re.ASCII)
    if not match:
        raise ConfigError(f"--kv-cache-memory {text!r}: {entry!r} is not a size (such as 4GiB) or a fraction (0.3)")
    number, unit = match.groups()
    is_fraction = unit == "" and "." in number
    if is_fraction:
        if not 0 < float(number) <= 1:
            raise ConfigError(f"--kv-cache-memory {text!r}: the fraction {entry} must be above 0 and at most 1")
        return KVCacheMemory(fraction_of_free=float(number))
    num_bytes = int(float(number) * {**_UNITS, **_BINARY_UNITS}[unit])
    if num_bytes < 1:
        raise ConfigError(f"--kv-cache-memory {text!r}: {entry!r} is no memory at all")
    return KVCacheMemory(num_bytes=num_bytes)


@dataclass(frozen=True)
class StageKV:
    """One stage's side of the plan.

    Args:
        bytes_per_token: of its layers that keep all tokens.
        available_bytes: what it may use.
        num_possible_blocks: what that would hold.
        used_bytes: what the agreed number of blocks takes.
        window_bytes_per_token: of its layers that keep a window's tokens.
    """

    bytes_per_token: int
    available_bytes: int
    num_possible_blocks: int
    used_bytes: int
    window_bytes_per_token: int = 0

    @property
    def unused_bytes(self) -> int:
        return self.available_bytes - self.used_bytes


@dataclass(frozen=True)
class WindowNeed:
    """What layers with a window need.

    Args:
        num_tokens: the window.
        bytes_per_token: per stage, of these layers.
        share: of the other layers' number of blocks.
        least_blocks: what one request may need while it is computed.
    """

    num_tokens: int
    bytes_per_token: Sequence[int]
    share: float
    least_blocks: int

    def blocks_beside(self, num_blocks: int) -> int:
        """How many of these blocks go with so many of the others; a request never has more of them."""
        return min(num_blocks, max(self.least_blocks, math.ceil(num_blocks * self.share)))


@dataclass(frozen=True)
class KVPlan:
    """The agreed number of blocks. `limiting_stage` is None when no stage limits but the largest useful number does.

    Args:
        window: blocks of the layers with a window, where they have their own.
    """

    num_blocks: int
    block_size: int
    limiting_stage: int | None
    stages: tuple[StageKV, ...]
    window: WindowBlocks | None = None

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size


def plan_kv_cache(
    asked: Sequence[KVCacheMemory],
    free_bytes: Sequence[int],
    bytes_per_token: Sequence[int],
    block_size: int,
    max_useful_blocks: int,
    window: WindowNeed | None = None,
) -> KVPlan:
    """Agree on the blocks per stage: the minimum over the stages, and no more than could ever be used.

    Args:
        free_bytes: per stage, memory it may count as its own after loading its weights.
        bytes_per_token: per stage, for its layers that keep all tokens.
        window: what the others need; None if there are none.
        max_useful_blocks: what max_num_seqs requests of max_model_len tokens would take.
    Raises: ConfigError if a size is above what is free, or a stage has no room for a single block.
    """
    available = []
    for stage_index, (wish, free) in enumerate(zip(asked, free_bytes, strict=True)):
        wanted = wish.num_bytes if wish.num_bytes is not None else int(free * (wish.fraction_of_free or 0.0))
        if wanted > free:
            raise ConfigError(
                f"stage {stage_index}: --kv-cache-memory asks for {wanted:,} bytes, but {free:,} are free after "
                f"loading; ask for at most {free:,}"
            )
        available.append(wanted)
    rooms = [
        _StageRoom(num_bytes, block_size, per_token, window, window.bytes_per_token[stage_index] if window else 0)
        for stage_index, (num_bytes, per_token) in enumerate(zip(available, bytes_per_token, strict=True))
    ]
    possible = [room.num_possible_blocks for room in rooms]
    smallest = min(possible)
    limiting_stage = possible.index(smallest)
    if smallest < 1:
        raise ConfigError(
            f"stage {limiting_stage}: {available[limiting_stage]:,} bytes of KV cache hold no block of {block_size} "
            f"tokens ({rooms[limiting_stage].used_bytes(1):,} bytes); raise --kv-cache-memory or lower --block-size"
        )
    num_blocks = min(smallest, max_useful_blocks)
    stages = tuple(
        StageKV(room.bytes_per_token, room.num_bytes, blocks, room.used_bytes(num_blocks), room.window_bytes_per_token)
        for room, blocks in zip(rooms, possible, strict=True)
    )
    return KVPlan(
        num_blocks,
        block_size,
        limiting_stage if smallest <= max_useful_blocks else None,
        stages,
        None if window is None else WindowBlocks(window.blocks_beside(num_blocks), window.num_tokens),
    )


@dataclass(frozen=True)
class _StageRoom:
    """A stage's memory for its KV cache. Args: num_bytes: of it."""

    num_bytes: int
    block_size: int
    bytes_per_token: int
    window: WindowNeed | None
    window_bytes_per_token: int

    def used_bytes(self, num_blocks: int) -> int:
        """What so many blocks take, with those of layers with a window that go with them."""
        beside = 0 if self.window is None else self.window.blocks_beside(num_blocks)
        return self.block_size * (num_blocks * self.bytes_per_token + beside * self.window_bytes_per_token)

    @property
    def num_possible_blocks(self) -> int:
        if self.window is None:
            return self.num_bytes // (self.block_size * self.bytes_per_token)
        return bisect_right(range(_MOST_BLOCKS), self.num_bytes, key=self.used_bytes) - 1
