"""CPU time of an engine that has nothing to do: its process, its stages, and the client's.

    python benchmarks/idle_engine.py MODEL [--stages 2] [--seconds 10]

Prints each process's share of one core over the interval, in which it sends some beats and pings per
--heartbeat-timeout-s.
"""

from __future__ import annotations

import argparse
import asyncio

import psutil

from stageline import AsyncLLM, SamplingParams
from stageline.config.engine_config import EngineConfig


async def measure(model: str, num_stages: int, interval_s: float) -> None:
    llm = await AsyncLLM.start(EngineConfig(model=model, pipeline_parallel_size=num_stages))
    try:
        async for _ in llm.generate("Once upon a time", SamplingParams(max_tokens=32)):
            pass
        this = psutil.Process()
        [engine] = this.children()
        stages = sorted(engine.children(), key=lambda process: process.create_time())
        processes = {"client": this, "engine": engine} | {f"stage {i}": stage for i, stage in enumerate(stages)}
        before_s = {name: _cpu_s(process) for name, process in processes.items()}
        await asyncio.sleep(interval_s)
        print(f"idle for {interval_s:g} s, share of one core:")
        for name, process in processes.items():
            print(f"  {name:8} {(_cpu_s(process) - before_s[name]) / interval_s:8.3%}")
    finally:
        await llm.close()


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=10.0)
    args = parser.parse_args()
    asyncio.run(measure(args.model, args.stages, args.seconds))
