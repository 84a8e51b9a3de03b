"""How empty the pipeline runs in steady decode: each stage's bubble fraction, by number of requests.

    python benchmarks/steady_decode.py MODEL [--requests 16 32 64] [--partition 18,12]

All requests are alike and run at once; the window measured begins when the last prompt is computed and ends when the
first request finishes, so that every microbatch in it is full. One row per number of requests.
"""

from __future__ import annotations

import argparse
import random

from stageline import LLM, SamplingParams
from stageline.timeline.analysis import analyse

INPUT_LEN, OUTPUT_LEN = 128, 160


def measure(llm: LLM, num_requests: int) -> tuple[list[float], float]:
    """Returns: bubble fraction of each stage, and output tokens per second in the window."""
    numbers = random.Random(num_requests)
    prompts = [[numbers.randrange(1000, 40000) for _ in range(INPUT_LEN)] for _ in range(num_requests)]
    start_s = llm.clock.now_s()
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=OUTPUT_LEN, ignore_eos=True), False)
    timings = [output.outputs[0].timings for output in outputs]
    first_s = max(timing.first_token_s or 0.0 for timing in timings)
    last_s = min(timing.finished_s or 0.0 for timing in timings)
    num_tokens = sum(sum(first_s < time_s <= last_s for time_s in timing.token_times_s) for timing in timings)
    report = analyse(llm.spans(start_s), llm.config.pipeline_parallel_size, first_s, last_s)
    return [stage.bubble_fraction for stage in report.stages], num_tokens / (last_s - first_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--partition", default=None)
    parser.add_argument("--requests", type=int, nargs="+", default=[16, 32, 64])
    args = parser.parse_args()
    settings = {"pipeline_parallel_size": args.stages, "pp_layer_partition": args.partition}
    with LLM(args.model, dtype="bfloat16", enable_prefix_caching=False, **settings) as llm:
        measure(llm, max(args.requests))
        for num_requests in args.requests:
            bubbles, tokens_per_s = measure(llm, num_requests)
            row = ", ".join(f"s{index} {fraction:.1%}" for index, fraction in enumerate(bubbles))
            print(f"{num_requests:4d} requests: bubbles {row}; {tokens_per_s:.0f} output tokens/s")


if __name__ == "__main__":
    main()
