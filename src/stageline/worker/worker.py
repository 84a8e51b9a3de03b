"""One stage's process: receive, forward, send, one microbatch after the other, in order. Decides nothing.

Control messages come from the engine and activations from the stage before, each in order and on a socket of its own. A
microbatch is prepared as soon as it is announced, usually before its activations are there, and runs when they are.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt
import torch
import zmq

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
    activation_frame,
    activation_frame_bytes,
    check_activation,
    encode_message,
)
from stageline.links.sockets import Links, receive_frame
from stageline.links.token_frames import check_token_frame, max_token_frame_bytes, token_frame
from stageline.pipeline.microbatch import Microbatch, MicrobatchResult, TokenMasks
from stageline.pipeline.partition import StageLayers
from stageline.timeline.recorder import Recorder
from stageline.timeline.span import Span, SpanKind
from stageline.timeline.stage_counters import StageAccount, StageState
from stageline.worker.activation_codec import ActivationCodec
from stageline.worker.activation_slices import joined, slice_of
from stageline.worker.broken_links import link_failed
from stageline.worker.build import build_made_up_stage, build_stage, change_layers
from stageline.worker.measure import ItemTimer, calibrate
from stageline.worker.meet_ranks import RanksMeeting
from stageline.worker.model_files import ModelFiles
from stageline.worker.sampled_tokens import AwaitedTokens
from stageline.worker.stage import PreparedMicrobatch, Stage
from stageline.worker.stretch import wait_until

_CONNECT_S = 10.0
"""Within which a stage reaches its neighbour on another machine, once all are loaded."""


@dataclass(frozen=True)
class _Input:
    """What a microbatch needs to run besides itself. Args: token_ids: of its pending rows, for the first stage."""

    hidden_states: torch.Tensor | None = None
    token_ids: Sequence[int] | npt.NDArray[np.int32] = ()


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
        self._files = ModelFiles(config, engine)
        self._meet_ranks = RanksMeeting(config)
        self._clock = MonotonicClock()
        self._recorder = recorder or Recorder()
        self._account = account or StageAccount(config.stage_index)
        self._waiting_since_s = 0.0
        self._decoder: MessageDecoder[ToWorker] = MessageDecoder(ToWorker)
        self._announced: deque[_Announced] = deque()
        self._postponed: ToWorker | None = None
        self._next_microbatch: tuple[int, int] | None = None
        self._num_received = self._num_sent = 0
        self._num_tokens_received = self._num_tokens_sent = 0
        self._own_tokens: deque[AwaitedTokens] = deque()
        self._computing_s = self._slowest_s = 0.0
        self._is_stopping = self._is_started = False
        self._timer: ItemTimer | None = None
        self._idle_poller, self._input_poller = zmq.Poller(), zmq.Poller()
        for poller in (self._idle_poller, self._input_poller):
            poller.register(control, zmq.POLLIN)

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
            inputs = self._wait_for_work()
            if inputs is None:
                return
            announced = self._announced.popleft()
            microbatch = announced.prepared.microbatch
            self._record("receive_wait", microbatch, max(free_since_s, announced.since_s))
            start_s = self._clock.now_s()
            self._account.enter("busy", start_s)
            output = self._stage.run(
                announced.prepared, inputs.hidden_states, self._take_masks, inputs.token_ids
            )
            self._hand_on_tokens()
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
        return "preparing" if self._source is None else "starved"

    def _add_time(self, elapsed_s: float) -> None:
        """To what the stages before needed for the same microbatch."""
        if self._input is None:
            self._computing_s = self._slowest_s = 0.0
        self._computing_s += elapsed_s
        self._slowest_s = max(self._slowest_s, elapsed_s)

    def _calibrate(self, calibration: Calibration) -> None:
        """Time a few layers, and hear which ones to load."""
        config = self._config
        checkpoint = self._files.open_with(calibration.layers, tells_progress=False)
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
            device_index=None if config.device_index < 0 else config.device_index,
            join=self._meet_ranks,
        )
        self._engine.send(encode_message(times))
        message = self._decoder.decode(self._control.recv())
        if isinstance(message, Stop):
            self._is_stopping = True
            return
        if not isinstance(message, AssignLayers):
            raise FrameError(f"a message {type(message).__name__} while this stage waits for its layers")
        self._take_layers(message, num_layers)

    def _take_layers(self, message: AssignLayers, num_layers: int) -> None:
        """Raises: FrameError if they cannot be this stage's."""
        config, last = self._config, self._config.num_stages - 1
        first, end = message.first_layer, message.end_layer
        is_in_place = (first == 0) == (config.stage_index == 0) and (end == num_layers) == (config.stage_index == last)
        if not (0 <= first < end <= num_layers and is_in_place):
            raise FrameError(f"layers [{first}, {end}) of {num_layers} for stage {config.stage_index} of {last + 1}")
        self._config = msgspec.structs.replace(config, first_layer=first, end_layer=end)

    @property
    def _part(self) -> StageLayers:
        config = self._config
        return StageLayers(
            stage_index=config.stage_index,
            layers=range(config.first_layer, config.end_layer),
            is_first=config.stage_index == 0,
            is_last=config.stage_index == config.num_stages - 1,
        )

    def _load(self) -> tuple[Stage, StageLoaded]:
        config = self._config
        if config.made_up is not None:
            return build_made_up_stage(config, config.made_up, self._part, self._clock, self._recorder)
        return build_stage(
            self._files.open_with(self._part.layers),
            self._part,
            dtype=config.dtype,
            device=config.device,
            quantization=config.quantization,
            max_model_len=config.max_model_len,
            clock=self._clock,
            recorder=self._recorder,
            on_progress=lambda read, total: self._engine.send(
                encode_message(Loading(config.stage_index, read, total, config.rank))
            ),
            slowdown=config.slowdown,
            device_index=None if config.device_index < 0 else config.device_index,
            join=self._meet_ranks,
        )

    def _open_neighbours(self) -> None:
        """Receive before sending: the input socket is bound before the engine hears that this stage is ready."""
        self._input = self._token_input = None
        self._more_inputs: list[zmq.Socket[bytes]] = []
        self._outputs: list[zmq.Socket[bytes]] = []
        self._token_outputs: list[zmq.Socket[bytes]] = []
        self._hand_on = [self._links.sender(address) for address in self._config.hand_on_addresses]
        sizes = (self._stage.hidden_size, self._stage.dtype)
        self._input_codec = ActivationCodec(self._config.input_dtype, *sizes)
        self._output_codec = ActivationCodec(self._config.output_dtype, *sizes)
        if self._config.input_address is not None:
            most_bytes = activation_frame_bytes(self._input_codec.num_bytes(self._config.max_num_batched_tokens))
            self._input = self._links.receiver(self._config.input_address, most_bytes)
            self._input_poller.register(self._input, zmq.POLLIN)
            self._more_inputs = [
                self._links.receiver(address, most_bytes) for address in self._config.more_input_addresses
            ]
        if self._config.output_address is not None:
            addresses = [self._config.output_address, *self._config.more_output_addresses]
            self._outputs = [self._links.sender(address) for address in addresses]
        if self._config.token_input_address is not None:
            most_bytes = max_token_frame_bytes(self._config.max_num_seqs)
            self._token_input = self._links.receiver(self._config.token_input_address, most_bytes)
            self._input_poller.register(self._token_input, zmq.POLLIN)
        if self._config.token_output_address is not None:
            addresses = [self._config.token_output_address, *self._config.more_token_output_addresses]
            self._token_outputs = [self._links.sender(address) for address in addresses]

    @property
    def _source(self) -> zmq.Socket[bytes] | None:
        """Where the oldest announced microbatch's input comes from; None if it can run, or if there is none."""
        if not self._announced:
            return None
        if self._input is not None:
            return self._input
        # A pipeline of one stage has its own tokens, where it samples.
        is_pending = bool(self._announced[0].prepared.microbatch.pending_rows) and not self._stage.samples
        return self._token_input if is_pending else None

    def _wait_for_work(self) -> _Input | None:
        """Return when the oldest announced microbatch can run, with its input; None to stop."""
        while True:
            source = self._source
            can_run = bool(self._announced) and source is None
            is_postponed = self._postponed is not None
            # Input that nobody waits for yet must not end the waiting, or this would spin.
            poller = self._idle_poller if source is None else self._input_poller
            ready = dict(poller.poll(0 if can_run or is_postponed else None))
            if self._control in ready or is_postponed:
                self._take_control()
                if self._is_stopping:
                    return None
            elif can_run:
                return _Input(token_ids=self._take_own_tokens())
            if source is not None and source in ready:
                prepared = self._announced[0].prepared
                if source is self._token_input:
                    return _Input(token_ids=self._receive_tokens(prepared))
                return _Input(hidden_states=self._receive_activation(prepared))

    def _take_control(self) -> None:
        self._account.enter("preparing", self._clock.now_s())
        message, self._postponed = self._postponed, None
        self._obey(message or self._decoder.decode(self._control.recv()))
        self._account.enter(self._waiting_state(), self._clock.now_s())

    def _take_own_tokens(self) -> Sequence[int]:
        """What a pipeline of one stage sampled for the oldest announced microbatch."""
        microbatch = self._announced[0].prepared.microbatch
        if not microbatch.pending_rows:
            return ()
        if not self._own_tokens:
            raise FrameError(f"{microbatch}: awaits tokens of m{microbatch.oldest}, which were not sampled before")
        return self._own_tokens.popleft().token_ids

    def _receive_tokens(self, prepared: PreparedMicrobatch) -> npt.NDArray[np.int32]:
        """What the last stage sampled for this microbatch's pending rows."""
        assert self._token_input is not None
        microbatch = prepared.microbatch
        received = receive_frame(self._token_input)
        for sibling in self._hand_on:
            sibling.send(received, copy=False)
        token_ids = check_token_frame(
            received.buffer,
            microbatch.epoch,
            microbatch.number,
            self._num_tokens_received,
            len(microbatch.pending_rows),
            self._stage.vocab_size,
        )
        self._num_tokens_received += 1
        return token_ids

    def _hand_on_tokens(self) -> None:
        """Give the first stage the sampled tokens that it awaits, before anything else is done with them."""
        if not self._stage.samples:
            return
        while (awaited := self._stage.take_awaited()) is not None:
            if self._stage.is_first:
                self._own_tokens.append(awaited)
            elif not self._token_outputs:
                raise FrameError(f"{awaited.microbatch}: awaits tokens, and there is no link for them")
            number = awaited.microbatch.number
            frame = token_frame(awaited.microbatch.epoch, number, self._num_tokens_sent, awaited.token_ids)
            for output in self._token_outputs:
                output.send(frame)
            self._num_tokens_sent += 1

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
            self._hand_on_tokens()
        elif isinstance(message, TokenMasks):
            self._stage.add_masks(message)
        elif isinstance(message, Allocate):
            self._allocate(message)
        elif isinstance(message, AssignLayers):
            self._change_layers(message)
        elif isinstance(message, CollectItemTimes):
            self._send_item_times(message.goes_on)
        elif isinstance(message, Stop):
            self._is_stopping = True
        else:
            raise FrameError(f"a message {type(message).__name__} that no stage should get")

    def _send_item_times(self, goes_on: bool) -> None:
        """Of the microbatches since it was asked before; from now on for the next time, if there shall be one."""
        config = self._config
        new = ItemTimer(
            config.stage_index,
            range(config.first_layer, config.end_layer),
            config.stage_index == 0,
            config.stage_index == config.num_stages - 1,
            self._stage.device,
            self._clock,
            self._stage.stretch,
        )
        timer, self._timer = self._timer or new, new if goes_on else None
        self._stage.time_items(self._timer)
        self._engine.send(encode_message(timer.times()))

    def _check_turn(self, microbatch: Microbatch) -> None:
        """A microbatch that is lost, repeated or forged would make this stage's KV cache silently wrong."""
        found = (microbatch.epoch, microbatch.number)
        if found != self._next_microbatch:
            raise FrameError(f"microbatch (epoch, number) {found}; expected {self._next_microbatch or 'an allocation'}")
        self._next_microbatch = (microbatch.epoch, microbatch.number + 1)

    def _change_layers(self, message: AssignLayers) -> None:
        """Hold other layers. Until the next allocation there is no KV cache, and no microbatch may come."""
        self._check_nothing_waits("other layers")
        self._take_layers(message, self._files.open().spec.num_layers)
        checkpoint = self._files.open_with(self._part.layers)
        self._timer, self._next_microbatch = None, None
        self._stage.release_kv()
        report = change_layers(checkpoint, self._stage, self._part, self._config.quantization)
        self._engine.send(encode_message(report))

    def _check_nothing_waits(self, what: str) -> None:
        if self._announced:
            raise FrameError(f"{what} while {self._announced[0].prepared.microbatch} waits for its turn")

    def _allocate(self, message: Allocate) -> None:
        self._check_nothing_waits("an allocation")
        limits = message.limits
        bounds = {
            "vocab_size": self._stage.vocab_size,
            "max_num_seqs": self._config.max_num_seqs,
            "max_num_batched_tokens": self._config.max_num_batched_tokens,
            "max_model_len": self._config.max_model_len,
        }
        for name, value in msgspec.structs.asdict(limits).items():
            most = bounds.get(name, value)
            lowest = 0 if name == "num_window_blocks" else 1
            if not lowest <= value <= most:
                raise FrameError(f"an allocation with {name} {value}; expected {lowest} to {most}")
        if message.epoch < 0 or message.first_microbatch < 0:
            raise FrameError(f"an allocation for microbatch {message.first_microbatch} of epoch {message.epoch}")
        if not self._are_links_up():
            return  # the engine ends all stages, when it has found out why
        self._stage.allocate_kv(limits)
        self._next_microbatch = (message.epoch, message.first_microbatch)
        # All that loading left lives as long as the process: the collector need not look at it between microbatches.
        gc.collect()
        gc.freeze()
        if not self._is_started:
            self._account.start(self._clock.now_s())
        self._is_started = True
        self._engine.send(encode_message(Allocated(self._config.stage_index, self._config.rank)))

    def _are_links_up(self) -> bool:
        """All stages listen by now; if one that this one sends to is not reached, the engine is told."""
        config = self._config
        one, tokens = config.output_address, config.token_output_address
        for address in (one, *config.more_output_addresses, tokens, *config.more_token_output_addresses):
            if address is not None and not self._links.wait_until_up(address, _CONNECT_S):
                trouble = self._links.trouble(address) or f"no answer within {_CONNECT_S:g} s"
                self._engine.send(encode_message(link_failed(config, address, f"did not come about: {trouble}")))
                return False
        return True

    def _receive_activation(self, prepared: PreparedMicrobatch) -> torch.Tensor:
        """The stage before's output for this microbatch; if it came as it was computed, still in its frame."""
        assert self._input is not None
        received = receive_frame(self._input)
        for sibling in self._hand_on:
            sibling.send(received, copy=False)
        # The other senders are as far as the first: each waits for all in every layer.
        frames = [received, *map(receive_frame, self._more_inputs)]
        microbatch = prepared.microbatch
        num_bytes = self._input_codec.num_bytes(microbatch.num_tokens)
        place = microbatch.epoch, microbatch.number, self._num_received
        parts = []
        for index, frame in enumerate(frames):
            run = slice_of(num_bytes, index, len(frames))
            parts.append(check_activation(frame.buffer, *place, run.stop - run.start))
        body = joined([part.body for part in parts])
        self._num_received += 1
        self._computing_s, self._slowest_s = parts[0].computing_s, parts[0].slowest_s
        sent_s = parts[0].sent_s - self._account.input_ahead_s
        if self._config.input_delay_s > 0:
            wait_until(min(sent_s, self._clock.now_s()) + self._config.input_delay_s, self._clock)
        # What was sent before this stage waited lay ready for a time that is not the link's.
        latency_s = self._clock.now_s() - sent_s if sent_s >= self._waiting_since_s else None
        self._account.received(len(body), latency_s)
        return self._input_codec.decode(body, microbatch.num_tokens)

    def _send(self, microbatch: Microbatch, output: torch.Tensor | MicrobatchResult) -> None:
        start_s = self._clock.now_s()
        if isinstance(output, MicrobatchResult):
            self._engine.send(encode_message(output.after(self._computing_s, self._slowest_s)))
        elif self._outputs:
            body = self._output_codec.encode(output)
            if not self._config.sends_whole:
                body = body[slice_of(body.nbytes, self._config.rank, self._config.num_ranks)]
            place = microbatch.epoch, microbatch.number, self._num_sent
            frame = activation_frame(body, *place, self._computing_s, self._slowest_s, start_s)
            # Counted first: when the engine has the result, every stage's totals hold the microbatch.
            self._account.sent(body.nbytes)
            for socket in self._outputs:
                socket.send(frame, copy=False)
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
