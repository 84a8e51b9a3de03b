"""What the engine costs per microbatch, without a model: scheduling, messages and the update of every request.

    python benchmarks/scheduling.py [--stages 2] [--requests 64 128 256 512 1024] [--waiting 0] [--no-look-ahead]

The engine's own loop runs over stages that encode, decode, check and answer every message as real ones do but compute
nothing. Requests are in steady decode. One row per number of requests: microseconds per microbatch and per row, medians
over the run; a second column says what a stage spends on preparing its inputs. `--waiting` queues more requests behind
those that run.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import deque

import torch

from stageline.clock import MonotonicClock
from stageline.engine.core import EngineCore
from stageline.executor.messages import FromWorker, StageLoaded, ToWorker
from stageline.kv.kv_cache_manager import KVCacheManager
from stageline.links.frames import MessageDecoder, encode_message
from stageline.pipeline.microbatch import Microbatch, MicrobatchLimits, MicrobatchResult, check_microbatch
from stageline.request import EngineRequest
from stageline.sampling import SamplerSpec
from stageline.scheduler.scheduler import Scheduler, SchedulerLimits
from stageline.timeline.span import Span
from stageline.worker.input_buffers import InputBuffers

NUM_BLOCKS, BLOCK_SIZE, VOCAB_SIZE, MAX_MODEL_LEN = 200_000, 16, 50_000, 4096


class MessagesOnly:
    """An executor whose stage answers token 1 for every row."""

    def __init__(self, limits: MicrobatchLimits) -> None:
        self.prepare_s: list[float] = []
        self._limits = limits
        self._buffers = InputBuffers(limits, torch.device("cpu"))
        self._to_worker: MessageDecoder[ToWorker] = MessageDecoder(ToWorker)
        self._from_worker: MessageDecoder[FromWorker] = MessageDecoder(FromWorker)
        self._frames: deque[bytes] = deque()
        self.stage_s = 0.0

    def load(self, on_progress: object = None) -> list[StageLoaded]:
        return []

    def allocate(self, limits: MicrobatchLimits) -> None:
        pass

    def launch(self, microbatch: Microbatch) -> None:
        frame = encode_message(microbatch)
        start_s = time.perf_counter()
        received = self._to_worker.decode(frame)
        assert isinstance(received, Microbatch)
        check_microbatch(received, self._limits)
        self._buffers.apply_and_build(received)
        result = MicrobatchResult(received.epoch, received.number, [1] * len(received.sampling_rows), [], [])
        self._frames.append(encode_message(result))
        elapsed_s = time.perf_counter() - start_s
        self.prepare_s.append(elapsed_s)
        self.stage_s += elapsed_s

    def before_sampling(self, send_masks: object) -> None:
        pass

    def wait(self, until_s: float | None = None) -> MicrobatchResult:
        result = self._from_worker.decode(self._frames.popleft())
        assert isinstance(result, MicrobatchResult)
        return result

    def collect_spans(self, since_s: float = 0.0) -> list[Span]:
        return []

    def close(self) -> None:
        pass


def measure(
    num_requests: int, num_stages: int, num_steps: int, num_waiting: int, looks_ahead: bool
) -> tuple[float, float, int]:
    """Returns: median seconds of the engine and of a stage's preparation per microbatch, and rows per microbatch."""
    limits = MicrobatchLimits(NUM_BLOCKS, BLOCK_SIZE, VOCAB_SIZE, num_requests, 8192, MAX_MODEL_LEN)
    executor = MessagesOnly(limits)
    scheduler = Scheduler(
        KVCacheManager(NUM_BLOCKS, BLOCK_SIZE, True),
        SchedulerLimits(num_stages, num_stages, num_requests, 8192, MAX_MODEL_LEN, look_ahead=looks_ahead),
    )
    core = EngineCore(executor, scheduler, MonotonicClock())
    for index in range(num_requests + num_waiting):
        prompt = [(index * 7 + position) % VOCAB_SIZE for position in range(64)]
        core.add(
            EngineRequest(
                request_id=str(index),
                prompt_token_ids=prompt,
                sampler=SamplerSpec(seed=index),
                max_tokens=MAX_MODEL_LEN - 64,
                eos_token_ids=(0,),
                stop_token_ids=(),
                arrival_s=0.0,
            )
        )
    while scheduler.num_waiting > num_waiting:
        core.step()
    for _ in range(6 * num_stages):
        core.step()
    executor.prepare_s.clear()
    engine_s = []
    for _ in range(num_steps):
        executor.stage_s, start_s = 0.0, time.perf_counter()
        core.step()
        engine_s.append(time.perf_counter() - start_s - executor.stage_s)
    return statistics.median(engine_s), statistics.median(executor.prepare_s), -(-num_requests // num_stages)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--requests", type=int, nargs="+", default=[64, 128, 256, 512, 1024])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--waiting", type=int, default=0)
    parser.add_argument("--look-ahead", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    print("requests  rows/microbatch  engine us/microbatch  engine us/row  stage's preparation us/microbatch")
    for num_requests in args.requests:
        engine_s, prepare_s, rows = measure(
            num_requests, args.stages, args.steps, args.waiting, args.look_ahead
        )
        engine_us, prepare_us = engine_s * 1e6, prepare_s * 1e6
        print(f"{num_requests:8d}  {rows:15d}  {engine_us:20.0f}  {engine_us / rows:13.2f}  {prepare_us:33.0f}")


if __name__ == "__main__":
    main()
