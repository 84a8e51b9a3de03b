"""What the proposed partition is worth on a model with a heavy LM head, and what it costs to find one at a start.

    python benchmarks/partition.py [--model DIR] [--stages 2] [--concurrency 64] [--context 256]
    python benchmarks/partition.py --ready MODEL [--repetitions 5]

The first runs `stageline tune`: the default split and the proposal take turns in one run. Without --model it writes
random weights in the shape of Qwen2-0.5B into a temporary folder. The second compares times until ready, in turn: the
default split with `--pp-layer-partition auto` and no profile kept.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from random_checkpoint import RandomLlama

_START = """
import sys, time
start_s = time.monotonic()
from stageline import LLM
asked = sys.argv[3] if len(sys.argv) > 3 else None
with LLM(sys.argv[1], pipeline_parallel_size=int(sys.argv[2]), pp_layer_partition=asked) as llm:
    print("READY", time.monotonic() - start_s, ",".join(str(len(stage.layers)) for stage in llm.partition))
"""


def tune(model: Path, args: argparse.Namespace, folder: Path) -> None:
    result = folder / "result.json"
    command = [
        sys.executable, "-m", "stageline", "tune", str(model), "-pp", str(args.stages), "--output", str(result),
        "--concurrency", str(args.concurrency), "--context", str(args.context), "--repetitions", str(args.repetitions),
    ]  # fmt: skip
    subprocess.run(command, check=True)
    found = json.loads(result.read_text())
    pairs = [
        (predicted_s, measured_s)
        for partition in found["partitions"]
        for predicted_s, measured_s in zip(
            partition["predicted_stage_times_s"], partition["stage_times_s"], strict=True
        )
    ]
    worst = max(abs(measured_s / predicted_s - 1) for predicted_s, measured_s in pairs)
    splits = " -> ".join(",".join(map(str, partition["counts"])) for partition in found["partitions"])
    print(f"{splits}: throughput {found['gain']:.2f} times the default's; stage times within {worst:.1%} of predicted")


def ready_s(model: str, stages: int, partition: str | None, cache: str) -> tuple[float, str]:
    """Seconds from the import to a pipeline that is ready, and its layers per stage."""
    command = [sys.executable, "-c", _START, model, str(stages), *([partition] if partition else [])]
    environment = {**os.environ, "XDG_CACHE_HOME": cache}
    run = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    [line] = [line for line in run.stdout.splitlines() if line.startswith("READY")]
    _, taken_s, counts = line.split()
    return float(taken_s), counts


def compare_ready(model: str, args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as cache:
        ready_s(model, args.stages, None, cache)  # compiles the kernels, where the package has none
        times: dict[str | None, list[float]] = {None: [], "auto": []}
        chosen = []
        for _ in range(args.repetitions):
            for partition, taken in times.items():
                taken_s, counts = ready_s(model, args.stages, partition, cache)
                taken.append(taken_s)
                chosen += [counts] if partition else []
    default_s, auto_s = statistics.median(times[None]), statistics.median(times["auto"])
    print(f"ready after {default_s:.2f} s by default, {auto_s:.2f} s with auto ({auto_s - default_s:+.2f} s)")
    print(f"auto chose {', '.join(sorted(set(chosen)))} in {len(chosen)} starts")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--ready", metavar="MODEL")
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--repetitions", type=int, default=3)
    args = parser.parse_args()
    if args.ready:
        compare_ready(args.ready, args)
        return
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or RandomLlama().write(Path(folder) / "model")
        tune(model, args, Path(folder))


if __name__ == "__main__":
    main()
