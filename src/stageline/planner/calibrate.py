"""`stageline plan --calibrate`: what this host does with a model's layers, in less than a minute.

One idea: every number comes from the code that serves: layers in processes like a stage's, alone and all at once, and
small pipelines that really run, for what lies between layers.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from statistics import median
from types import TracebackType
from typing import Self, TypeVar

import msgspec
import numpy as np
import psutil

from stageline.checkpoint.model_spec import ModelSpec
from stageline.config.engine_config import EngineConfig
from stageline.cost.host_profile import Curve, Factors, HostKey, HostProfile, host_key, layer_shape
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
from stageline.planner.crowding import CrowdedTurns, with_crowding
from stageline.planner.measure_run import RunningPipeline, SteadyDecodes, running_pipeline
from stageline.planner.run_costs import engine_costs, head_curve, run_costs

_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
_DECODE_ROWS = (1, 2, 3, 4, 6, 8, 11, 16, 22, 32, 48, 64)
_CONTEXT, _LONG_CONTEXT, _CONTEXT_ROWS = 128, 512, 16
_CHUNK, _LONG_CHUNK, _NUM_LONG_CHUNKS = 128, 512, 2
_AT_ONCE_ROWS = (1, 4, 8, 16, 32)
_SINGLE_ROWS, _FURTHER_ROWS = (1, 4, 12), (8, 16, 32, 64)
"""What the pipeline of one stage meets in every round, and in one of them."""

_POINTS_PER_RUN, _POINTS_PER_CROWDED_RUN = 4, 8
"""Stages that share cores get now more of them and now less, so it takes longer to see what they get."""

_NUM_ROUNDS = 3
"""The host becomes faster or slower for seconds: all that is compared is measured in turns, and medians are taken."""

_MOST_RUNNING_STAGES, _NUM_PIPELINES = 4, 3
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
    num_layers = _layers_to_time(layer_bytes, head_bytes, spec.num_layers, num_processes + _NUM_PIPELINES)
    key, orders = this_host(config, spec), _Orders(point_s)
    on_step(f"starting {num_processes} measuring processes with {num_layers} layers each")
    with _Processes(config, spec, num_layers, num_processes, cores) as processes:
        on_step("prompts and messages")
        alone = _Alone(processes, orders)
        message_send_s, link_bytes_per_s = processes.measure_messages()
        on_step("starting pipelines")
        several = [_Contentions(processes, number, point_s) for number in range(2, num_processes + 1)]
        with _Pipelines(config, spec, num_layers, key.num_places, point_s) as pipelines:
            for number in range(_NUM_ROUNDS):
                on_step(f"round {number + 1} of {_NUM_ROUNDS}: layers, one stage alone")
                alone.go_round()
                on_step("layers, several stages at once")
                for contention in several:
                    contention.go_round()
                on_step("pipelines that run")
                pipelines.go_round(number)
    fitted, single, crowded = _Fit(orders, alone.typical(), num_layers), pipelines.single, pipelines.crowded
    run = run_costs(single, *pipelines.several)
    profile = HostProfile(
        key=key,
        model=config.model,
        shape=layer_shape(costs),
        layer_s=fitted.layer_s,
        head_s=head_curve(single),
        stage_s=fitted.stage_s,
        attention_token_s=fitted.attention_token_s,
        prefill_attention_s=fitted.prefill_attention_s,
        contention=tuple(contention.typical() for contention in several),
        run=run,
        crowded_run=run_costs(single, *crowded, undisturbed=run) if crowded else run,
        message_send_s=message_send_s,
        link_bytes_per_s=link_bytes_per_s,
        engine=engine_costs(single),
        memory_bytes_per_s=layer_bytes / fitted.layer_s.times_s[0],
        memory_bytes=float(psutil.virtual_memory().total),
    )
    return with_crowding(profile, config, pipelines.crowded_turns) if crowded else profile


def _layers_to_time(layer_bytes: float, head_bytes: float, num_layers: int, num_copies: int) -> int:
    """As many as are larger than the caches, if there are so many and memory allows."""
    most_bytes = _MOST_MEMORY_FRACTION * psutil.virtual_memory().available / num_copies - 2 * head_bytes
    num_most = int(most_bytes // layer_bytes) - 2
    if num_most < 1:
        raise ConfigError(
            f"measuring needs memory for {num_copies} times three layers of {layer_bytes:,.0f} bytes and two matrices "
            f"of {head_bytes:,.0f}; calibrate with a smaller model"
        )
    wanted = math.ceil(_LARGER_THAN_CACHES_BYTES / layer_bytes)
    return max(1, min(wanted, num_most, num_layers - 1))


class _Pipelines:
    """Pipelines of as many layers each, that run one after the other, once in each round.

    One of a single stage; one whose stages have cores of their own; and one of more stages than there are cores. The
    last two are left out where there is no such pipeline of few stages.
    """

    def __init__(
        self, config: EngineConfig, spec: ModelSpec, num_layers: int, num_places: int, point_s: float
    ) -> None:
        if spec.num_layers < 2:
            raise ConfigError("a model of one layer makes no pipeline; calibrate with one of two or more")
        self._point_s = point_s
        self._found: dict[tuple[int, int], list[SteadyDecodes]] = {}
        self._num_bound, self._num_crowded = (2 if num_places > 1 else 0), num_places + 1
        if self._num_crowded > min(_MOST_RUNNING_STAGES, spec.num_layers):
            self._num_crowded = 0
        several = [
            (self._num_bound, _POINTS_PER_RUN, _SINGLE_ROWS[:2]),
            (self._num_crowded, _POINTS_PER_CROWDED_RUN, _SINGLE_ROWS),
        ]
        with ExitStack() as running:

            def start(num_stages: int, most_requests: int) -> RunningPipeline:
                num = max(num_layers, num_stages)
                return running.enter_context(running_pipeline(config, spec, num, num_stages, most_requests))

            self._single = start(1, _FURTHER_ROWS[-1])
            self._several = [
                (start(num_stages, _requests(rows[-1], num_stages)), num_points, rows)
                for num_stages, num_points, rows in several
                if num_stages
            ]
            self._running = running.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._running.close()

    def go_round(self, number: int) -> None:
        for rows in _SINGLE_ROWS:
            self._decode(self._single, rows, 1)
        for pipeline, num_points, each_rows in self._several:
            for rows in each_rows:
                self._decode(pipeline, rows, num_points)
        for rows in _FURTHER_ROWS[number::_NUM_ROUNDS]:
            self._decode(self._single, rows, _NUM_ROUNDS)

    def _decode(self, pipeline: RunningPipeline, rows: int, num_points: int) -> None:
        num_requests = _requests(rows, pipeline.num_stages)
        decodes = pipeline.decode(num_requests, num_points * self._point_s / _NUM_ROUNDS)
        self._found.setdefault((pipeline.num_stages, rows), []).append(decodes)

    # ---- what was found ----

    @property
    def single(self) -> list[SteadyDecodes]:
        """One stage, with ever more requests."""
        return [SteadyDecodes.together(self._found[1, rows]) for rows in sorted((*_SINGLE_ROWS, *_FURTHER_ROWS))]

    @property
    def several(self) -> tuple[SteadyDecodes, SteadyDecodes]:
        """Several stages with one request, and with several each; with cores of their own if there are so many."""
        return self._pair(self._num_bound or self._num_crowded)

    @property
    def crowded(self) -> tuple[SteadyDecodes, SteadyDecodes] | None:
        return self._pair(self._num_crowded) if self._num_crowded else None

    def _pair(self, num_stages: int) -> tuple[SteadyDecodes, SteadyDecodes]:
        lone, loaded = (SteadyDecodes.together(self._found[num_stages, rows]) for rows in _SINGLE_ROWS[:2])
        return lone, loaded

    @property
    def crowded_turns(self) -> list[CrowdedTurns]:
        return [
            CrowdedTurns(rows, self._found[1, rows], self._found[self._num_crowded, rows]) for rows in _SINGLE_ROWS
        ]


def _requests(rows: int, num_stages: int) -> int:
    """So many for each stage, but one alone."""
    return rows if rows == 1 else rows * num_stages


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
        self.reading_memory = [*self.decodes, self.long_decode]
        self.chunks = [self.chunk, self.late_chunk, self.long_chunk, self.long_chunks]


class _Alone:
    """What one process takes. The memory's pace changes within seconds, so what waits for it goes round."""

    def __init__(self, processes: _Processes, orders: _Orders) -> None:
        self._processes, self._orders = processes, orders
        self._found = {order: [processes.time(order, 1)[0]] for order in orders.chunks}

    def go_round(self) -> None:
        for order in self._orders.reading_memory:
            short = msgspec.structs.replace(order, duration_s=order.duration_s / _NUM_ROUNDS)
            self._found.setdefault(order, []).append(self._processes.time(short, 1)[0])

    def typical(self) -> dict[TimeMicrobatch, Measured]:
        return {
            order: Measured(median(one.layers_s for one in found), median(one.one_layer_s for one in found))
            for order, found in self._found.items()
        }


class _Contentions:
    """How much longer so many processes take that compute at once, in turns with one alone."""

    def __init__(self, processes: _Processes, num_at_once: int, point_s: float) -> None:
        self._processes, self._num_at_once = processes, num_at_once
        self._orders = [TimeMicrobatch(rows, 1, _CONTEXT, point_s / _NUM_ROUNDS, False) for rows in _AT_ONCE_ROWS]
        self._factors: list[list[float]] = [[] for _ in _AT_ONCE_ROWS]

    def go_round(self) -> None:
        # Most rows first: a core that was idle until now may have to be found by the hypervisor.
        for order, factors in reversed(list(zip(self._orders, self._factors, strict=True))):
            alone_s = self._processes.time(order, 1)[0].layers_s
            at_once_s = median(measured.layers_s for measured in self._processes.time(order, self._num_at_once))
            factors.append(at_once_s / alone_s)

    def typical(self) -> Factors:
        return Factors(_AT_ONCE_ROWS, tuple(max(1.0, median(factors)) for factors in self._factors))


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
