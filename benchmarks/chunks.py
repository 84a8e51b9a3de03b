"""A long prompt's time to first token: chunks cut automatically against fixed sizes.

    python benchmarks/chunks.py MODEL [--stages 1 2 4] [--prompts 1000 4000 8000] [--decodes 0 8] [--quick]

One row per number of stages, prompt length and number of requests that decode meanwhile: the time with
`--prefill-chunk auto` and with each fixed size, medians; auto over the best and the worst of them. All sizes are served
by the same pipeline, taking turns, after the warm-up that a server does. Where stages share cores, depth says little.

Beside decodes every size is bounded by --max-decode-slowdown, so a fixed one is only the most that a chunk may have.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import statistics

from stageline.checkpoint import open_checkpoint
from stageline.clock import MonotonicClock
from stageline.config.engine_config import EngineConfig
from stageline.engine.core import EngineCore
from stageline.engine.startup import start_pipeline
from stageline.engine.warm_up import USUAL_SIZES, warm_up
from stageline.request import EngineRequest
from stageline.sampling import SamplerSpec
from stageline.scheduler.scheduler import Scheduler

SIZES, QUICK_SIZES = (128, 256, 512, 1024, 2048), (128, 512, 2048)
SHORT_LEN, SETTLING_TOKENS = 64, 40
ENDLESS = 3000


class Measured:
    """One pipeline, whose scheduler is told another chunk size between prompts."""

    def __init__(self, model: str, num_stages: int, prompt_tokens: int) -> None:
        config = EngineConfig(
            model=model, pipeline_parallel_size=num_stages, dtype="bfloat16", enable_prefix_caching=False
        )
        checkpoint = open_checkpoint(model)
        self.clock = MonotonicClock()
        pipeline = start_pipeline(config.check(), checkpoint, self.clock)
        self.core: EngineCore = pipeline.core
        self.scheduler: Scheduler = pipeline.core._scheduler
        self.max_prompt_tokens = min(prompt_tokens, pipeline.max_model_len - 2)
        self._vocab_size = checkpoint.spec.vocab_size
        self._numbers = random.Random(0)
        self._num_requests = 0
        warm_up(self.core, USUAL_SIZES, pipeline.max_model_len, self._vocab_size, self.clock)

    def add(self, num_prompt_tokens: int, num_tokens: int) -> str:
        self._num_requests += 1
        request_id = str(self._num_requests)
        prompt = [self._numbers.randrange(self._vocab_size) for _ in range(num_prompt_tokens)]
        self.core.add(
            EngineRequest(
                request_id=request_id,
                prompt_token_ids=prompt,
                sampler=SamplerSpec(seed=0),
                max_tokens=num_tokens,
                eos_token_ids=(),
                stop_token_ids=(),
                arrival_s=self.clock.now_s(),
            )
        )
        return request_id

    def time_to_first_token_s(self, num_tokens: int, chunk: int | None) -> float:
        """Of one prompt of so many tokens, with chunks of that size or cut automatically."""
        self.scheduler.limits = dataclasses.replace(self.scheduler.limits, max_chunk_tokens=chunk)
        start_s = self.clock.now_s()
        request_id = self.add(num_tokens, 1)
        while True:
            for update in self.core.step():
                if update.request_id == request_id and update.token_ids:
                    return update.time_s - start_s

    def start_decodes(self, num_decodes: int) -> list[str]:
        names = [self.add(SHORT_LEN, ENDLESS) for _ in range(num_decodes)]
        for _ in range(SETTLING_TOKENS if names else 0):
            self.core.step()
        return names

    def stop(self, names: list[str]) -> None:
        for name in names:
            self.core.abort(name)
        while self.core.has_work:
            self.core.step()


def measure(
    measured: Measured, num_tokens: int, num_decodes: int, sizes: list[int | None], repetitions: int
) -> list[float]:
    """Median times to first token, per size."""
    times_s: list[list[float]] = [[] for _ in sizes]
    for repetition in range(repetitions):
        # Each time another size begins, so that none profits from its place.
        for place in range(len(sizes)):
            index = (place + repetition) % len(sizes)
            names = measured.start_decodes(num_decodes)
            times_s[index].append(measured.time_to_first_token_s(num_tokens, sizes[index]))
            measured.stop(names)
    return [statistics.median(times) for times in times_s]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--prompts", type=int, nargs="+", default=[1000, 4000, 8000])
    parser.add_argument("--decodes", type=int, nargs="+", default=[0, 8])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="fewer sizes, once or twice each")
    args = parser.parse_args()
    sizes: list[int | None] = [None, *(QUICK_SIZES if args.quick else SIZES)]
    repetitions = 2 if args.quick else args.repetitions
    cores = len(os.sched_getaffinity(0))
    print(f"{cores} cores; seconds to the first token")
    columns = "".join(f"{size:>8}" for size in sizes[1:])
    print(f"stages  prompt  decodes     auto{columns}  auto/best  auto/worst")
    for num_stages in args.stages:
        measured = Measured(args.model, num_stages, max(args.prompts))
        try:
            for num_tokens in args.prompts:
                for num_decodes in args.decodes:
                    tokens = min(num_tokens, measured.max_prompt_tokens)
                    auto_s, *fixed_s = measure(measured, tokens, num_decodes, sizes, repetitions)
                    shown = "".join(f"{time_s:8.2f}" for time_s in (auto_s, *fixed_s))
                    note = "  (stages share cores)" if num_stages > cores else ""
                    print(
                        f"{num_stages:6d}  {tokens:6d}  {num_decodes:7d} {shown}  {auto_s / min(fixed_s):9.3f}  "
                        f"{auto_s / max(fixed_s):10.3f}{note}",
                        flush=True,
                    )
        finally:
            measured.core.close()


if __name__ == "__main__":
    main()
