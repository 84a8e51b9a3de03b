"""A measuring process: `python -m stageline.worker.host_measure`, started by `stageline plan --calibrate`.

One idea: layers are timed in a row that is longer than the caches, as a stage runs them; what stands alone, a single
layer, is timed after the caches were emptied.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from statistics import median

import msgspec
import torch

from stageline.attention.backend import LayerCache
from stageline.attention.select import select_backend
from stageline.links.child_process import read_message, write_message
from stageline.links.frames import MessageDecoder, encode_message
from stageline.links.sockets import Links
from stageline.models.decoder import DecoderStage
from stageline.pipeline.host_measurement import (
    Echo,
    Leave,
    Measured,
    MeasuringConfig,
    Order,
    Ready,
    TimeMicrobatch,
    Trouble,
)
from stageline.pipeline.microbatch import AddedRequest, Microbatch, MicrobatchLimits, MicrobatchResult
from stageline.sampling import SamplerSpec
from stageline.worker.device import resolve_device, resolve_dtype, set_threads, synchronise
from stageline.worker.input_buffers import InputBuffers
from stageline.worker.kv_tensors import allocate_kv_tensors
from stageline.worker.made_up_weights import MadeUpWeights

_LARGER_THAN_CACHES_BYTES = 2**26
_LEAST_ROUNDS = 2
_BLOCK_SIZE = 16


class HostMeasurer:
    """Two stages of one model: its first layers, and its first alone."""

    def __init__(self, config: MeasuringConfig) -> None:
        self._device = resolve_device(config.device)
        self._spec = spec = config.spec
        self._dtype, _ = resolve_dtype(config.dtype, spec.dtype, self._device)
        self.num_layers = min(config.num_layers, spec.num_layers)
        num_blocks = -(-config.max_kv_tokens // _BLOCK_SIZE)
        self._limits = MicrobatchLimits(
            num_blocks, _BLOCK_SIZE, spec.vocab_size, config.max_tokens, config.max_tokens, config.max_model_len
        )
        parts = (range(self.num_layers), range(1))
        reader, backend = MadeUpWeights(self._dtype, self._device), select_backend(self._device)
        with torch.inference_mode():
            self._layers, self._one = (
                DecoderStage(spec, layers, reader, backend, config.max_model_len) for layers in parts
            )
        for stage, layers in zip((self._layers, self._one), parts, strict=True):
            stage.use(self._filled_caches(len(layers)), config.max_tokens)
        # One thread's own time is its time on a core, whatever else the host does meanwhile.
        is_one_thread = self._device.type == "cpu" and config.num_threads == 1
        self._now_s = time.thread_time if is_one_thread else time.perf_counter
        self._evicting = torch.zeros(_LARGER_THAN_CACHES_BYTES // 4, dtype=torch.float32, device=self._device)

    def _filled_caches(self, num_layers: int) -> list[LayerCache]:
        """Written to, because memory that never was is one and the same page, and quick to read."""
        limits = self._limits
        caches = allocate_kv_tensors(
            self._spec, num_layers, limits.num_blocks, limits.block_size, self._dtype, self._device
        )
        for cache in caches:
            cache.keys.normal_()
            cache.values.normal_()
        return caches

    @torch.inference_mode()
    def measure(self, order: TimeMicrobatch) -> Measured:
        """Run the order's microbatch for its time."""
        buffers = InputBuffers(self._limits, self._device)
        introduction, repeated = _microbatches(order, self._spec.vocab_size)
        buffers.apply_and_build(introduction)
        metadata = buffers.apply_and_build(repeated)
        token_ids = torch.tensor(repeated.token_ids, dtype=torch.int64, device=self._device)
        layers_s: list[float] = []
        one_layer_s: list[float] = []
        # The first round finds nothing as it will be.
        deadline_s = time.monotonic() + order.duration_s
        while len(layers_s) <= _LEAST_ROUNDS or time.monotonic() < deadline_s:
            layers_s.append(self._time(lambda: self._layers.forward(token_ids, metadata)))
            if order.with_one_layer:
                self.empty_caches()
                one_layer_s.append(self._time(lambda: self._one.forward(token_ids, metadata)))
        return Measured(_typical(layers_s[1:]), _typical(one_layer_s[1:]) if one_layer_s else 0.0)

    def empty_caches(self) -> None:
        self._evicting.add_(1.0)

    def _time(self, work: Callable[[], object]) -> float:
        synchronise(self._device)
        start_s = self._now_s()
        work()
        synchronise(self._device)
        return self._now_s() - start_s


def _typical(times_s: list[float]) -> float:
    """The median: a run meets what disturbs a round, too, and a faster one than most is no prediction."""
    return median(times_s)


def _microbatches(order: TimeMicrobatch, vocab_size: int) -> tuple[Microbatch, Microbatch]:
    """One that introduces the requests, and one like it that can be prepared any number of times."""
    num_tokens = order.cached_tokens + order.new_tokens
    blocks = -(-num_tokens // _BLOCK_SIZE)
    rows = range(order.num_rows)
    added = [
        AddedRequest(row, num_tokens, list(range(row * blocks, (row + 1) * blocks)), SamplerSpec(seed=0), [])
        for row in rows
    ]
    repeated = Microbatch(
        epoch=0,
        number=1,
        removed=[],
        added=[],
        extended=[],
        request_numbers=list(rows),
        num_computed_tokens=[order.cached_tokens] * order.num_rows,
        num_scheduled_tokens=[order.new_tokens] * order.num_rows,
        token_ids=[index * 97 % vocab_size for index in range(order.num_tokens)],
        sampling_rows=list(rows),
    )
    return msgspec.structs.replace(repeated, number=0, added=added), repeated


def _echo(config: MeasuringConfig, links: Links, num_messages: int, flush: Callable[[], None]) -> None:
    """Be a stage that has nothing to compute, but whose caches are as if it had."""
    incoming, outgoing = links.receiver(config.listen_address), links.sender(config.answer_address)
    write_message(int(sys.argv[1]), msgspec.msgpack.encode(Ready(0)))
    decoder: MessageDecoder[Microbatch] = MessageDecoder(Microbatch)
    for _ in range(num_messages):
        flush()
        outgoing.send(b"")
        frames = incoming.recv_multipart(copy=False)
        microbatch = decoder.decode(frames[0].buffer)
        result = MicrobatchResult(microbatch.epoch, microbatch.number, [1] * microbatch.num_rows, [], [])
        outgoing.send(encode_message(result))


def main() -> None:
    """Obey orders from standard input until it ends."""
    answer_fd = int(sys.argv[1])
    body = read_message(sys.stdin.fileno())
    if body is None:
        return
    config = msgspec.msgpack.decode(body, type=MeasuringConfig)
    if config.cores:
        os.sched_setaffinity(0, config.cores)
    set_threads(config.num_threads)
    links = Links()
    try:
        measurer = HostMeasurer(config)
        write_message(answer_fd, msgspec.msgpack.encode(Ready(measurer.num_layers)))
        while (body := read_message(sys.stdin.fileno())) is not None:
            order = msgspec.msgpack.decode(body, type=Order)
            if isinstance(order, Leave):
                break
            if isinstance(order, Echo):
                _echo(config, links, order.num_messages, measurer.empty_caches)
            else:
                write_message(answer_fd, msgspec.msgpack.encode(measurer.measure(order)))
    except Exception as error:
        write_message(answer_fd, msgspec.msgpack.encode(Trouble(f"{type(error).__name__}: {error}"[:2000])))
    finally:
        links.close()


if __name__ == "__main__":
    main()
