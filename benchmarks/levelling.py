"""How equally long microbatches take when contexts differ wildly: half the requests at 50 tokens, half at 2,000.

    python benchmarks/levelling.py MODEL [--stages 2 4] [--requests 32] [--microbatches 200]

Requests decode together. One row per number of stages: the groups' sizes in rows, and for each place in the window the
median time of its microbatches on the slowest stage; the spread is the largest of these over the smallest, less one.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections import defaultdict

from stageline import LLM, SamplingParams
from stageline.timeline.span import Span

SHORT_LEN, LONG_LEN, SETTLING_TOKENS = 50, 2000, 40


def stage_times_s(spans: list[Span]) -> dict[int, float]:
    """Per microbatch, the time on its slowest stage."""
    times_s: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for span in spans:
        if span.kind in ("forward", "sample"):
            times_s[span.microbatch][span.stage_index] += span.end_s - span.start_s
    return {microbatch: max(stages.values()) for microbatch, stages in times_s.items()}


def measure(model: str, num_stages: int, num_requests: int, num_microbatches: int) -> str:
    numbers = random.Random(0)
    lengths = [SHORT_LEN, LONG_LEN] * (num_requests // 2)
    numbers.shuffle(lengths)
    params = SamplingParams(temperature=0.0, max_tokens=2000, ignore_eos=True)
    with LLM(model, pipeline_parallel_size=num_stages, dtype="bfloat16", enable_prefix_caching=False) as llm:
        streams = [llm.stream([numbers.randrange(1000, 40000) for _ in range(length)], params) for length in lengths]
        try:
            num_tokens = SETTLING_TOKENS
            for stream in streams:
                while len(next(stream).outputs[0].token_ids) < num_tokens:
                    pass
            start_s = llm.clock.now_s()
            num_tokens = SETTLING_TOKENS + num_microbatches // num_stages
            for stream in streams:
                while len(next(stream).outputs[0].token_ids) < num_tokens:
                    pass
            spans = llm.spans(start_s)
        finally:
            for stream in streams:
                stream.close()
    rows = {span.microbatch: span.num_rows for span in spans}
    by_place: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for microbatch, time_s in stage_times_s(spans).items():
        by_place[microbatch % num_stages].append((rows[microbatch], time_s))
    medians_s = [statistics.median(time_s for _, time_s in place) for _, place in sorted(by_place.items())]
    sizes = [round(statistics.median(size for size, _ in place)) for _, place in sorted(by_place.items())]
    spread = max(medians_s) / min(medians_s) - 1
    return (
        f"{num_stages:6d}  {'+'.join(map(str, sizes)):>16}  "
        f"{' '.join(f'{time_s * 1e3:.1f}' for time_s in medians_s):>24}  {spread:7.1%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--microbatches", type=int, default=200)
    args = parser.parse_args()
    print("stages        group sizes   medians per place, ms   spread")
    for num_stages in args.stages:
        print(measure(args.model, num_stages, args.requests, args.microbatches), flush=True)


if __name__ == "__main__":
    main()
