"""One table: Stageline, vLLM, llama.cpp and the machine's limit, side by side in one run.

    python benchmarks/compare.py MODEL.gguf [--vllm-python VENV/bin/python --vllm-model DIR]
        [--llama-server PATH --rpc-server PATH] [--repetitions 3]

Every side is started once; then all sides run each workload in turn, A B C A B C ..., the others stopped meanwhile, and
medians are compared. Workloads: `throughput` (64 prompts of 128 random tokens, 128 output tokens each), `prompt` (one
prompt of 4,096 tokens, one output token: its time to first token), `single` (one request: time per output token).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from machine_limit import matmul_flops_per_s, workload_flops

_SIDES = Path(__file__).parent / "sides"

WORKLOADS: dict[str, dict[str, int]] = {
    "throughput": {"num_prompts": 64, "input_len": 128, "output_len": 128},
    "prompt": {"num_prompts": 1, "input_len": 4096, "output_len": 1},
    "single": {"num_prompts": 1, "input_len": 16, "output_len": 129},
}


@dataclass
class Side:
    """A process that runs workloads when asked; stopped in between."""

    name: str
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    results: list[dict[str, Any]] = field(default_factory=list)

    def start(self) -> None:
        self._process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, **self.environment},
        )
        self.ready_s = self._answer()["ready_s"]
        self._signal(signal.SIGSTOP)

    def run(self, workload: dict[str, int]) -> dict[str, Any]:
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(workload) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        self._signal(signal.SIGSTOP)
        asked = workload["num_prompts"] * workload["output_len"]
        if answer["num_tokens"] != asked:
            raise SystemExit(f"{self.name} generated {answer['num_tokens']} tokens instead of {asked}")
        return answer

    def stop(self) -> None:
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("SIDE "):
                return dict(json.loads(line.removeprefix("SIDE ")))
        raise SystemExit(f"{self.name} ended: {' '.join(self.command)}")

    def _signal(self, number: int) -> None:
        """To the side and everything it started; workers have process groups of their own."""
        import psutil

        try:
            root = psutil.Process(self._process.pid)
            for process in [root, *root.children(recursive=True)]:
                process.send_signal(number)
        except psutil.NoSuchProcess:
            pass


def stageline(name: str, model: str, **settings: Any) -> Side:
    command = [sys.executable, str(_SIDES / "stageline_side.py"), model, "--settings", json.dumps(settings)]
    return Side(name, command)


def vllm(name: str, python: str, model: str, cores: str, **settings: Any) -> Side:
    command = [python, str(_SIDES / "vllm_side.py"), model, "--settings", json.dumps(settings)]
    return Side(name, command, {"VLLM_CPU_OMP_THREADS_BIND": cores})


def llamacpp(name: str, workload: str, args: argparse.Namespace, rpc_layers: str = "", ubatch: int = 512) -> Side:
    """llama-server alone on both cores, or over RPC servers of one thread each when their layers are given."""
    slots = {"throughput": ["-np", "64", "-c", "20480"], "prompt": ["-np", "1", "-c", "4352"]}
    settings = [*slots.get(workload, ["-np", "1", "-c", "256"]), "-b", "2048", "-ub", str(ubatch)]
    settings += ["-t", "1" if rpc_layers else "2", "--cache-ram", "0", "--no-ui", *args.llama_settings.split()]
    command = [sys.executable, str(_SIDES / "llamacpp_side.py"), args.llama_model or args.model]
    command += ["--llama-server", args.llama_server, "--settings", json.dumps(settings)]
    if rpc_layers:
        command += ["--rpc-server", args.rpc_server, "--layers", rpc_layers]
    return Side(name, command)


def make_llamacpp_sides(workload: str, args: argparse.Namespace) -> list[Side]:
    """One side for each `-ub` over RPC servers, and llama-server alone."""
    sides = []
    if args.rpc_server:
        for ubatch in args.llama_ubatch:
            sides.append(llamacpp(f"llama.cpp RPC x2, ubatch {ubatch}", workload, args, args.llama_layers, ubatch))
    return [*sides, llamacpp("llama.cpp alone, both cores", workload, args)]


def make_sides(workload: str, args: argparse.Namespace) -> list[Side]:
    """The settings worth comparing for a workload; every peer at its best setting as well as its default."""
    two = {"pipeline_parallel_size": 2, "pp_layer_partition": args.partition, **json.loads(args.settings)}
    one_thread = {"pipeline_parallel_size": 1, "threads_per_stage": 1, **json.loads(args.settings)}
    sides = [stageline("stageline pp=2", args.model, **two)]
    if workload != "throughput":
        sides.append(stageline("stageline pp=1, one thread", args.model, **one_thread))
    if args.vllm_python:
        best = {"throughput": 2048, "prompt": 512, "single": 2048}[workload]
        peer = (args.vllm_python, args.vllm_model)
        sides.append(
            vllm(f"vllm pp=2, budget {best}", *peer, "0|1", pipeline_parallel_size=2, max_num_batched_tokens=best)
        )
        if workload == "throughput":
            sides.append(vllm("vllm pp=2, default", *peer, "0|1", pipeline_parallel_size=2))
            sides.append(vllm("vllm pp=1, both cores", *peer, "0-1", max_num_batched_tokens=2048))
    return [*sides, *(make_llamacpp_sides(workload, args) if args.llama_server else [])]


def measure(workload: str, args: argparse.Namespace) -> None:
    sides = make_sides(workload, args)
    limits = []
    started: list[Side] = []
    try:
        for side in sides:
            started.append(side)
            side.start()
            print(f"  {side.name}: ready after {side.ready_s:.1f} s", flush=True)
        for _ in range(args.repetitions):
            limits.append(matmul_flops_per_s(sorted(os.sched_getaffinity(0))[:2]))
            for side in sides:
                side.results.append(side.run(WORKLOADS[workload]))
                print(f"  {side.name}: {side.results[-1]}", flush=True)
    finally:
        for side in started:
            side.stop()
    report(workload, sides, statistics.median(limits), args.model)


def report(workload: str, sides: list[Side], flops_per_s: float, model: str) -> None:
    shape = WORKLOADS[workload]
    limit_s = workload_flops(model, **shape) / flops_per_s
    print(f"\n{workload}: {shape}, medians of {len(sides[0].results)} runs")
    elapsed = {side.name: statistics.median(result["elapsed_s"] for result in side.results) for side in sides}
    ours = elapsed[sides[0].name]
    num_tokens = shape["num_prompts"] * shape["output_len"]
    print(f"{'side':32s} {'seconds':>8s} {'output tokens/s':>16s} {'ours is faster by':>18s} {'ready s':>8s}")
    for side in sides:
        seconds = elapsed[side.name]
        print(f"{side.name:32s} {seconds:8.2f} {num_tokens / seconds:16.1f} {seconds / ours:18.2f} {side.ready_s:8.1f}")
    print(f"{'limit (bf16 matmul, both cores)':32s} {limit_s:8.2f} {num_tokens / limit_s:16.1f} {limit_s / ours:18.2f}")
    bubbles = ", ".join(f"s{k} {fraction:.1%}" for k, fraction in enumerate(sides[0].results[-1]["bubble_fractions"]))
    print(f"bf16 matmul of both cores: {flops_per_s / 1e9:.0f} GFLOP/s; bubbles of {sides[0].name}: {bubbles}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="the GGUF file, for Stageline")
    parser.add_argument("--workload", choices=[*WORKLOADS, "all"], default="throughput")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--partition", default=None, help="Stageline's --pp-layer-partition at two stages")
    parser.add_argument("--settings", default="{}", help="more of Stageline's settings, as JSON")
    parser.add_argument("--vllm-python", help="interpreter of a virtual environment with vLLM's CPU build")
    parser.add_argument("--vllm-model", help="the same model as a Hugging Face directory in bfloat16")
    parser.add_argument("--llama-server", help="llama.cpp's llama-server")
    parser.add_argument("--rpc-server", help="llama.cpp's ggml-rpc-server, of the same build")
    parser.add_argument("--llama-model", help="another GGUF file for llama.cpp, such as the same weights in bfloat16")
    parser.add_argument("--llama-layers", default="17,14", help="layers per RPC server, the output layer with the last")
    parser.add_argument("--llama-ubatch", type=int, nargs="+", default=[512], help="-ub over RPC, a side for each")
    parser.add_argument("--llama-settings", default="", help="more of llama-server's flags")
    args = parser.parse_args()
    if args.rpc_server and not args.llama_server:
        parser.error("--rpc-server needs --llama-server")
    for workload in WORKLOADS if args.workload == "all" else [args.workload]:
        measure(workload, args)


if __name__ == "__main__":
    main()
