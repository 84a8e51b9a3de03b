"""`stageline plan --calibrate`: what this host does with a model's layers, in less than a minute.

One idea: every number comes from the code that serves: layers in processes like a stage's, alone and all at once, and
small pipelines that really run, for what lies between layers.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from types import TracebackType
from typing import Self, TypeVar

import msgspec
import numpy as np
import psutil

from stageline.checkpoint.model_spec import ModelSpec
from stageline.config.engine_config import EngineConfig
from stageline.cost.host_profile import Contention, Curve, HostKey, HostProfile, host_key, layer_shape
from stageline.cost.model_costs import model_costs
from stageline.errors import ConfigError, StagelineError
from stageline.executor.stage_processes import available_cores
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
from stageline.planner.crowding import with_crowding
from stageline.planner.measure_run import SteadyDecodes, running_pipeline
from stageline.planner.run_costs import engine_costs, head_curve, run_costs

_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
_DECODE_ROWS = (1, 2, 3, 4, 6, 8, 11, 16, 22, 32, 48, 64)
_CONTEXT, _LONG_CONTEXT, _CONTEXT_ROWS = 128, 512, 16
_CHUNK, _LONG_CHUNK, _NUM_LONG_CHUNKS = 128, 512, 2
_AT_ONCE_ROWS = (1, 4, 8, 16, 32, 64)
_RUN_ROWS, _REQUESTS_PER_STAGE = (1, 4, 8, 16, 32, 64), 4
_POINTS_PER_RUN, _POINTS_PER_CROWDED_RUN = 4, 10
"""Stages that share cores get now more of them and now less, so it takes longer to see what they get."""

_CONTENTION_ROUNDS = 3
_MOST_RUNNING_STAGES = 4
POINT_S = 0.3
_LARGER_THAN_CACHES_BYTES = 2**28
_MOST_MEMORY_FRACTION = 0.4
_MOST_PROCESSES = 8
_NUM_MESSAGES, _LARGE_BYTES = 60, 2**20
_FASTEST_BYTES_PER_S = 1e11
_LEAST_S = 1e-9

_Kind = TypeVar("_Kind", Ready, Measured)

OnStep = Callable[[str], None]


def this_host(config: EngineConfig, spec: ModelSpec) -> HostKey:
    """Where the profile of this machine is kept, computing as the configuration asks."""
    dtype = spec.dtype if config.dtype == "auto" else config.dtype
    return host_key(config.device, dtype, config.quantization, config.threads_per_stage, len(_cores()))


def _cores() -> list[int]:
    return available_cores() or list(range(os.cpu_count() or 1))


def calibrate_host(
    config: EngineConfig, spec: ModelSpec, on_step: OnStep = lambda text: None, point_s: float = POINT_S
) -> HostProfile:
    """Measure this host with layers of a model's shape; their weights are made up, so none are needed.

    Args:
        config: whose name of the model the profile remembers, and whose threads and cores the stages have.
        on_step: hears what is measured next.
        point_s: for how long each microbatch is run again and again.
    Raises: ConfigError if the model cannot be measured here; StagelineError if a measuring process is lost.
    """
    itemsize = _ITEMSIZE[spec.dtype if config.dtype == "auto" else config.dtype]
    costs, cores = model_costs(spec, kv_itemsize_bytes=itemsize), _cores()
    layer_bytes, head_bytes = (item.num_parameters * itemsize for item in (costs.layers[0], costs.head))
    num_processes = max(1, min(len(cores) // config.threads_per_stage, _MOST_PROCESSES))
    num_layers = _layers_to_time(layer_bytes, head_bytes, spec.num_layers, num_processes)
    on_step(f"starting {num_processes} measuring processes with {num_layers} layers each")
    with _Processes(config, spec, num_layers, num_processes, cores) as processes:
        on_step("layers, one stage alone")
        orders = _Orders(point_s)
        alone = {order: processes.time(order, 1)[0] for order in orders.all}
        on_step("layers, several stages at once")
        contention = tuple(_contention(processes, number, point_s) for number in range(2, num_processes + 1))
        on_step("messages")
        message_send_s, link_bytes_per_s = processes.measure_messages()
    on_step("pipelines that run")
    key = this_host(config, spec)
    runs = _Runs.measure(config, spec, num_layers, key.num_places, point_s)
    fitted = _Fit(orders, alone, num_layers)
    run = run_costs(runs.single, *runs.several)
    profile = HostProfile(
        key=key,
        model=config.model,
        shape=layer_shape(costs),
        layer_s=fitted.layer_s,
        head_s=head_curve(runs.single),
        stage_s=fitted.stage_s,
        attention_token_s=fitted.attention_token_s,
        prefill_attention_s=fitted.prefill_attention_s,
        contention=contention,
        run=run,
        crowded_run=run_costs(runs.single, *runs.crowded, undisturbed=run) if runs.crowded else run,
        message_send_s=message_send_s,
        link_bytes_per_s=link_bytes_per_s,
        engine=engine_costs(runs.single),
        memory_bytes_per_s=layer_bytes / fitted.layer_s.times_s[0],
        memory_bytes=float(psutil.virtual_memory().total),
    )
    return with_crowding(profile, config, *runs.crowded) if runs.crowded else profile


def _layers_to_time(layer_bytes: float, head_bytes: float, num_layers: int, num_processes: int) -> int:
    """As many as are larger than the caches, if there are so many and memory allows."""
    most_bytes = _MOST_MEMORY_FRACTION * psutil.virtual_memory().available / num_processes - 2 * head_bytes
    num_most = int(most_bytes // layer_bytes) - 2
    if num_most < 1:
        raise ConfigError(
            f"{num_processes} measuring processes need memory for three layers of {layer_bytes:,.0f} bytes and two "
            f"matrices of {head_bytes:,.0f} each; calibrate with a smaller model"
        )
    wanted = math.ceil(_LARGER_THAN_CACHES_BYTES / layer_bytes)
    return max(1, min(wanted, num_most, num_layers - 1))


@dataclass(frozen=True)
class _Runs:
    """Pipelines that ran, of as many layers each.

    Args:
        single: one stage, with ever more requests.
        bound, crowded: with one request and with several per stage, where stages have cores of their own and where
            they do not; None where there is no such pipeline of few stages.
    """

    single: list[SteadyDecodes]
    bound: tuple[SteadyDecodes, SteadyDecodes] | None
    crowded: tuple[SteadyDecodes, SteadyDecodes] | None

    @property
    def several(self) -> tuple[SteadyDecodes, SteadyDecodes]:
        """Of several stages, with cores of their own if there are so many cores."""
        found = self.bound or self.crowded
        assert found is not None, "two stages have cores of their own, or are more than there are cores"
        return found

    @classmethod
    def measure(cls, config: EngineConfig, spec: ModelSpec, num_layers: int, num_places: int, point_s: float) -> Self:
        if spec.num_layers < 2:
            raise ConfigError("a model of one layer makes no pipeline; calibrate with one of two or more")
        with running_pipeline(config, spec, num_layers, 1, _RUN_ROWS[-1]) as pipeline:
            single = [pipeline.decode(rows, 2 * point_s) for rows in _RUN_ROWS]

        def several(num_stages: int, num_points: int) -> tuple[SteadyDecodes, SteadyDecodes]:
            most = _REQUESTS_PER_STAGE * num_stages
            with running_pipeline(config, spec, max(num_layers, num_stages), num_stages, most) as pipeline:
                lone, loaded = (pipeline.decode(number, num_points * point_s) for number in (1, most))
                return lone, loaded

        num_crowded = num_places + 1
        is_crowded = num_crowded <= min(_MOST_RUNNING_STAGES, spec.num_layers)
        return cls(
            single,
            several(2, _POINTS_PER_RUN) if num_places > 1 else None,
            several(num_crowded, _POINTS_PER_CROWDED_RUN) if is_crowded else None,
        )


def _lower_decile(times_s: list[float]) -> float:
    """What disturbed a message was somebody else."""
    return sorted(times_s)[len(times_s) // 10]


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
        self.all = [*self.decodes, self.long_decode, self.chunk, self.late_chunk, self.long_chunk, self.long_chunks]


def _contention(processes: _Processes, num_at_once: int, point_s: float) -> Contention:
    """Medians of rounds, alone and at once in turns: the host may become faster or slower meanwhile."""
    factors = []
    for rows in _AT_ONCE_ROWS:
        order = TimeMicrobatch(rows, 1, _CONTEXT, point_s / _CONTENTION_ROUNDS, False)
        found = []
        for _ in range(_CONTENTION_ROUNDS):
            alone_s = processes.time(order, 1)[0].layers_s
            found.append(median(measured.layers_s for measured in processes.time(order, num_at_once)) / alone_s)
        factors.append(max(1.0, median(found)))
    return Contention(_AT_ONCE_ROWS, tuple(factors))


class _Fit:
    """Curves and coefficients from what was measured alone."""

    def __init__(self, orders: _Orders, alone: dict[TimeMicrobatch, Measured], num_layers: int) -> None:
        decodes = [alone[order] for order in orders.decodes]
        a_layer_s = {order: measured.layers_s / num_layers for order, measured in alone.items()}
        few = decodes[: len(decodes) // 2]
        self.stage_s = max(0.0, median(one.one_layer_s - one.layers_s / num_layers for one in few))
        extra_s = a_layer_s[orders.long_decode] - a_layer_s[orders.decode]
        self.attention_token_s = max(_LEAST_S, extra_s / (_CONTEXT_ROWS * (_LONG_CONTEXT - _CONTEXT)))
        extra_s = a_layer_s[orders.late_chunk] - a_layer_s[orders.chunk]
        self.prefill_attention_s = max(0.0, extra_s / (2 * _LONG_CONTEXT * _CHUNK))
        chunks = (orders.chunk, orders.long_chunk, orders.long_chunks)
        layer_s = [
            a_layer_s[order] - self.attention_token_s * order.num_rows * order.cached_tokens for order in orders.decodes
        ]
        layer_s += [
            a_layer_s[order] - self.prefill_attention_s * order.num_rows * order.new_tokens**2 for order in chunks
        ]
        num_tokens = (*_DECODE_ROWS, *(order.num_tokens for order in chunks))
        self.layer_s = Curve(num_tokens, tuple(max(_LEAST_S, one_s) for one_s in layer_s))


class _Processes:
    """The measuring processes, ended when they are not needed any more, also after an error."""

    def __init__(
        self, config: EngineConfig, spec: ModelSpec, num_layers: int, num_processes: int, cores: Sequence[int]
    ) -> None:
        self._folder = IpcFolder("answers")
        self._links = Links()
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
        larger_than_caches = np.zeros(_LARGER_THAN_CACHES_BYTES // 16, dtype=np.float32)
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
