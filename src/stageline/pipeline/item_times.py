"""What was measured of a stage's items: the words in which stages, executor and cost model speak of it.

One idea: an item is timed where it runs, in its stage's own process, so caches, cores and neighbours are as in serving.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from stageline.pipeline.rank_memory import memory_of_ranks


class PlannedMicrobatch(msgspec.Struct, frozen=True):
    """The microbatch a partition is balanced for: decodes alone.

    Args:
        num_rows: requests in it, each with one new token.
        context_tokens: tokens of each request in the KV cache.
    """

    num_rows: int
    context_tokens: int


class StageItemTimes(msgspec.Struct, frozen=True, array_like=True, tag="item_times"):
    """Median times of one stage's items, over microbatches of decodes.

    Args:
        num_microbatches: how many were timed; with 0 there are no times.
        num_rows: rows per microbatch, the median.
        layers: which layers were timed; not all of the stage's have to be.
        layers_s: [layers]
        embedding_s, head_s: None where the stage has none. The head's time includes norm and sampling.
        free_bytes: of the stage's memory pool, now.
        memory_pool: stages with the same name share it.
        rank: who says it.
    """

    stage_index: int
    num_microbatches: int
    num_rows: int
    layers: list[int]
    layers_s: list[float]
    embedding_s: float | None
    head_s: float | None
    free_bytes: int
    memory_pool: str
    rank: int = 0


def times_of_ranks(times: Sequence[StageItemTimes]) -> StageItemTimes:
    """A stage's, from what each of its ranks timed of the same microbatches: the slowest rank's, item by item. In most
    items a rank waits for the others, so these differ little; in the rest the next item waits for the slowest."""
    pool, free_bytes = memory_of_ranks([one.memory_pool for one in times], [one.free_bytes for one in times])
    return msgspec.structs.replace(
        times[0],
        layers_s=[max(layer) for layer in zip(*(one.layers_s for one in times), strict=True)],
        embedding_s=_slowest([one.embedding_s for one in times]),
        head_s=_slowest([one.head_s for one in times]),
        free_bytes=free_bytes,
        memory_pool=pool,
    )


def _slowest(times_s: Sequence[float | None]) -> float | None:
    return max((time_s for time_s in times_s if time_s is not None), default=None)
