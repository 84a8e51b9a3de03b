"""The physical limit: the bfloat16 matmul rate that all cores reach together, and what a workload costs in FLOPs.

    python benchmarks/machine_limit.py [--cores 2]

One process per core, one thread each, bound, all at once: a matmul of [1024, 1024] by [1024, 4096], through oneDNN. A
workload costs two FLOPs per weight and token: every token that goes through a layer, every sampled token through the LM
head. Attention's own products (a few per cent here) are not counted, which makes the limit stricter.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from multiprocessing.synchronize import Barrier

from stageline.checkpoint import open_checkpoint

_ROWS, _INNER, _COLUMNS = 1024, 1024, 4096


def _matmul_rate(core: int, barrier: Barrier, duration_s: float, rates: multiprocessing.Queue) -> None:  # type: ignore[type-arg]
    os.sched_setaffinity(0, [core])
    import torch

    torch.set_num_threads(1)
    a = torch.randn(_ROWS, _INNER).to(torch.bfloat16)
    b = torch.randn(_COLUMNS, _INNER).to(torch.bfloat16)
    torch.nn.functional.linear(a, b)
    barrier.wait()
    start_s, count = time.perf_counter(), 0
    while time.perf_counter() - start_s < duration_s:
        torch.nn.functional.linear(a, b)
        count += 1
    rates.put(count * 2 * _ROWS * _INNER * _COLUMNS / (time.perf_counter() - start_s))


def matmul_flops_per_s(cores: list[int], duration_s: float = 2.0) -> float:
    """FLOP/s of all cores together."""
    context = multiprocessing.get_context("spawn")
    barrier, rates = context.Barrier(len(cores)), context.Queue()
    children = [context.Process(target=_matmul_rate, args=(core, barrier, duration_s, rates)) for core in cores]
    for child in children:
        child.start()
    total = sum(rates.get(timeout=120) for _ in cores)
    for child in children:
        child.join()
    return total


def workload_flops(model: str, num_prompts: int, input_len: int, output_len: int) -> float:
    """FLOPs of the weights' matmuls: the last output token is not fed back, only sampled tokens go through the head."""
    spec = open_checkpoint(model).spec
    attention = spec.hidden_size * spec.head_dim * (2 * spec.num_heads + 2 * spec.num_kv_heads)
    layers = spec.num_layers * (attention + 3 * spec.hidden_size * spec.intermediate_size)
    head = spec.vocab_size * spec.hidden_size
    return 2.0 * num_prompts * ((input_len + output_len - 1) * layers + output_len * head)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[: args.cores]
    print(f"bf16 matmul on {len(cores)} cores together: {matmul_flops_per_s(cores) / 1e9:.0f} GFLOP/s")


if __name__ == "__main__":
    main()
