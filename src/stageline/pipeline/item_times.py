"""What was measured of a stage's items: the words in which stages, executor and cost model speak of it.

One idea: an item is timed where it runs, in its stage's own process, so caches, cores and neighbours are as in serving.
"""

from __future__ import annotations

import msgspec


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
