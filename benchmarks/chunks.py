"""A long prompt's time to first token: chunks cut automatically against fixed sizes.

    python benchmarks/chunks.py MODEL [--stages 1 2 4] [--prompts 1000 4000 8000] [--decodes 0 8] [--quick]

One row per number of stages, prompt length and number of requests that decode meanwhile: the time with
`--prefill-chunk auto` and with each fixed size, medians; auto over the best and the worst of them. All sizes are served
by the same pipeline, after the warm-up that a server does and one round that does not count, in another order each
round, so that none profits from who was before it. Where stages share cores, depth says little.

The least of several noisy medians is too small: it is the one with the most luck. So the best and the worst size are
chosen by every other round and compared with auto in the rounds between, both ways. What is compared are two prompts of
one round, for a machine drifts; the ratio is the median over the rounds.

Beside decodes every size is bounded by --max-decode-slowdown, so a fixed one is only the most that a chunk may have.
A size that gets its prompt done sooner by making others wait longer is no better, only another bargain: it is compared
with auto only if the 99th percentile of the time between the decodes' tokens is at most 5 % longer; `waits` shows it,
for auto and each size.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import statistics
from collections.abc import Callable

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
MOST_WAIT = 1.05


@dataclasses.dataclass(frozen=True)
class Trial:
    """One prompt's time to first token, and the times between tokens of those that decoded meanwhile."""

    first_token_s: float
    between_tokens_s: list[float]


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

    def time_prompt(self, num_tokens: int, chunk: int | None) -> Trial:
        """One prompt of so many tokens, with chunks of that size or cut automatically."""
        self.scheduler.limits = dataclasses.replace(self.scheduler.limits, max_chunk_tokens=chunk)
        latest_s: dict[str, float] = {}
        between_s: list[float] = []
        start_s = self.clock.now_s()
        request_id = self.add(num_tokens, 1)
        while True:
            for update in self.core.step():
                if not update.token_ids:
                    continue
                if update.request_id == request_id:
                    return Trial(update.time_s - start_s, between_s)
                if update.request_id in latest_s:
                    between_s.append(update.time_s - latest_s[update.request_id])
                latest_s[update.request_id] = update.time_s

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
    measured: Measured, num_tokens: int, num_decodes: int, sizes: list[int | None], rounds: int
) -> list[list[Trial]]:
    """Per size, a trial of each round."""
    trials: list[list[Trial]] = [[] for _ in sizes]
    order = random.Random(num_tokens + num_decodes)
    for number in range(rounds + 1):
        for index in order.sample(range(len(sizes)), len(sizes)):
            names = measured.start_decodes(num_decodes)
            trial = measured.time_prompt(num_tokens, sizes[index])
            measured.stop(names)
            if number > 0:
                trials[index].append(trial)
    return trials


def first_token_s(trials: list[Trial]) -> float:
    return statistics.median(trial.first_token_s for trial in trials)


def wait_s(trials: list[Trial]) -> float:
    """The 99th percentile of all times between tokens."""
    times_s = sorted(time_s for trial in trials for time_s in trial.between_tokens_s)
    return times_s[int(0.99 * (len(times_s) - 1))] if times_s else 0.0


def over_chosen(auto: list[Trial], fixed: list[list[Trial]], choose: Callable[..., list[Trial]]) -> float:
    """Auto's time over that of the size which `choose` takes by the rounds that are not compared."""
    ratios = []
    for half in (0, 1):
        chosen = choose(fixed, key=lambda trials: first_token_s(trials[1 - half :: 2]))
        pairs = zip(auto[half::2], chosen[half::2], strict=True)
        ratios += [one.first_token_s / other.first_token_s for one, other in pairs]
    return statistics.median(ratios)


def row(trials: list[list[Trial]]) -> str:
    auto, *fixed = trials
    rivals = [one for one in fixed if wait_s(one) <= MOST_WAIT * wait_s(auto)]
    times = "".join(f"{first_token_s(one):8.2f}" for one in trials)
    best = f"{over_chosen(auto, rivals, min):9.3f}" if rivals else f"{'no rival':>9}"
    waits = " ".join(f"{wait_s(one) * 1e3:.0f}" for one in trials) if wait_s(auto) else "-"
    return f"{times}  {best}  {over_chosen(auto, fixed, max):10.3f}  {waits}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--prompts", type=int, nargs="+", default=[1000, 4000, 8000])
    parser.add_argument("--decodes", type=int, nargs="+", default=[0, 8])
    parser.add_argument("--rounds", type=int, default=6, help="that count, at least 2")
    parser.add_argument("--quick", action="store_true", help="fewer sizes")
    args = parser.parse_args()
    sizes: list[int | None] = [None, *(QUICK_SIZES if args.quick else SIZES)]
    rounds = max(2, args.rounds)
    cores = len(os.sched_getaffinity(0))
    print(f"{cores} cores; seconds to the first token")
    columns = "".join(f"{size:>8}" for size in sizes[1:])
    print(f"stages  prompt  decodes     auto{columns}  auto/best  auto/worst  waits, ms")
    for num_stages in args.stages:
        measured = Measured(args.model, num_stages, max(args.prompts))
        try:
            for num_tokens in args.prompts:
                for num_decodes in args.decodes:
                    tokens = min(num_tokens, measured.max_prompt_tokens)
                    trials = measure(measured, tokens, num_decodes, sizes, rounds)
                    note = "  (stages share cores)" if num_stages > cores else ""
                    print(f"{num_stages:6d}  {tokens:6d}  {num_decodes:7d} {row(trials)}{note}", flush=True)
        finally:
            measured.core.close()


if __name__ == "__main__":
    main()
