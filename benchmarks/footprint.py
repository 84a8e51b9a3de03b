"""What a loaded pipeline costs before it does anything: time to ready, resident memory, CPU time while idle.

    python benchmarks/footprint.py MODEL [--stages 2] [--idle-s 10]

One row per process. Resident memory is the operating system's figure, the shared libraries' pages included; `over` is
what it has above the stage's weights and KV cache.
"""

from __future__ import annotations

import argparse
import os
import threading
import time

import psutil

from stageline import LLM, SamplingParams
from stageline.engine.startup_table import format_bytes

KV_CACHE_BYTES = 256 * 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--idle-s", type=float, default=10.0)
    args = parser.parse_args()
    start_s = time.perf_counter()
    llm = LLM(args.model, pipeline_parallel_size=args.stages, kv_cache_memory=f"{KV_CACHE_BYTES}")
    with llm:
        print(f"ready after {time.perf_counter() - start_s:.2f} s")
        # Long enough that every block of the KV cache has been written once.
        num_tokens = llm.kv_plan.num_tokens
        prompts = [[index % 1000 + 3] * 1000 for index in range(-(-num_tokens // 1000))]
        llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True), use_tqdm=False)
        engine = psutil.Process(os.getpid())
        processes = [engine, *sorted(engine.children(), key=lambda child: child.create_time())]
        before = [sum(process.cpu_times()[:2]) for process in processes]
        threading.Event().wait(args.idle_s)
        for index, (process, earlier) in enumerate(zip(processes, before, strict=True)):
            cpu_fraction = (sum(process.cpu_times()[:2]) - earlier) / args.idle_s
            resident = process.memory_info().rss
            row = f"idle CPU {cpu_fraction:.2%}, resident {format_bytes(resident)}"
            if index == 0:
                print(f"engine: {row}")
                continue
            weights, kv = llm.stage_reports[index - 1].weight_bytes, llm.kv_plan.stages[index - 1].used_bytes
            over = format_bytes(resident - weights - kv)
            print(f"s{index - 1}: {row} = weights {format_bytes(weights)} + KV {format_bytes(kv)} + over {over}")


if __name__ == "__main__":
    main()
