"""One stage as a thing that can be run: its layers, their KV cache, and on the last stage the sampler.

One idea: a microbatch is *prepared* (checked, block tables brought up to date, positions and slots computed) when it is
announced, and *run* when its activations are there. Both happen in the microbatches' order, but preparing may be ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from stageline.attention.backend import AttentionMetadata
from stageline.attention.select import select_backend
from stageline.checkpoint.model_spec import ModelSpec
from stageline.checkpoint.tensor_shards import rank_spec
from stageline.clock import Clock, MonotonicClock
from stageline.errors import FrameError
from stageline.models.decoder import DecoderStage
from stageline.models.family import WeightReader
from stageline.parallel.tensor_parallel import ALONE, TensorParallel
from stageline.pipeline.microbatch import (
    NO_TOKEN,
    Microbatch,
    MicrobatchLimits,
    MicrobatchResult,
    TokenMasks,
    check_microbatch,
)
from stageline.pipeline.slowdown import AS_FAST_AS_IT_IS, StageSlowdown
from stageline.sampling import TokenLogprobs
from stageline.timeline.span import Span, SpanKind
from stageline.worker.arrived_masks import ArrivedMasks
from stageline.worker.device import synchronise
from stageline.worker.input_buffers import InputBuffers
from stageline.worker.kv_tensors import allocate_kv_tensors
from stageline.worker.sampled_tokens import AwaitedTokens, SampledTokens
from stageline.worker.sampler import Sampler
from stageline.worker.shared_head import SharedHead
from stageline.worker.stretch import Stretch

if TYPE_CHECKING:
    from stageline.worker.measure import ItemTimer


@dataclass(frozen=True)
class PreparedMicrobatch:
    """A microbatch that may be run as soon as its input is there.

    Args:
        token_ids: int64 [tokens] for the first stage, else None. Those of pending rows are filled in when it is run.
    """

    microbatch: Microbatch
    metadata: AttentionMetadata
    token_ids: npt.NDArray[np.int64] | None


class Stage:
    """Consecutive layers of a model and everything that running them needs.

    Args:
        layers: half-open; the first stage's starts at 0, the last stage's stops at the model's number of layers.
        reader: gives the weights, and with them dtype and device.
        max_model_len: tokens; the longest sequence.
        ranks: that share the layers, of which the reader gives this rank's part. The first rank of the last stage
            samples; the others take part in it.
        stage_index: for the spans.
        slowdown: makes it slower than it is; a fault for tests.
        record: gets a span "forward" per microbatch and, on the last stage, one "sample"; None records nothing.
    Raises: CheckpointError if a weight is missing or misshapen.
    """

    def __init__(
        self,
        spec: ModelSpec,
        layers: range,
        reader: WeightReader,
        max_model_len: int,
        *,
        ranks: TensorParallel = ALONE,
        stage_index: int = 0,
        clock: Clock | None = None,
        record: Callable[[Span], None] | None = None,
        slowdown: StageSlowdown = AS_FAST_AS_IT_IS,
    ) -> None:
        self._spec = spec
        self.ranks = ranks
        self.layers = layers
        self._stage_index = stage_index
        self._clock = clock or MonotonicClock()
        self._record = record
        self.device = reader.device
        self.dtype = reader.dtype
        with torch.inference_mode():
            self._decoder = DecoderStage(spec, layers, reader, select_backend(self.device), max_model_len, ranks)
        self._head = SharedHead(self._decoder, ranks)
        self._sampler: Sampler | None = None
        self._masks = ArrivedMasks(spec.vocab_size)
        self._sampled = SampledTokens()
        self._limits: MicrobatchLimits | None = None
        self._buffers: InputBuffers | None = None
        self._timer: ItemTimer | None = None
        self.stretch = Stretch(slowdown, self._clock)

    @property
    def is_first(self) -> bool:
        return self._decoder.is_first

    @property
    def is_last(self) -> bool:
        return self._decoder.is_last

    @property
    def samples(self) -> bool:
        """Whether it gives results."""
        return self.is_last and self.ranks.rank == 0

    @property
    def vocab_size(self) -> int:
        return self._spec.vocab_size

    def allocate_kv(self, limits: MicrobatchLimits) -> None:
        """Allocate the KV cache and forget every request. Raises: ConfigError if it does not fit."""
        self._decoder.release()
        with torch.inference_mode():
            windowed = [self._spec.window_of(layer) is not None for layer in self.layers]
            caches = allocate_kv_tensors(
                rank_spec(self._spec, self.ranks.size),
                len(self.layers),
                limits.num_blocks,
                limits.block_size,
                self.dtype,
                self.device,
                windowed if limits.num_window_blocks else (),
                limits.num_window_blocks,
            )
        self._decoder.use(caches, limits.max_num_batched_tokens)
        self._limits = limits
        self._buffers = InputBuffers(limits, self.device)
        self._sampler = Sampler(self._spec.vocab_size, self.device) if self.samples else None
        self._masks = ArrivedMasks(self._spec.vocab_size)
        self._sampled = SampledTokens()

    def release_kv(self) -> None:
        """Have no KV cache and know no request until the next `allocate_kv`."""
        self._decoder.release()
        self._limits = self._buffers = self._timer = None

    def drop_layers(self, wanted: range) -> None:
        """Free the weights of layers that are not wanted any more; there is no KV cache."""
        self.layers = range(max(self.layers.start, wanted.start), min(self.layers.stop, wanted.stop))
        self._decoder.hold(self.layers)

    def read_layers(self, layers: range) -> None:
        """Have these layers: those that are there stay, the others are read. Raises: CheckpointError."""
        with torch.inference_mode():
            self._decoder.hold(layers)
        self.layers = layers

    def time_items(self, timer: ItemTimer | None) -> None:
        """Let `timer` follow every microbatch from now on; None for nobody."""
        self._timer = timer

    def expected_input(self, microbatch: Microbatch) -> tuple[tuple[int, int], torch.dtype] | None:
        """Shape and dtype of the hidden states that the microbatch brings; None on the first stage."""
        return None if self.is_first else ((microbatch.num_tokens, self._spec.hidden_size), self.dtype)

    @property
    def hidden_size(self) -> int:
        return self._spec.hidden_size

    def prepare(self, microbatch: Microbatch) -> PreparedMicrobatch:
        """Check a microbatch and apply what it changes; once for each, in order.

        Raises: FrameError if it does not fit the limits or the requests known here; the epoch is over then.
        """
        assert self._limits is not None and self._buffers is not None, "allocate_kv comes first"
        check_microbatch(microbatch, self._limits)
        metadata = self._buffers.apply_and_build(microbatch)
        if self.samples:
            self._masks.announce(microbatch)
            self._sampled.announce(microbatch)
        token_ids = np.array(microbatch.token_ids, dtype=np.int64) if self.is_first else None
        return PreparedMicrobatch(microbatch, metadata, token_ids)

    def add_masks(self, masks: TokenMasks) -> None:
        """Take masks for rows of a prepared microbatch; those of one that ran already are dropped.

        Raises: FrameError if they are not what a microbatch asked for.
        """
        if not self.samples:
            raise FrameError(f"s{self._stage_index}: masks, but tokens are chosen on the last stage")
        self._masks.add(masks)

    def take_awaited(self) -> AwaitedTokens | None:
        """On the last stage, tokens that a prepared microbatch awaits and that are sampled; each once, in order.

        Raises: FrameError if it awaits one that was not sampled.
        """
        return self._sampled.take()

    @torch.inference_mode()
    def run(
        self,
        prepared: PreparedMicrobatch,
        hidden_states: torch.Tensor | None = None,
        before_sampling: Callable[[], None] | None = None,
        pending_token_ids: Sequence[int] | npt.NDArray[np.int32] = (),
    ) -> torch.Tensor | MicrobatchResult:
        """Compute a prepared microbatch; once for each, in order.

        Args:
            hidden_states: [tokens, hidden] from the stage before, not changed; None on the first stage.
            pending_token_ids: [pending rows] for the first stage.
        Returns: hidden states [tokens, hidden] for the next stage, or the last stage's result.
        Raises: FrameError if the hidden states are not of the expected shape and dtype.
        """
        microbatch = prepared.microbatch
        inputs = self._inputs(prepared, hidden_states, pending_token_ids)
        self.stretch.at(microbatch.number)
        timer = self._timer
        on_item = None if timer is None else timer.mark
        if timer is not None:
            timer.start()
        self.stretch.begin()
        start_s = self._clock.now_s()
        output = self._decoder.forward(inputs, prepared.metadata, on_item)
        synchronise(self.device)
        self.stretch.end()
        forward_end_s = self._clock.now_s()
        self._record_span("forward", microbatch, start_s, forward_end_s)
        if before_sampling is not None and microbatch.masked_rows and self.samples:
            before_sampling()
        result = output if self._sampler is None else self._sample(self._sampler, microbatch, output)
        if self.is_last and not self.samples:
            self._head.follow(output)
        self.stretch.end()
        if isinstance(result, MicrobatchResult):
            self._sampled.add(result)
            self._record_span("sample", microbatch, forward_end_s, self._clock.now_s())
        if timer is not None:
            timer.mark()
            timer.finish(microbatch.num_decode_rows, microbatch.num_tokens)
        return result

    def _inputs(
        self,
        prepared: PreparedMicrobatch,
        hidden_states: torch.Tensor | None,
        pending_token_ids: Sequence[int] | npt.NDArray[np.int32],
    ) -> torch.Tensor:
        expected = self.expected_input(prepared.microbatch)
        if expected is None:
            assert prepared.token_ids is not None and hidden_states is None, "the first stage embeds token ids"
            rows = prepared.microbatch.pending_rows
            assert len(rows) == len(pending_token_ids), "a pending row needs its token"
            if rows:
                # Rows before a decode are decodes, so a row's number is its token's index.
                prepared.token_ids[rows] = pending_token_ids
            return torch.from_numpy(prepared.token_ids).to(self.device)
        assert hidden_states is not None, "a later stage needs hidden states"
        shape, dtype = expected
        if tuple(hidden_states.shape) != shape or hidden_states.dtype != dtype:
            raise FrameError(
                f"s{self._stage_index} {prepared.microbatch}: hidden states {tuple(hidden_states.shape)} of "
                f"{hidden_states.dtype}, expected {shape} of {dtype}"
            )
        return hidden_states.to(self.device)

    def _sample(self, sampler: Sampler, microbatch: Microbatch, hidden_states: torch.Tensor) -> MicrobatchResult:
        """Logits are computed only where a token is sampled or a prompt's log-probabilities are wanted."""
        sampler.apply(microbatch)
        masks = self._masks.take(microbatch)
        prompt_logprobs = sampler.prompt_logprobs(microbatch, lambda rows: self._head.logits(hidden_states, rows))
        late = set(microbatch.masked_rows) - masks.keys()
        rows = [row for row in microbatch.sampling_rows if row not in late]
        token_ids: list[int] = []
        logprobs: list[TokenLogprobs | None] = []
        if rows:
            token_ids, logprobs = self._choose(sampler, microbatch, hidden_states, rows, masks)
        self._head.finish()
        if late:
            chosen = dict(zip(rows, token_ids, strict=True))
            described = dict(zip(rows, logprobs, strict=False))
            token_ids = [chosen.get(row, NO_TOKEN) for row in microbatch.sampling_rows]
            logprobs = [described.get(row) for row in microbatch.sampling_rows] if described else []
        return MicrobatchResult(microbatch.epoch, microbatch.number, token_ids, logprobs, prompt_logprobs)

    def _choose(
        self,
        sampler: Sampler,
        microbatch: Microbatch,
        hidden_states: torch.Tensor,
        rows: Sequence[int],
        masks: Mapping[int, bytes],
    ) -> tuple[list[int], list[TokenLogprobs | None]]:
        """A token for each of these rows; where only the likeliest are wanted, logits may not be needed."""
        row_ends = microbatch.row_ends
        sampled = [row_ends[row] - 1 for row in rows]
        if sampler.is_plain_greedy(microbatch):
            likeliest = self._head.likeliest(hidden_states, sampled)
            if likeliest is not None:
                return likeliest.tolist(), []
        return sampler.sample(microbatch, self._head.logits(hidden_states, sampled), rows, masks)

    def _record_span(self, kind: SpanKind, microbatch: Microbatch, start_s: float, end_s: float) -> None:
        if self._record is not None:
            tokens, rows = microbatch.num_tokens, microbatch.num_rows
            self._record(Span(self._stage_index, microbatch.number, kind, start_s, end_s, tokens, rows))
