"""What a long prompt does to answers that are being streamed: their inter-token latency while it arrives.

    python benchmarks/itl_under_prefill.py MODEL [--decodes 8 16 32] [--prompt-len 4000] [--repetitions 3]

Some requests decode; then long prompts arrive, one after the other. One row per number of decodes and setting of
--max-decode-slowdown, `inf` being no bound: the median inter-token latency without a prompt, the 99th percentile and
the largest of the tokens that came between a prompt's arrival and its first token, as ratios to that median, and the
prompt's time to first token. The settings take turns within each repetition.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from dataclasses import dataclass, field
from itertools import pairwise

from stageline import LLM, SamplingParams
from stageline.engine.output_stream import OutputStream

SHORT_LEN, SETTLING_TOKENS, QUIET_TOKENS = 64, 30, 60
VOCABULARY = range(1000, 40000)


@dataclass
class Seen:
    """Inter-token times in seconds, of all decodes together."""

    quiet_s: list[float] = field(default_factory=list)
    disturbed_s: list[float] = field(default_factory=list)
    ttft_s: list[float] = field(default_factory=list)


def token_times_s(streams: list[OutputStream]) -> list[tuple[float, ...]]:
    """When each decode's tokens came so far. Takes one more output of each."""
    return [tuple(next(stream).outputs[0].timings.token_times_s) for stream in streams]


def wait_for_tokens(streams: list[OutputStream], num_tokens: int) -> None:
    """Let every decode have so many tokens."""
    for stream in streams:
        while len(next(stream).outputs[0].token_ids) < num_tokens:
            pass


def gaps_s(times_s: list[tuple[float, ...]], start_s: float, end_s: float) -> list[float]:
    """Times between tokens of which the later came in the interval."""
    return [later - before for times in times_s for before, later in pairwise(times) if start_s < later <= end_s]


def measure(llm: LLM, num_decodes: int, prompt_len: int, seed: int, seen: Seen) -> None:
    """Two long prompts in turn beside `num_decodes` decodes."""
    numbers = random.Random(seed)

    def prompt(length: int) -> list[int]:
        return [numbers.choice(VOCABULARY) for _ in range(length)]

    endless = SamplingParams(temperature=0.0, max_tokens=4000, ignore_eos=True)
    one_token = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    streams = [llm.stream(prompt(SHORT_LEN), endless) for _ in range(num_decodes)]
    try:
        wait_for_tokens(streams, SETTLING_TOKENS)
        quiet_from_s = llm.clock.now_s()
        wait_for_tokens(streams, SETTLING_TOKENS + QUIET_TOKENS)
        quiet_until_s = llm.clock.now_s()
        arrivals = []
        for _ in range(2):
            arrival_s = llm.clock.now_s()
            [output] = list(llm.stream(prompt(prompt_len), one_token))
            arrivals.append((arrival_s, output.outputs[0].timings.first_token_s or math.nan))
        times_s = token_times_s(streams)
    finally:
        for stream in streams:
            stream.close()
    seen.quiet_s += gaps_s(times_s, quiet_from_s, quiet_until_s)
    for arrival_s, first_token_s in arrivals:
        seen.disturbed_s += gaps_s(times_s, arrival_s, first_token_s)
        seen.ttft_s.append(first_token_s - arrival_s)


def report(num_decodes: int, slowdown: float, seen: Seen) -> None:
    median_s = statistics.median(seen.quiet_s)
    disturbed_s = sorted(seen.disturbed_s)
    quiet_p99_s = sorted(seen.quiet_s)[int(0.99 * len(seen.quiet_s))]
    p99_s = disturbed_s[int(0.99 * len(disturbed_s))]
    print(
        f"{num_decodes:7d} {slowdown:9.2f} {median_s * 1e3:10.1f} {quiet_p99_s / median_s:9.2f} "
        f"{statistics.median(disturbed_s) / median_s:10.2f} {p99_s / median_s:7.2f} {disturbed_s[-1] / median_s:7.2f} "
        f"{statistics.median(seen.ttft_s):11.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--decodes", type=int, nargs="+", default=[8, 16, 32])
    parser.add_argument("--prompt-len", type=int, default=4000)
    parser.add_argument("--slowdowns", type=float, nargs="+", default=[1.8, math.inf])
    parser.add_argument("--repetitions", type=int, default=3)
    args = parser.parse_args()
    settings = {"pipeline_parallel_size": args.stages, "dtype": "bfloat16", "enable_prefix_caching": False}
    seen = {(decodes, slowdown): Seen() for decodes in args.decodes for slowdown in args.slowdowns}
    for repetition in range(args.repetitions):
        for slowdown in args.slowdowns:
            with LLM(args.model, max_decode_slowdown=slowdown, **settings) as llm:
                for decodes in args.decodes:
                    measure(llm, decodes, args.prompt_len, repetition, seen[decodes, slowdown])
    print("decodes  slowdown  median ms  p99/med.  during: median     p99     max  TTFT of the prompt s")
    for (decodes, slowdown), its in seen.items():
        report(decodes, slowdown, its)


if __name__ == "__main__":
    main()
