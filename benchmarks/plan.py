"""What a plan predicts beside what a run measures, on this machine: throughput and TPOT by stages and requests.

    python benchmarks/plan.py MODEL [--stages 1 2 3] [--concurrency 1 8 32]

Calibrates (`stageline plan MODEL --calibrate`) before, in the middle and after, simulates every cell with each profile
and takes the median. In between every cell is measured with what `stageline bench throughput` runs: pipelines of all
depths stand ready, rounds go through all cells in turn, and a cell's median is taken. So a machine that becomes slower
or faster meanwhile is so for both sides. Run it on a quiet machine: what else runs is measured too. About 7 minutes.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from statistics import fmean, median

from stageline import LLM, SamplingParams
from stageline.checkpoint import open_checkpoint
from stageline.cli.bench_report import BenchReport
from stageline.cli.plan_calibrate import format_profile
from stageline.config.engine_config import EngineConfig
from stageline.cost.host_profile import HostProfile, layer_shape
from stageline.cost.model_costs import model_costs
from stageline.engine.startup import scheduler_limits
from stageline.loadgen.workload import PlannedRequest, draw_random, uniform
from stageline.planner.calibrate import calibrate_host
from stageline.planner.host_pipeline import host_pipeline
from stageline.planner.simulate import SimulatedMemory, SimulatedRun, simulate
from stageline.timeline.analysis import analyse
from stageline.timeline.journeys import journeys, mean_split
from stageline.timeline.span import Span
from stageline.timeline.view import format_split

INPUT_LEN, OUTPUT_LEN = 128, 64
ROUNDS = ((1, 2), (3, 4))
"""Seeds of their prompts; after each group the machine is calibrated again."""

CELL_ROUND_S = 5.0
"""A cell whose requests are served sooner is run again: the machine's pace changes from second to second."""
CELL_TARGET, MEDIAN_TARGET = 0.15, 0.08


@dataclass(frozen=True)
class Measured:
    tokens_per_s: float
    tpot_s: float
    ttft_s: float
    bubble: float
    way: str


def decodes_way(spans: list[Span], num_stages: int) -> str:
    """What the time of an average microbatch of decodes was made of."""
    decodes = [way for way in journeys(spans, num_stages) if not way.has_prompt_tokens]
    split = mean_split(decodes, num_stages)
    return "no decodes" if split is None else f"{len(decodes)} x {format_split(split)}"


def measure(llm: LLM, num_requests: int, seed: int) -> Measured:
    words = random.Random(seed)
    prompts = [words.choices(range(llm.spec.vocab_size), k=INPUT_LEN) for _ in range(num_requests)]
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_LEN, ignore_eos=True)
    start_s = llm.clock.now_s()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    elapsed_s = llm.clock.now_s() - start_s
    spans, num_stages = llm.spans(start_s), llm.config.pipeline_parallel_size
    pipeline = analyse(spans, num_stages)
    report = BenchReport("throughput", llm.config, outputs, [elapsed_s], pipeline)
    assert report.tpot is not None and report.ttft is not None
    return Measured(
        tokens_per_s=report.num_output_tokens / elapsed_s,
        tpot_s=report.tpot.mean_s,
        ttft_s=report.ttft.mean_s,
        bubble=pipeline.bubble_fraction,
        way=decodes_way(spans, num_stages),
    )


def measured_for(duration_s: float, llm: LLM, num_requests: int, seed: int) -> Iterator[Measured]:
    """One run at least, and as many more as start within the time."""
    until_s = time.monotonic() + duration_s
    yield measure(llm, num_requests, seed)
    while time.monotonic() < until_s:
        yield measure(llm, num_requests, seed)


@dataclass(frozen=True)
class Predicted:
    """Medians over the profiles."""

    tokens_per_s: float
    tpot_s: float
    ttft_s: float
    bubble: float
    way: str


def workload(num_requests: int) -> list[PlannedRequest]:
    return draw_random(num_requests, uniform(INPUT_LEN, 0), uniform(OUTPUT_LEN, 0), random.Random(0))


def simulated(llm: LLM, profile: HostProfile, num_requests: int, before: Sequence[int]) -> SimulatedRun:
    """Args: before: numbers of requests that were served before, as in a round that is measured."""
    pipeline = host_pipeline(profile, layer_shape(model_costs(llm.spec)), llm.partition)
    memory = SimulatedMemory(llm.kv_plan.num_blocks, llm.kv_plan.block_size, False)
    limits = scheduler_limits(llm.config, llm.max_model_len)
    warm_up = [workload(number) for number in before]
    return simulate(workload(num_requests), pipeline, llm.partition, limits, memory, warm_up=warm_up)


def predict(llm: LLM, profiles: Sequence[HostProfile], num_requests: int, before: Sequence[int]) -> Predicted:
    runs = [simulated(llm, profile, num_requests, before) for profile in profiles]
    return Predicted(
        tokens_per_s=median(run.output_tokens_per_s for run in runs),
        tpot_s=median(fmean(run.tpot_s) for run in runs),
        ttft_s=median(fmean(run.ttft_s) for run in runs),
        bubble=median(run.report().bubble_fraction for run in runs),
        way=decodes_way(runs[0].spans, runs[0].num_stages),
    )


def calibrated(model: str) -> HostProfile:
    start_s = time.monotonic()
    profile = calibrate_host(EngineConfig(model=model), open_checkpoint(model).spec)
    print(f"{format_profile(profile)}\ncalibrated in {time.monotonic() - start_s:.0f} s\n", flush=True)
    return profile


def report(
    llms: Sequence[LLM], cells: dict[tuple[int, int], list[Measured]], profiles: Sequence[HostProfile], shows_ways: bool
) -> dict[str, float]:
    """A line for each cell. Returns: the errors."""
    print("stages requests |  tokens/s: predicted measured  error |  TPOT ms: predicted measured  error | bubbles")
    errors: dict[str, float] = {}
    in_a_round = [num_requests for index, num_requests in cells if index == 0]
    for (index, num_requests), found in cells.items():
        llm, num_stages = llms[index], llms[index].config.pipeline_parallel_size
        before = in_a_round[: in_a_round.index(num_requests)]
        plan = predict(llm, profiles, num_requests, [max(in_a_round), *before])
        rate, tpot_s = median(one.tokens_per_s for one in found), median(one.tpot_s for one in found)
        rate_error, tpot_error = plan.tokens_per_s / rate - 1, plan.tpot_s / tpot_s - 1
        cell = f"{num_stages} stages x {num_requests} requests"
        errors |= {f"tokens/s of {cell}": rate_error, f"TPOT of {cell}": tpot_error}
        bubbles = f"{plan.bubble:.1%} {median(one.bubble for one in found):.1%}"
        rates = f"{plan.tokens_per_s:20.1f} {rate:8.1f} {rate_error:+6.1%}"
        tpots = f"{plan.tpot_s * 1e3:19.1f} {tpot_s * 1e3:8.1f} {tpot_error:+6.1%}"
        print(f"{num_stages:6d} {num_requests:8d} | {rates} | {tpots} | {bubbles}", flush=True)
        if shows_ways:
            print(f"      rounds    {', '.join(f'{one.tokens_per_s:.1f}' for one in found)} tokens/s")
            print(f"      predicted {plan.way}")
            print(f"      measured  {found[-1].way}; TTFT {plan.ttft_s:.3f} s, {found[-1].ttft_s:.3f} s")
    return errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--concurrency", "--requests", dest="requests", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--ways", action="store_true", help="show each round, and what a decode's time is made of, too")
    args = parser.parse_args()
    start_s = time.monotonic()
    profiles = [calibrated(args.model)]
    with ExitStack() as open_llms:
        llms = [
            open_llms.enter_context(LLM(args.model, pipeline_parallel_size=number, enable_prefix_caching=False))
            for number in args.stages
        ]
        for llm in llms:
            measure(llm, max(args.requests), 0)
        cells: dict[tuple[int, int], list[Measured]] = {}
        for seeds in ROUNDS:
            for seed, (index, llm), num_requests in product(seeds, enumerate(llms), args.requests):
                cells.setdefault((index, num_requests), []).extend(measured_for(CELL_ROUND_S, llm, num_requests, seed))
            profiles.append(calibrated(args.model))
    errors = report(llms, cells, profiles, args.ways)
    sizes = [abs(error) for error in errors.values()]
    worst = max(errors, key=lambda name: abs(errors[name]))
    verdict = "kept" if max(sizes) <= CELL_TARGET and median(sizes) <= MEDIAN_TARGET else "missed"
    print(
        f"\nlargest error {max(sizes):.1%}, {worst} (target {CELL_TARGET:.0%}), median {median(sizes):.1%} "
        f"(target {MEDIAN_TARGET:.0%}): {verdict}; {time.monotonic() - start_s:.0f} s in all"
    )


if __name__ == "__main__":
    main()
