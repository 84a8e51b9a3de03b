"""Layers of a model's shape in processes like a stage's, alone and all at once.

One idea: the memory's pace changes within seconds, so what waits for it is measured in rounds, and medians are taken.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from types import TracebackType
from typing import Self, TypeVar

import msgspec
import numpy as np

from stageline.checkpoint.model_spec import ModelSpec
from stageline.config.engine_config import EngineConfig
from stageline.cost.host_profile import Curve, Factors
from stageline.errors import ConfigError, StagelineError
from stageline.links.child_process import ChildProcess
from stageline.links.frames import MessageDecoder, encode_message
from stageline.links.ipc_folder import IpcFolder
from stageline.links.sockets import Links
from stageline.pipeline.host_measurement import (
    Answer,
    Echo,
    Leave,
    Measured,
    MeasuringConfig,
    Order,
    Ready,
    TimeMicrobatch,
    Trouble,
)
from stageline.pipeline.microbatch import Microbatch, MicrobatchResult

_DECODE_ROWS = (1, 2, 3, 4, 6, 8, 11, 16, 22, 32, 48, 64)
_CONTEXT, _LONG_CONTEXT, _CONTEXT_ROWS = 128, 512, 16
_CHUNK, _LONG_CHUNK, _NUM_LONG_CHUNKS = 128, 512, 2
_AT_ONCE_ROWS = (1, 4, 8, 16, 32)
_LARGER_THAN_CACHES_BYTES = 2**26
_NUM_MESSAGES, _LARGE_BYTES = 60, 2**20
_FASTEST_BYTES_PER_S = 1e11
_LEAST_S = 1e-9

_Kind = TypeVar("_Kind", Ready, Measured)


@dataclass(frozen=True)
class FittedLayers:
    """See `stageline.cost.host_profile.HostProfile`."""

    layer_s: Curve
    stage_s: float
    attention_token_s: float
    prefill_attention_s: float
    contention: tuple[Factors, ...]


class LayerTimes:
    """What layers take in the processes, by rounds.

    Args:
        num_layers: that each of the processes has.
        point_s: for how long each microbatch is run again and again, in all rounds together.
    """

    def __init__(self, processes: MeasuringProcesses, num_layers: int, num_rounds: int, point_s: float) -> None:
        self._num_layers = num_layers
        self._orders = _Orders(point_s)
        self._alone = _Alone(processes, self._orders, num_rounds)
        at_once = range(2, processes.num_processes + 1)
        self._several = [_Contentions(processes, number, point_s / num_rounds) for number in at_once]

    def go_round(self) -> None:
        self._alone.go_round()
        for contentions in self._several:
            contentions.go_round()

    def fit(self) -> FittedLayers:
        orders, alone, num_layers = self._orders, self._alone.typical(), self._num_layers
        decodes = [alone[order] for order in orders.decodes]
        a_layer_s = {order: measured.layers_s / num_layers for order, measured in alone.items()}
        few = decodes[: len(decodes) // 2]
        stage_s = max(0.0, median(one.one_layer_s - one.layers_s / num_layers for one in few))
        extra_s = a_layer_s[orders.long_decode] - a_layer_s[orders.decode]
        attention_token_s = max(_LEAST_S, extra_s / (_CONTEXT_ROWS * (_LONG_CONTEXT - _CONTEXT)))
        extra_s = a_layer_s[orders.late_chunk] - a_layer_s[orders.chunk]
        prefill_attention_s = max(0.0, extra_s / (2 * _LONG_CONTEXT * _CHUNK))
        chunks = (orders.chunk, orders.long_chunk, orders.long_chunks)
        layer_s = [
            a_layer_s[order] - attention_token_s * order.num_rows * order.cached_tokens for order in orders.decodes
        ]
        layer_s += [
            a_layer_s[order] - prefill_attention_s * order.num_rows * order.new_tokens**2 for order in chunks
        ]
        num_tokens = (*_DECODE_ROWS, *(order.num_tokens for order in chunks))
        return FittedLayers(
            Curve(num_tokens, tuple(max(_LEAST_S, one_s) for one_s in layer_s)),
            stage_s,
            attention_token_s,
            prefill_attention_s,
            tuple(contentions.typical() for contentions in self._several),
        )


class _Orders:
    """The microbatches that are timed."""

    def __init__(self, point_s: float) -> None:
        self.decodes = [TimeMicrobatch(rows, 1, _CONTEXT, point_s, True) for rows in _DECODE_ROWS]
        self.decode = TimeMicrobatch(_CONTEXT_ROWS, 1, _CONTEXT, point_s, True)
        self.long_decode = TimeMicrobatch(_CONTEXT_ROWS, 1, _LONG_CONTEXT, point_s, False)
        self.chunk = TimeMicrobatch(1, _CHUNK, 0, point_s, False)
        self.late_chunk = TimeMicrobatch(1, _CHUNK, _LONG_CONTEXT, point_s, False)
        self.long_chunk = TimeMicrobatch(1, _LONG_CHUNK, 0, point_s, False)
        self.long_chunks = TimeMicrobatch(_NUM_LONG_CHUNKS, _LONG_CHUNK, 0, point_s, False)
        self.reading_memory = [*self.decodes, self.long_decode]
        self.chunks = [self.chunk, self.late_chunk, self.long_chunk, self.long_chunks]


class _Alone:
    """What one process takes: prompts, which wait for the processor, at once, and decodes in every round."""

    def __init__(self, processes: MeasuringProcesses, orders: _Orders, num_rounds: int) -> None:
        self._processes, self._orders, self._num_rounds = processes, orders, num_rounds
        self._found = {order: [processes.time(order, 1)[0]] for order in orders.chunks}

    def go_round(self) -> None:
        for order in self._orders.reading_memory:
            short = msgspec.structs.replace(order, duration_s=order.duration_s / self._num_rounds)
            self._found.setdefault(order, []).append(self._processes.time(short, 1)[0])

    def typical(self) -> dict[TimeMicrobatch, Measured]:
        return {
            order: Measured(median(one.layers_s for one in found), median(one.one_layer_s for one in found))
            for order, found in self._found.items()
        }


class _Contentions:
    """How much longer so many processes take that compute at once, in turns with one alone."""

    def __init__(self, processes: MeasuringProcesses, num_at_once: int, round_s: float) -> None:
        self._processes, self._num_at_once = processes, num_at_once
        self._orders = [TimeMicrobatch(rows, 1, _CONTEXT, round_s, False) for rows in _AT_ONCE_ROWS]
        self._orders.append(TimeMicrobatch(1, _CHUNK, 0, round_s, False))
        self._factors: list[list[float]] = [[] for _ in self._orders]

    def go_round(self) -> None:
        # Most rows first: a core that was idle until now may have to be found by the hypervisor.
        for order, factors in reversed(list(zip(self._orders, self._factors, strict=True))):
            alone_s = self._processes.time(order, 1)[0].layers_s
            at_once_s = median(measured.layers_s for measured in self._processes.time(order, self._num_at_once))
            factors.append(at_once_s / alone_s)

    def typical(self) -> Factors:
        num_tokens = tuple(order.num_tokens for order in self._orders)
        return Factors(num_tokens, tuple(max(1.0, median(factors)) for factors in self._factors))


def _lower_decile(times_s: list[float]) -> float:
    """What disturbed a message was somebody else."""
    return sorted(times_s)[len(times_s) // 10]


class MeasuringProcesses:
    """The measuring processes, ended when they are not needed any more, also after an error."""

    def __init__(
        self, config: EngineConfig, spec: ModelSpec, num_layers: int, num_processes: int, cores: Sequence[int]
    ) -> None:
        self._folder = IpcFolder("answers")
        self._links = Links()
        self.num_processes = num_processes
        self._children: list[ChildProcess] = []
        self._answers = self._links.receiver(f"ipc://{self._folder.path}/answers")
        num_threads = config.threads_per_stage
        for index in range(num_processes):
            own_cores = cores[index * num_threads :][:num_threads] if config.bind_cores else []
            measuring = MeasuringConfig(
                spec=spec,
                dtype=config.dtype,
                device=config.device,
                num_layers=num_layers,
                num_threads=num_threads,
                cores=list(own_cores),
                max_tokens=max(_DECODE_ROWS[-1], _NUM_LONG_CHUNKS * _LONG_CHUNK),
                max_kv_tokens=max(_DECODE_ROWS[-1] * (_CONTEXT + 16), _CONTEXT_ROWS * (_LONG_CONTEXT + 16)),
                max_model_len=_LONG_CONTEXT + _CHUNK,
                listen_address=f"ipc://{self._folder.path}/echo{index}",
                answer_address=f"ipc://{self._folder.path}/answers",
            )
            threads = {"OMP_NUM_THREADS": str(num_threads)}
            self._children.append(
                ChildProcess("stageline.worker.host_measure", msgspec.msgpack.encode(measuring), environ=threads)
            )

    def __enter__(self) -> Self:
        try:
            for child in self._children:
                self._read(child, Ready)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        for child in self._children:
            child.send(msgspec.msgpack.encode(Leave()))
            child.let_go()
            child.kill()
            child.reap()
        self._links.close()
        self._folder.close()

    def time(self, order: TimeMicrobatch, num_at_once: int) -> list[Measured]:
        """Let the first so many processes do it at the same time."""
        for child in self._children[:num_at_once]:
            self._send(child, order)
        return [self._read(child, Measured) for child in self._children[:num_at_once]]

    def measure_messages(self) -> tuple[float, float]:
        """Between a stage and the engine, their caches emptied as by computing.

        Returns: the sender's time for a small message, and the bytes per second of large ones.
        """
        child = self._children[0]
        self._send(child, Echo(2 * _NUM_MESSAGES))
        self._read(child, Ready)
        outgoing = self._links.sender(f"ipc://{self._folder.path}/echo0")
        decoder: MessageDecoder[MicrobatchResult] = MessageDecoder(MicrobatchResult)
        small_send_s, small_s = self._round_trips(outgoing.send_multipart, decoder, [])
        _, large_s = self._round_trips(outgoing.send_multipart, decoder, [bytes(_LARGE_BYTES)])
        transfer_s = max(_LARGE_BYTES / _FASTEST_BYTES_PER_S, large_s - small_s)
        return small_send_s, _LARGE_BYTES / transfer_s

    def _round_trips(
        self, send: Callable[..., object], decoder: MessageDecoder[MicrobatchResult], further: list[bytes]
    ) -> tuple[float, float]:
        """Typical times to send, and until the answer is decoded."""
        microbatch = Microbatch(0, 0, [], [], [], list(range(8)), [_CONTEXT] * 8, [1] * 8, [1] * 8, list(range(8)))
        sends_s, trips_s = [], []
        larger_than_caches = np.zeros(_LARGER_THAN_CACHES_BYTES // 4, dtype=np.float32)
        for _ in range(_NUM_MESSAGES):
            self._answers.recv()  # the other side has emptied its caches, and waits
            larger_than_caches += 1.0
            start_s, own_start_s = time.perf_counter(), time.thread_time()
            send([encode_message(microbatch), *further], copy=False)
            sends_s.append(time.thread_time() - own_start_s)
            decoder.decode(self._answers.recv())
            trips_s.append(time.perf_counter() - start_s)
        return _lower_decile(sends_s), _lower_decile(trips_s)

    def _send(self, child: ChildProcess, order: Order) -> None:
        child.send(msgspec.msgpack.encode(order))

    def _read(self, child: ChildProcess, kind: type[_Kind]) -> _Kind:
        messages: list[bytes] | None = []
        while not messages:
            messages = child.read_messages()
            if messages is None:
                raise StagelineError(f"a measuring process was lost: {child.describe_exit()}")
        answer = msgspec.msgpack.decode(messages[0], type=Answer)
        if isinstance(answer, Trouble):
            raise ConfigError(f"this model cannot be measured here: {answer.message}")
        if not isinstance(answer, kind):
            raise StagelineError(f"a measuring process answered {type(answer).__name__} instead of {kind.__name__}")
        return answer
