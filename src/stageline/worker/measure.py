"""Times a stage's items: those of the microbatches that run through it, or of a few layers before it is built.

One idea: an item is timed in its place, one after the other as in serving. Repeated alone, it would find its weights
in the cache and look faster than it ever is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from statistics import median

import msgspec
import torch

from stageline.attention.backend import AttentionMetadata, LayerCache
from stageline.attention.select import select_backend
from stageline.checkpoint.checkpoint import Checkpoint
from stageline.checkpoint.model_spec import ModelSpec
from stageline.checkpoint.tensor_shards import RankCuts, rank_spec
from stageline.clock import Clock
from stageline.executor.messages import Calibration
from stageline.models.family import Block, Head
from stageline.models.recorded_blocks import RunBlocks, record_blocks
from stageline.models.registry import load_family
from stageline.parallel.tensor_parallel import TensorParallel, alone
from stageline.pipeline.item_times import PlannedMicrobatch, StageItemTimes
from stageline.pipeline.microbatch import AddedRequest, Microbatch, MicrobatchLimits
from stageline.pipeline.slowdown import AS_FAST_AS_IT_IS, StageSlowdown
from stageline.sampling import SamplerSpec
from stageline.weights.reader import CheckpointReader
from stageline.weights.shard import ShardedReader
from stageline.worker.device import free_memory_bytes, resolve_device, resolve_dtype, synchronise
from stageline.worker.input_buffers import InputBuffers
from stageline.worker.kv_tensors import allocate_kv_tensors
from stageline.worker.leading_tokens import largest
from stageline.worker.stretch import Stretch

_NUM_REMEMBERED = 4096
_LEAST_ROWS_FRACTION = 0.8
"""Microbatches with fewer rows than this, of the most rows seen, belong to the beginning or the end of a run."""

_MOST_ROUNDS, _LEAST_ROUNDS, _LONGEST_S = 16, 3, 0.25
_LARGER_THAN_CACHES_BYTES = 2**26


class ItemTimer:
    """Times the items of microbatches of decodes: `start`, `mark` after every item, `finish`.

    Args:
        layers: the stage's.
        stretch: makes each item slower, as the stage is.
    """

    def __init__(
        self,
        stage_index: int,
        layers: Sequence[int],
        is_first: bool,
        is_last: bool,
        device: torch.device,
        clock: Clock,
        stretch: Stretch,
    ) -> None:
        self._stage_index = stage_index
        self._layers = list(layers)
        self._is_first, self._is_last = is_first, is_last
        self._device = device
        # Asked once: a stage may be timed all the time, with a mark per layer.
        self._is_on_host = device.type == "cpu"
        self._clock = clock
        self._stretch = stretch
        self._marks: list[float] = []
        self._timed: deque[tuple[int, list[float]]] = deque(maxlen=_NUM_REMEMBERED)

    def start(self) -> None:
        self._stretch.begin()
        self._marks = [self._clock.now_s()]

    def mark(self) -> None:
        """The next item is done."""
        if not self._is_on_host:
            synchronise(self._device)
        self._stretch.end()
        self._marks.append(self._clock.now_s())

    def finish(self, num_decode_rows: int, num_tokens: int) -> None:
        """The microbatch is done; it counts if all of its tokens are decodes."""
        if num_tokens == num_decode_rows:
            times_s = [end - start for start, end in zip(self._marks, self._marks[1:], strict=False)]
            self._timed.append((num_decode_rows, times_s))

    def times(self, typical: Callable[[Sequence[float]], float] = median) -> StageItemTimes:
        """Each item's typical time over the microbatches that had about as many rows as the largest."""
        most_rows = max((rows for rows, _ in self._timed), default=0)
        timed = [(rows, times_s) for rows, times_s in self._timed if rows >= _LEAST_ROWS_FRACTION * most_rows]
        items_s = [typical(item) for item in zip(*(times_s for _, times_s in timed), strict=True)]
        return StageItemTimes(
            stage_index=self._stage_index,
            num_microbatches=len(timed),
            num_rows=round(median(rows for rows, _ in timed)) if timed else 0,
            layers=self._layers if timed else [],
            layers_s=items_s[1 : 1 + len(self._layers)],
            embedding_s=items_s[0] if self._is_first and timed else None,
            head_s=items_s[-1] if self._is_last and timed else None,
            free_bytes=free_memory_bytes(self._device),
            memory_pool=str(self._device),
        )


@torch.inference_mode()
def calibrate(
    checkpoint: Checkpoint,
    calibration: Calibration,
    stage_index: int,
    *,
    is_first: bool,
    is_last: bool,
    dtype: str,
    device: str,
    quantization: str,
    clock: Clock,
    slowdown: StageSlowdown = AS_FAST_AS_IT_IS,
    device_index: int | None = None,
    join: Callable[[torch.device, torch.dtype], TensorParallel] = alone,
) -> StageItemTimes:
    """Read a few layers and the stage's ends, run the planned microbatch through them some times, and forget them.

    Args:
        device_index, join: as `stageline.worker.build.build_stage` takes them. All ranks of a stage do this at once.
    Raises: ConfigError if a weight cannot be read or does not fit.
    """
    torch_device = resolve_device(device, stage_index if device_index is None else device_index)
    torch_dtype, _ = resolve_dtype(dtype, checkpoint.spec.dtype, torch_device)
    planned, layers, ranks = calibration.planned, calibration.layers, join(torch_device, torch_dtype)
    spec, cuts = rank_spec(checkpoint.spec, ranks.size, ranks.rank), RankCuts(checkpoint.spec, ranks.rank, ranks.size)
    microbatch, limits = _planned_microbatch(planned, spec.vocab_size, calibration.block_size)
    with CheckpointReader(checkpoint, torch_dtype, torch_device, None, quantization != "none") as whole:
        reader = whole if ranks.size == 1 else ShardedReader(whole, cuts)
        family = load_family(spec.family)(spec, reader, select_backend(torch_device), limits.max_model_len, ranks)
        embedding = family.embedding() if is_first else None
        blocks = [family.block(layer) for layer in layers]
        head = family.head() if is_last else None
    caches = _filled_caches(spec, len(layers), limits, torch_dtype, torch_device)
    metadata = InputBuffers(limits, torch_device).apply_and_build(microbatch)
    token_ids = torch.tensor(microbatch.token_ids, dtype=torch.int64, device=torch_device)
    states = torch.randn((planned.num_rows, spec.hidden_size), device=torch_device).to(torch_dtype)
    run_blocks = _as_run_in_serving(blocks, caches, states)
    timer = ItemTimer(stage_index, layers, is_first, is_last, torch_device, clock, Stretch(slowdown, clock))
    for _ in _rounds(clock, torch_device, ranks):
        timer.start()
        hidden_states = states if embedding is None else embedding(token_ids)
        timer.mark()
        hidden_states, residual = run_blocks(hidden_states, metadata, timer.mark)
        if head is not None:
            _choose(head, hidden_states + residual)
            timer.mark()
        timer.finish(planned.num_rows, planned.num_rows)
    # Other stages are still starting: what disturbed a round says nothing of serving.
    return msgspec.structs.replace(timer.times(min), rank=ranks.rank)


def _as_run_in_serving(blocks: Sequence[Block], caches: Sequence[LayerCache], states: torch.Tensor) -> RunBlocks:
    def run_blocks(
        inputs: torch.Tensor, metadata: AttentionMetadata, on_block: Callable[[], None] | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden_states, residual = inputs, None
        for block, cache in zip(blocks, caches, strict=True):
            hidden_states, residual = block(hidden_states, residual, metadata, cache)
            if on_block is not None:
                on_block()
        assert residual is not None, "at least one layer is timed"
        return hidden_states, residual

    return record_blocks(run_blocks, states[:1], states.shape[0]) or run_blocks


def _rounds(clock: Clock, device: torch.device, ranks: TensorParallel) -> Iterator[int]:
    """As many rounds as there is time for, each with caches that hold something else.

    Ranks begin each round together, and agree which one is the last.
    """
    evicting = torch.zeros(_LARGER_THAN_CACHES_BYTES // 4, dtype=torch.float32, device=device)
    start_s = clock.now_s()
    for number in range(_MOST_ROUNDS):
        evicting.add_(1.0)
        elapsed_s = torch.tensor([[clock.now_s() - start_s]], dtype=torch.float32, device=device)
        is_over = ranks.all_reduce(elapsed_s).item() > _LONGEST_S * ranks.size
        if number >= _LEAST_ROUNDS and is_over:
            return
        synchronise(device)
        yield number


def _choose(head: Head, hidden_states: torch.Tensor) -> None:
    if head.likeliest(hidden_states) is None:
        largest(head(hidden_states))


def _planned_microbatch(
    planned: PlannedMicrobatch, vocab_size: int, block_size: int
) -> tuple[Microbatch, MicrobatchLimits]:
    """Decodes of new requests, each with blocks of its own for its context."""
    rows, num_tokens = planned.num_rows, planned.context_tokens + 1
    blocks = -(-num_tokens // block_size)
    added = [
        AddedRequest(row, num_tokens, list(range(row * blocks, (row + 1) * blocks)), SamplerSpec(seed=0), [])
        for row in range(rows)
    ]
    microbatch = Microbatch(
        epoch=0,
        number=0,
        removed=[],
        added=added,
        extended=[],
        request_numbers=list(range(rows)),
        num_computed_tokens=[planned.context_tokens] * rows,
        num_scheduled_tokens=[1] * rows,
        token_ids=[row * 97 % vocab_size for row in range(rows)],
        sampling_rows=list(range(rows)),
    )
    return microbatch, MicrobatchLimits(rows * blocks, block_size, vocab_size, rows, rows, num_tokens)


def _filled_caches(
    spec: ModelSpec, num_layers: int, limits: MicrobatchLimits, dtype: torch.dtype, device: torch.device
) -> list[LayerCache]:
    """Written to, because memory that never was is one and the same page, and quick to read."""
    caches = allocate_kv_tensors(spec, num_layers, limits.num_blocks, limits.block_size, dtype, device)
    for cache in caches:
        cache.keys.normal_()
        cache.values.normal_()
    return caches
