"""What the engine and a stage's process say to each other. Plain data; a path only in the configuration, by a pipe."""

from __future__ import annotations

import msgspec

from stageline.checkpoint.model_spec import ModelSpec
from stageline.links.keys import ClusterKey, LinkSecurity
from stageline.pipeline.item_times import PlannedMicrobatch, StageItemTimes
from stageline.pipeline.microbatch import Microbatch, MicrobatchLimits, MicrobatchResult, TokenMasks
from stageline.pipeline.slowdown import AS_FAST_AS_IT_IS, StageSlowdown
from stageline.timeline.span import Span
from stageline.timeline.stage_counters import StageCounters
from stageline.transfer.messages import WeightSource


class Calibration(msgspec.Struct, frozen=True):
    """What a stage times before it is told which layers to load.

    Args:
        layers: which of the model's layers; the first stage also times the embedding, the last one the head.
        block_size: tokens per KV block.
    """

    planned: PlannedMicrobatch
    layers: list[int]
    block_size: int


class LinkAccess(msgspec.Struct, frozen=True):
    """How a process's TCP links are protected, on its way to that process; never sent to another machine.

    Args:
        key: the cluster key's text form; a secret.
        is_insecure: without a key, links to other machines are open to anybody.
    """

    key: str | None = None
    is_insecure: bool = False

    def __repr__(self) -> str:
        return f"LinkAccess(has_key={self.key is not None}, is_insecure={self.is_insecure})"

    def security(self) -> LinkSecurity | None:
        """None keeps TCP to this machine's own addresses."""
        if self.key is not None:
            return LinkSecurity(ClusterKey.parse(self.key, "this process's configuration"))
        return LinkSecurity(None) if self.is_insecure else None


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a stage's process needs to start; it gets it by its standard input.

    Args:
        max_model_len, max_num_seqs, max_num_batched_tokens: bound what may arrive and what may be allocated.
        cores: CPU cores to bind to; empty binds to none.
        socket_folder: where the sockets are; to be removed if the engine cannot.
        engine_address: where its answers go.
        control_address, ping_address, input_address: where it listens; the first stage has no input.
        caller_name: if set, the engine is on another machine: this stage calls it at `engine_address`, as
            `caller_name.control` and `caller_name.ping`, for what it would otherwise listen for.
        access: how its TCP links are protected.
        output_address: where its activations go; None for the last stage.
        rank, num_ranks: which of the processes that share this stage's layers it is, and how many these are.
        deals_experts: these have whole experts each, rather than a part of each expert.
        ranks_fd: an inherited file whose memory they share; -1 for none.
        device_index: which of the host's GPUs it takes; -1 for the stage's number.
        more_input_addresses: where it listens for the parts of activations that the other ranks of the stage before
            send; the first rank's comes to `input_address`.
        more_output_addresses, more_token_output_addresses: of the receiving stage's other ranks. Each rank sends its
            part of the activations to all of them, tokens only the first.
        sends_whole: activations go to another machine, so that this rank alone sends them, whole, to one rank there.
        hand_on_addresses: of this stage's other ranks, which get by it what comes from another machine.
        input_dtype, output_dtype: how hidden states come in and go out: auto, int8 or fp8; neighbours agree.
        token_input_address: where the first stage gets sampled tokens from the last; None on others, for a single
            stage, and without look-ahead.
        token_output_address: the same address, for the last stage.
        weights: where the model is copied from if it is not here; then `model` means nothing.
        made_up: a model of this shape, with weights that mean nothing, takes the place of files.
        slowdown, input_delay_s: faults for tests; see `stageline.pipeline.slowdown.Slowdown`.
        calibration: if set, its layers are assigned after it, and the two numbers here mean nothing.
    """

    model: str
    stage_index: int
    num_stages: int
    first_layer: int
    end_layer: int
    dtype: str
    device: str
    quantization: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_threads: int
    cores: list[int]
    log_level: str
    socket_folder: str
    engine_address: str
    control_address: str
    ping_address: str
    input_address: str | None
    output_address: str | None
    input_dtype: str = "auto"
    output_dtype: str = "auto"
    token_input_address: str | None = None
    token_output_address: str | None = None
    rank: int = 0
    num_ranks: int = 1
    deals_experts: bool = False
    ranks_fd: int = -1
    device_index: int = -1
    more_input_addresses: list[str] = []
    more_output_addresses: list[str] = []
    more_token_output_addresses: list[str] = []
    sends_whole: bool = False
    hand_on_addresses: list[str] = []
    caller_name: str = ""
    access: LinkAccess = LinkAccess()
    calibration: Calibration | None = None
    weights: WeightSource | None = None
    made_up: ModelSpec | None = None
    slowdown: StageSlowdown = AS_FAST_AS_IT_IS
    input_delay_s: float = 0.0


def meeting_file(socket_folder: str, stage_index: int) -> str:
    """Where ranks of a stage that share no memory find one another."""
    return f"{socket_folder}/s{stage_index}.ranks"


class AssignLayers(msgspec.Struct, frozen=True, array_like=True, tag="assign_layers"):
    """Hold these layers, half-open: the answer to a calibration's times, or, when nothing is in flight, another cut.

    Layers that the stage has stay; the KV cache is gone until the next allocation.
    """

    first_layer: int
    end_layer: int


class Allocate(msgspec.Struct, frozen=True, array_like=True, tag="allocate"):
    """Make the KV cache, forget every request, and get ready for this microbatch as the first of an epoch."""

    limits: MicrobatchLimits
    epoch: int = 0
    first_microbatch: int = 0


class CollectSpans(msgspec.Struct, frozen=True, array_like=True, tag="collect_spans"):
    """Send the recorded spans that ended after `since_s`, the newest `most` of them; all if that is None."""

    since_s: float
    most: int | None = None


class CollectItemTimes(msgspec.Struct, frozen=True, array_like=True, tag="collect_item_times"):
    """Send the times of the items since the last such message; timing begins with the first.

    Args:
        goes_on: time on, from now.
    """

    goes_on: bool = True


class Stop(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """Leave."""


class Ping(msgspec.Struct, frozen=True, array_like=True, tag="ping"):
    """Show a sign of life. Args: asked_s: when, on the engine's clock; it comes back."""

    asked_s: float = 0.0


class InputClock(msgspec.Struct, frozen=True, array_like=True, tag="input_clock"):
    """The clock of the stage before is ahead of this stage's by so much; they run on different machines."""

    ahead_s: float


class CollectCounters(msgspec.Struct, frozen=True, array_like=True, tag="collect_counters"):
    """Send the stage's running totals."""


ToResponder = Ping | InputClock | CollectCounters | CollectSpans
ToWorker = Microbatch | TokenMasks | Allocate | AssignLayers | CollectItemTimes | Stop


class Loading(msgspec.Struct, frozen=True, array_like=True, tag="loading"):
    """Progress while weights are read. The first one, with 0 bytes read, says that the process is up."""

    stage_index: int
    num_bytes_read: int
    num_bytes_total: int
    rank: int = 0


class StageLoaded(msgspec.Struct, frozen=True, array_like=True, tag="loaded"):
    """What a stage found out while loading.

    Args:
        weight_bytes: of its weights as they lie in memory.
        free_bytes: memory free for the KV cache in its memory pool after loading.
        memory_pool: stages with the same name share that memory.
        dtype: the compute dtype it settled on.
        rank: who says it.
        num_ranks: for how many ranks it speaks, all of a stage once they are heard.
    """

    stage_index: int
    weight_bytes: int
    free_bytes: int
    memory_pool: str
    dtype: str
    rank: int = 0
    num_ranks: int = 1


class Allocated(msgspec.Struct, frozen=True, array_like=True, tag="allocated"):
    """The KV cache is there; microbatches may come."""

    stage_index: int
    rank: int = 0


class Spans(msgspec.Struct, frozen=True, array_like=True, tag="spans"):
    stage_index: int
    spans: list[Span]


class Pong(msgspec.Struct, frozen=True, array_like=True, tag="pong"):
    """Args:
    asked_s: as the ping said. told_s: now, on the stage's clock.
    """

    stage_index: int
    asked_s: float = 0.0
    told_s: float = 0.0
    rank: int = 0


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The stage raised and is leaving; or it cannot go on, for a link to another stage broke.

    Args:
        is_config_error: the operator's to mend, so `message` says everything and the traceback is noise.
        link_to: the stage at the other end of a link that broke, its own if that is another of its ranks; None if this
            is no such news.
    """

    stage_index: int
    message: str
    traceback: str
    is_config_error: bool
    rank: int = 0
    link_to: int | None = None


FromRank = Loading | StageItemTimes | StageLoaded | Allocated | Pong | Failed
"""What every rank of a stage says; the rest only its first one."""

FromStage = FromRank | Spans | StageCounters
FromWorker = FromStage | MicrobatchResult
