"""A model on a pipeline's devices: which layers run where, what joins the stages, and the pace that follows.

One idea: a placement and a microbatch's shape give one ring, and everything else (TPOT, throughput, what limits) is
read off the ring.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from stageline.cost.communication import hop_bytes, hop_s, wire_s
from stageline.cost.hardware import Link
from stageline.cost.model_costs import ItemShape, ModelCosts
from stageline.cost.ring import Ring, makespan_s
from stageline.cost.roofline import StageDevices, StageParts, counted_items, stage_parts
from stageline.cost.stage_time import MicrobatchShape
from stageline.errors import ConfigError
from stageline.pipeline.partition import StageLayers, stages_of


@dataclass(frozen=True)
class Placement:
    """One pipeline.

    Args:
        model: as items.
        layer_counts: [stages] sums to the model's layers.
        stages: [stages] what each runs on.
        links: [stages - 1] what joins each stage with the next.
        tensors_per_hop: that cross a boundary, each of the hidden states' size.
        return_s: the sampled tokens' way back to the first stage.
        sampling_s: per microbatch.
    """

    model: ModelCosts
    layer_counts: tuple[int, ...]
    stages: tuple[StageDevices, ...]
    links: tuple[Link, ...]
    tensors_per_hop: int = 1
    return_s: float = 0.0
    sampling_s: float = 0.0

    def __post_init__(self) -> None:
        num_stages, num_layers = len(self.stages), len(self.model.layers)
        if len(self.layer_counts) != num_stages or len(self.links) != num_stages - 1:
            raise ConfigError(
                f"{num_stages} stages need {num_stages} layer counts and {num_stages - 1} links, but there are "
                f"{len(self.layer_counts)} and {len(self.links)}"
            )
        if sum(self.layer_counts) != num_layers or min(self.layer_counts) < 1:
            raise ConfigError(
                f"the partition {','.join(map(str, self.layer_counts))} must give every stage a layer and sum to the "
                f"model's {num_layers}"
            )

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    @property
    def num_devices(self) -> int:
        return sum(stage.num_devices for stage in self.stages)

    @cached_property
    def cut(self) -> tuple[StageLayers, ...]:
        return stages_of(self.layer_counts)

    @cached_property
    def items(self) -> tuple[tuple[tuple[ItemShape, int], ...], ...]:
        """[stages] what each runs."""
        return tuple(counted_items(self.model, cut.layers, cut.is_first, cut.is_last) for cut in self.cut)

    def parts(self, shape: MicrobatchShape) -> tuple[StageParts, ...]:
        """[stages] of one microbatch. Stages that are alike are priced once."""
        priced: dict[tuple[int, int], StageParts] = {}
        found = []
        for items, where in zip(self._alike, self.stages, strict=True):
            key = (id(items), id(where))
            if key not in priced:
                priced[key] = stage_parts(items, self.model.hidden_bytes, where, shape)
            found.append(priced[key])
        return tuple(found)

    def stage_times_s(self, shape: MicrobatchShape) -> tuple[float, ...]:
        """[stages] of one microbatch."""
        return tuple(parts.total_s for parts in self.parts(shape))

    @cached_property
    def _alike(self) -> tuple[tuple[tuple[ItemShape, int], ...], ...]:
        """`items` with one object for all that are equal."""
        first: dict[tuple[tuple[ItemShape, int], ...], tuple[tuple[ItemShape, int], ...]] = {}
        return tuple(first.setdefault(items, items) for items in self.items)

    def ring(self, shape: MicrobatchShape) -> Ring:
        num_bytes = hop_bytes(shape.num_tokens, self.model.hidden_bytes, self.tensors_per_hop)
        return Ring(
            self.stage_times_s(shape),
            tuple(hop_s(link, num_bytes) for link in self.links),
            tuple(wire_s(link, num_bytes) for link in self.links),
            self.sampling_s,
            self.return_s,
        )


@dataclass(frozen=True)
class DecodePace:
    """Steady decoding of some requests.

    Args:
        num_requests: running at once.
        num_microbatches: M, in flight.
        rows: requests in the largest of them.
        ring: of the largest.
        tpot_s: time of an output token of one request.
    """

    num_requests: int
    num_microbatches: int
    rows: int
    ring: Ring
    tpot_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.num_requests / self.tpot_s


def decode_pace(placement: Placement, num_requests: int, context_tokens: int, num_microbatches: int) -> DecodePace:
    """The pace with the requests split evenly over so many microbatches, at least one request in each.

    Args:
        context_tokens: in each request's KV cache.
    """
    num_microbatches = min(num_microbatches, num_requests)
    rows = -(-num_requests // num_microbatches)
    ring = placement.ring(MicrobatchShape(rows, 0, rows, rows * context_tokens))
    return DecodePace(num_requests, num_microbatches, rows, ring, ring.cycle_s(num_microbatches))


def best_decode_pace(placement: Placement, num_requests: int, context_tokens: int, widest: int) -> DecodePace:
    """The window of at most `widest`, at least one per stage, with the shortest cycle; of equal ones the narrowest."""
    counts = range(min(placement.num_stages, num_requests), min(widest, num_requests) + 1)
    # Of windows with equally many requests in the largest microbatch the narrowest is the best.
    narrowest = {-(-num_requests // count): count for count in reversed(counts)}
    paces = [decode_pace(placement, num_requests, context_tokens, count) for count in narrowest.values()]
    return min(paces, key=lambda pace: (round(pace.tpot_s, 12), pace.num_microbatches))


@dataclass(frozen=True)
class PromptPace:
    """One prompt that has the pipeline to itself.

    Args:
        chunk_tokens: new tokens of each chunk but the last.
        ttft_s: until its first token is back.
        slowest_stage_s: of the stage that takes longest for all chunks: what the prompt takes from a busy pipeline.
    """

    chunk_tokens: int
    ttft_s: float
    slowest_stage_s: float


def prompt_pace(placement: Placement, prompt_tokens: int, chunk_tokens: int) -> PromptPace:
    """Chunks of `chunk_tokens` one behind the other."""
    starts = range(0, prompt_tokens, chunk_tokens)
    shapes = [MicrobatchShape.of_rows([start], [min(chunk_tokens, prompt_tokens - start)]) for start in starts]
    rings = [placement.ring(shape) for shape in shapes]
    stages_s = [ring.stages_s for ring in rings]
    total_s = makespan_s(stages_s, [ring.hops_s for ring in rings])
    return PromptPace(
        chunk_tokens,
        total_s + placement.sampling_s + placement.return_s,
        max(sum(of_stage) for of_stage in zip(*stages_s, strict=True)),
    )


def best_prompt_pace(placement: Placement, prompt_tokens: int, largest_chunk: int) -> PromptPace:
    """The chunk size with the shortest time to first token: a power of two from 64, or the largest that may be."""
    sizes = {min(prompt_tokens, largest_chunk)}
    size = 64
    while size < min(prompt_tokens, largest_chunk):
        sizes.add(size)
        size *= 2
    # Chunks far smaller than what keeps the stages busy only add overhead, and take long to price.
    useful = [size for size in sizes if prompt_tokens / size <= 16 * placement.num_stages + 16]
    paces = [prompt_pace(placement, prompt_tokens, size) for size in sorted(useful or sizes, reverse=True)]
    return min(paces, key=lambda pace: pace.ttft_s)
