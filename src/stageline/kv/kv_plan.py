"""How many blocks every stage has room for: the operator's wish, each stage's free memory, one agreed number."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from stageline.errors import ConfigError

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
        bytes_per_token: of all its layers.
        available_bytes: what it may use.
        num_possible_blocks: what that would hold.
        used_bytes: what the agreed number of blocks takes.
    """

    bytes_per_token: int
    available_bytes: int
    num_possible_blocks: int
    used_bytes: int

    @property
    def unused_bytes(self) -> int:
        return self.available_bytes - self.used_bytes


@dataclass(frozen=True)
class KVPlan:
    """The agreed number of blocks. `limiting_stage` is None when no stage limits but the largest useful number does."""

    num_blocks: int
    block_size: int
    limiting_stage: int | None
    stages: tuple[StageKV, ...]

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size


def plan_kv_cache(
    asked: Sequence[KVCacheMemory],
    free_bytes: Sequence[int],
    bytes_per_token: Sequence[int],
    block_size: int,
    max_useful_blocks: int,
) -> KVPlan:
    """Agree on the blocks per stage: the minimum over the stages, and no more than could ever be used.

    Args:
        free_bytes: per stage, memory it may count as its own after loading its weights.
        bytes_per_token: per stage, for all its layers.
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
    bytes_per_block = [per_token * block_size for per_token in bytes_per_token]
    possible = [num_bytes // per_block for num_bytes, per_block in zip(available, bytes_per_block, strict=True)]
    smallest = min(possible)
    limiting_stage = possible.index(smallest)
    if smallest < 1:
        raise ConfigError(
            f"stage {limiting_stage}: {available[limiting_stage]:,} bytes of KV cache hold no block of {block_size} "
            f"tokens ({bytes_per_block[limiting_stage]:,} bytes); raise --kv-cache-memory or lower --block-size"
        )
    num_blocks = min(smallest, max_useful_blocks)
    stages = tuple(
        StageKV(per_token, num_bytes, blocks, num_blocks * block_size * per_token)
        for per_token, num_bytes, blocks in zip(bytes_per_token, available, possible, strict=True)
    )
    return KVPlan(num_blocks, block_size, limiting_stage if smallest <= max_useful_blocks else None, stages)
