"""One stage's process: receive, forward, send, one microbatch after the other, in order. Decides nothing.

Control messages come from the engine and activations from the stage before, each in order and on a socket of its own. A
microbatch is prepared as soon as it is announced, usually before its activations are there, and runs when they are.
"""

from __future__ import annotations

import gc
from collections import deque
from dataclasses import dataclass

import msgspec
import torch
import zmq

from stageline.checkpoint.open import open_checkpoint
from stageline.clock import MonotonicClock
from stageline.errors import FrameError
from stageline.executor.messages import (
    Allocate,
    Allocated,
    AssignLayers,
    Calibration,
    CollectItemTimes,
    Loading,
    StageLoaded,
    Stop,
    ToWorker,
    WorkerConfig,
)
from stageline.links.frames import (
    MessageDecoder,
    activation_header,
    check_activation,
    encode_message,
    sent_time_s,
    stage_times,
)
from stageline.links.sockets import Links
from stageline.pipeline.microbatch import Microbatch, MicrobatchLimits, MicrobatchResult, TokenMasks
from stageline.pipeline.partition import StageLayers
from stageline.timeline.recorder import Recorder
from stageline.timeline.span import Span, SpanKind
from stageline.timeline.stage_counters import StageAccount, StageState
from stageline.worker.build import build_stage
from stageline.worker.measure import ItemTimer, calibrate
from stageline.worker.stage import PreparedMicrobatch, Stage
from stageline.worker.stretch import wait_until


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor in row-major order, without a copy if it lies so on the host."""
    return tensor.contiguous().cpu().view(torch.uint8).numpy().data


@dataclass(frozen=True)
class _Announced:
    """A prepared microbatch, and since when this stage could wait for its input; before that it was idle."""

    prepared: PreparedMicrobatch
    since_s: float


class Worker:
    """Loads one stage and runs what the engine announces; `account` and `recorder` are told where its time goes."""

    def __init__(
        self,
        config: WorkerConfig,
        links: Links,
        control: zmq.Socket[bytes],
        engine: zmq.Socket[bytes],
        account: StageAccount | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self._config = config
        self._links = links
        self._control = control
        self._engine = engine
        self._clock = MonotonicClock()
        self._recorder = recorder or Recorder()
        self._account = account or StageAccount(config.stage_index)
        self._waiting_since_s = 0.0
        self._decoder: MessageDecoder[ToWorker] = MessageDecoder(ToWorker)
        self._announced: deque[_Announced] = deque()
        self._postponed: ToWorker | None = None
        self._next_microbatch: tuple[int, int] | None = None
        self._num_received = 0
        self._num_sent = 0
        self._computing_s = self._slowest_s = 0.0
        self._is_stopping = False
        self._timer: ItemTimer | None = None
        self._poller = zmq.Poller()
        self._poller.register(control, zmq.POLLIN)

    def run(self) -> None:
        if self._config.calibration is not None:
            self._calibrate(self._config.calibration)
            if self._is_stopping:
                return
        self._stage, report = self._load()
        self._open_neighbours()
        self._engine.send(encode_message(report))
        while True:
            free_since_s = self._clock.now_s()
            self._account.enter(self._waiting_state(), free_since_s)
            self._waiting_since_s = free_since_s
            hidden_states = self._wait_for_work()
            if self._is_stopping:
                return
            announced = self._announced.popleft()
            microbatch = announced.prepared.microbatch
            self._record("receive_wait", microbatch, max(free_since_s, announced.since_s))
            start_s = self._clock.now_s()
            self._account.enter("busy", start_s)
            output = self._stage.run(announced.prepared, hidden_states, self._take_masks)
            end_s = self._clock.now_s()
            self._account.enter("blocked", end_s)
            self._account.computed(
                microbatch.num_rows, microbatch.num_decode_rows, microbatch.num_tokens, end_s - start_s
            )
            self._add_time(end_s - start_s)
            self._send(microbatch, output)

    def _waiting_state(self) -> StageState:
        if not self._announced:
            return "idle"
        return "preparing" if self._input is None else "starved"

    def _add_time(self, elapsed_s: float) -> None:
        """To what the stages before needed for the same microbatch."""
        if self._input is None:
            self._computing_s = self._slowest_s = 0.0
        self._computing_s += elapsed_s
        self._slowest_s = max(self._slowest_s, elapsed_s)

    def _calibrate(self, calibration: Calibration) -> None:
        """Time a few layers, and hear which ones to load."""
        config = self._config
        checkpoint = open_checkpoint(config.model)
        num_layers, last = checkpoint.spec.num_layers, config.num_stages - 1
        times = calibrate(
            checkpoint,
            calibration,
            config.stage_index,
            is_first=config.stage_index == 0,
            is_last=config.stage_index == last,
            dtype=config.dtype,
            device=config.device,
            quantization=config.quantization,
            clock=self._clock,
            slowdown=config.slowdown,
        )
        self._engine.send(encode_message(times))
        message = self._decoder.decode(self._control.recv())
        if isinstance(message, Stop):
            self._is_stopping = True
            return
        if not isinstance(message, AssignLayers):
            raise FrameError(f"a message {type(message).__name__} while this stage waits for its layers")
        first, end = message.first_layer, message.end_layer
        is_in_place = (first == 0) == (config.stage_index == 0) and (end == num_layers) == (config.stage_index == last)
        if not (0 <= first < end <= num_layers and is_in_place):
            raise FrameError(f"layers [{first}, {end}) of {num_layers} for stage {config.stage_index} of {last + 1}")
        self._config = msgspec.structs.replace(config, first_layer=first, end_layer=end)

    def _load(self) -> tuple[Stage, StageLoaded]:
        config = self._config
        stage = StageLayers(
            stage_index=config.stage_index,
            layers=range(config.first_layer, config.end_layer),
            is_first=config.stage_index == 0,
            is_last=config.stage_index == config.num_stages - 1,
        )
        return build_stage(
            open_checkpoint(config.model),
            stage,
            dtype=config.dtype,
            device=config.device,
            quantization=config.quantization,
            max_model_len=config.max_model_len,
            clock=self._clock,
            recorder=self._recorder,
            on_progress=lambda read, total: self._engine.send(
                encode_message(Loading(config.stage_index, read, total))
            ),
            slowdown=config.slowdown,
        )

    def _open_neighbours(self) -> None:
        """Receive before sending: the input socket is bound before the engine hears that this stage is ready."""
        self._input = self._output = None
        if self._config.input_address is not None:
            most_bytes = self._stage.max_input_bytes(self._config.max_num_batched_tokens)
            self._input = self._links.receiver(self._config.input_address, most_bytes)
            self._poller.register(self._input, zmq.POLLIN)
        if self._config.output_address is not None:
            self._output = self._links.sender(self._config.output_address)

    def _wait_for_work(self) -> torch.Tensor | None:
        """Return when the oldest announced microbatch can run, with its input: None on the first stage, or to stop."""
        while True:
            can_run = bool(self._announced) and self._input is None
            is_postponed = self._postponed is not None
            ready = dict(self._poller.poll(0 if can_run or is_postponed else None))
            if self._control in ready or is_postponed:
                self._take_control()
                if self._is_stopping:
                    return None
            elif can_run:
                return None
            if self._input is not None and self._announced and self._input in ready:
                return self._receive_activation(self._announced[0].prepared)

    def _take_control(self) -> None:
        self._account.enter("preparing", self._clock.now_s())
        message, self._postponed = self._postponed, None
        self._obey(message or self._decoder.decode(self._control.recv()))
        self._account.enter(self._waiting_state(), self._clock.now_s())

    def _take_masks(self) -> None:
        """Those that came while this stage computed, and the microbatches announced before them; nothing else now."""
        while self._postponed is None and self._control.poll(0):
            message = self._decoder.decode(self._control.recv())
            if isinstance(message, Microbatch | TokenMasks):
                self._obey(message)
            else:
                self._postponed = message

    def _obey(self, message: ToWorker) -> None:
        if isinstance(message, Microbatch):
            self._check_turn(message)
            prepared = self._stage.prepare(message)
            self._announced.append(_Announced(prepared, self._clock.now_s()))
        elif isinstance(message, TokenMasks):
            self._stage.add_masks(message)
        elif isinstance(message, Allocate):
            self._allocate(message.limits)
        elif isinstance(message, CollectItemTimes):
            self._send_item_times()
        elif isinstance(message, Stop):
            self._is_stopping = True
        else:
            raise FrameError(f"a message {type(message).__name__}, but this stage has its layers")

    def _send_item_times(self) -> None:
        """Of the microbatches since it was asked before; from now on for the next time."""
        config = self._config
        timer, self._timer = self._timer, ItemTimer(
            config.stage_index,
            range(config.first_layer, config.end_layer),
            config.stage_index == 0,
            config.stage_index == config.num_stages - 1,
            self._stage.device,
            self._clock,
            self._stage.stretch,
        )
        self._stage.time_items(self._timer)
        self._engine.send(encode_message((timer or self._timer).times()))

    def _check_turn(self, microbatch: Microbatch) -> None:
        """A microbatch that is lost, repeated or forged would make this stage's KV cache silently wrong."""
        found = (microbatch.epoch, microbatch.number)
        if found != self._next_microbatch:
            raise FrameError(f"microbatch (epoch, number) {found}; expected {self._next_microbatch or 'an allocation'}")
        self._next_microbatch = (microbatch.epoch, microbatch.number + 1)

    def _allocate(self, limits: MicrobatchLimits) -> None:
        if self._announced:
            raise FrameError(f"an allocation while {self._announced[0].prepared.microbatch} waits for its turn")
        bounds = {
            "vocab_size": self._stage.vocab_size,
            "max_num_seqs": self._config.max_num_seqs,
            "max_num_batched_tokens": self._config.max_num_batched_tokens,
            "max_model_len": self._config.max_model_len,
        }
        for name, value in msgspec.structs.asdict(limits).items():
            most = bounds.get(name, value)
            if not 1 <= value <= most:
                raise FrameError(f"an allocation with {name} {value}; expected 1 to {most}")
        self._stage.allocate_kv(limits)
        self._next_microbatch = (0, 0)
        # All that loading left lives as long as the process: the collector need not look at it between microbatches.
        gc.collect()
        gc.freeze()
        self._account.start(self._clock.now_s())
        self._engine.send(encode_message(Allocated(self._config.stage_index)))

    def _receive_activation(self, prepared: PreparedMicrobatch) -> torch.Tensor:
        """The stage before's output for this microbatch, still in the frame it came in."""
        assert self._input is not None
        expected = self._stage.expected_input(prepared.microbatch)
        assert expected is not None
        shape, dtype = expected
        frames = [frame.buffer for frame in self._input.recv_multipart(copy=False)]
        microbatch = prepared.microbatch
        body = check_activation(
            frames, microbatch.epoch, microbatch.number, self._num_received, shape[0] * shape[1] * dtype.itemsize
        )
        self._num_received += 1
        self._computing_s, self._slowest_s = stage_times(frames[0])
        sent_s = sent_time_s(frames[0])
        if self._config.input_delay_s > 0:
            wait_until(min(sent_s, self._clock.now_s()) + self._config.input_delay_s, self._clock)
        # What was sent before this stage waited lay ready for a time that is not the link's.
        latency_s = self._clock.now_s() - sent_s if sent_s >= self._waiting_since_s else None
        self._account.received(len(body), latency_s)
        return torch.frombuffer(body, dtype=dtype).view(shape)

    def _send(self, microbatch: Microbatch, output: torch.Tensor | MicrobatchResult) -> None:
        start_s = self._clock.now_s()
        if isinstance(output, MicrobatchResult):
            self._engine.send(encode_message(output.after(self._computing_s, self._slowest_s)))
        else:
            assert self._output is not None
            header = activation_header(
                microbatch.epoch, microbatch.number, self._num_sent, self._computing_s, self._slowest_s, start_s
            )
            body = tensor_bytes(output)
            # Counted first: when the engine has the result, every stage's totals hold the microbatch.
            self._account.sent(body.nbytes)
            self._output.send_multipart([header, body], copy=False)
            self._num_sent += 1
        self._record("send", microbatch, start_s)

    def _record(self, kind: SpanKind, microbatch: Microbatch, start_s: float) -> None:
        self._recorder.record(
            Span(
                stage_index=self._config.stage_index,
                microbatch=microbatch.number,
                kind=kind,
                start_s=start_s,
                end_s=self._clock.now_s(),
                num_tokens=microbatch.num_tokens,
                num_rows=microbatch.num_rows,
            )
        )
