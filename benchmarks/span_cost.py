"""What the spans cost that every stage records all the time, as a share of a microbatch's time.

    python benchmarks/span_cost.py MODEL [--requests 32]

The cheapest stage there is judges: every span's cost is measured alone, and held against the shortest microbatches of a
real run, decodes of one request on each of the stages.
"""

from __future__ import annotations

import argparse
import time
from statistics import median

from stageline import LLM, SamplingParams
from stageline.clock import MonotonicClock
from stageline.timeline.recorder import DEFAULT_CAPACITY, Recorder
from stageline.timeline.span import Span

NUM_RECORDED = 200_000
NUM_REPETITIONS = 5


def span_s() -> float:
    """Seconds to read the clock, make a span and keep it, with the ring full; the best of some repetitions."""
    clock, recorder = MonotonicClock(), Recorder()
    times_s = []
    for _ in range(NUM_REPETITIONS):
        start_s = time.perf_counter()
        for number in range(NUM_RECORDED):
            now_s = clock.now_s()
            recorder.record(Span(0, number, "forward", now_s, clock.now_s(), 16, 16))
        times_s.append((time.perf_counter() - start_s) / NUM_RECORDED)
    assert recorder.num_overwritten > DEFAULT_CAPACITY
    return min(times_s)


def question_s(num_spans: int) -> float:
    """Seconds to take the newest so many spans from a full ring."""
    recorder = Recorder()
    for number in range(DEFAULT_CAPACITY + 1):
        recorder.record(Span(0, number, "forward", float(number), number + 1.0, 16, 16))
    times_s = []
    for _ in range(NUM_REPETITIONS):
        start_s = time.perf_counter()
        recorder.spans(since_s=float(DEFAULT_CAPACITY - num_spans))
        times_s.append(time.perf_counter() - start_s)
    return min(times_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=32, help="in the fuller of both runs")
    args = parser.parse_args()
    one_s = span_s()
    print(f"one span: {one_s * 1e6:.2f} µs; the newest 1,000 of a full ring: {question_s(1000) * 1e6:.0f} µs")
    with LLM(model=args.model, pipeline_parallel_size=2) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
        for num_requests in (1, args.requests):
            start_s = llm.clock.now_s()
            llm.generate([[index + 1] * 16 for index in range(num_requests)], params, use_tqdm=False)
            spans = llm.spans(start_s)
            for stage in range(2):
                mine = [span for span in spans if span.stage_index == stage]
                forwards = [span for span in mine if span.kind == "forward"]
                decode_s = median(span.duration_s for span in forwards if span.num_tokens == span.num_rows)
                cost_s = len(mine) / len(forwards) * one_s
                print(
                    f"{num_requests} requests, s{stage}: {len(mine) / len(forwards):.1f} spans per microbatch, "
                    f"{cost_s * 1e6:.1f} µs of {decode_s * 1e3:.2f} ms: {cost_s / decode_s:.2%}"
                )


if __name__ == "__main__":
    main()
