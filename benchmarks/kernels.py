"""Each CPU kernel against torch and against what one core of this machine can do, measured in the same run.

    python benchmarks/kernels.py [--variant auto|avx512|avx2|portable] [--seconds 0.2]

One thread. Times are the thread's own CPU time, the tenth percentile of many calls that alternate with torch's, so a
busy neighbour shows little. Attention reads a new cache with each call, as consecutive layers do; the blocks lie in
random order, which is the worst case. Linear layers have a benchmark of their own (linear.py).
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle

import torch
import torch.nn.functional as F

from stageline import kernels
from stageline.attention.backend import AttentionMetadata, LayerCache
from stageline.attention.cpu_kernels import CpuKernelAttention
from stageline.attention.torch_paged import TorchPagedAttention
from stageline.checkpoint.model_spec import RopeSpec
from stageline.layers.activation import silu_and_mul
from stageline.layers.norm import RMSNorm
from stageline.layers.rotary import Rotary
from stageline.worker.device import zeros
from stageline.worker.leading_tokens import largest, leading_tokens

CPU = torch.device("cpu")
BLOCK_SIZE = 16
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INTERMEDIATE, VOCABULARY = 9, 3, 64, 576, 1536, 49152  # SmolLM2-135M


@dataclass(frozen=True)
class Case:
    """A kernel at work.

    Args:
        ours, torch: the same computation.
        num_bytes, num_flops: what it has to move and to compute; 0 for what is not its limit.
    """

    name: str
    ours: Callable[[], object]
    torch: Callable[[], object]
    num_bytes: int = 0
    num_flops: int = 0


def cpu_seconds(calls: list[Callable[[], object]], seconds: float) -> list[float]:
    """CPU time of each call, alternating between them for so long."""
    times: list[list[float]] = [[] for _ in calls]
    end = time.monotonic() + seconds * len(calls)
    while time.monotonic() < end or len(times[0]) < 5:
        for call, taken in zip(calls, times, strict=True):
            start = time.thread_time_ns()
            call()
            taken.append((time.thread_time_ns() - start) * 1e-9)
    return [sorted(taken)[len(taken) // 10] for taken in times]


def machine_limits(seconds: float) -> tuple[float, float]:
    """Returns: bytes/s that one thread reads from memory, and FLOP/s of its best bfloat16 product."""
    stream = torch.randn(2**25)
    x, weight = torch.randn(1024, 1024).bfloat16(), torch.randn(1024, 1024).bfloat16()
    read_s, product_s = cpu_seconds([lambda: stream.dot(stream), lambda: F.linear(x, weight)], seconds)
    return stream.numel() * 4 / read_s, 2 * 1024**3 / product_s


def with_choice(choice: str, make: Callable[[], Callable[[], object]]) -> Callable[[], object]:
    """What `make` gives while this variant is chosen; each call chooses it anew."""

    def call() -> object:
        os.environ["STAGELINE_KERNELS"] = choice
        kernels.library.cache_clear()
        return made()

    os.environ["STAGELINE_KERNELS"] = choice
    kernels.library.cache_clear()
    made = make()
    return call


def attention_case(name: str, variant: str, rows: list[tuple[int, int]], dtype: torch.dtype) -> Case:
    """rows: (new tokens, context) of each request; decodes first."""
    library = kernels.load_kernels(variant)
    assert library is not None, "no compiled kernels"
    num_blocks = [-(-context // BLOCK_SIZE) for _, context in rows]
    shape = (sum(num_blocks), KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    bytes_of_cache = 2 * torch.Size(shape).numel() * dtype.itemsize
    caches = []
    for _ in range(max(1, 2**27 // bytes_of_cache)):
        caches.append(LayerCache(zeros(shape, dtype, CPU), zeros(shape, dtype, CPU)))
        caches[-1].keys.normal_()
        caches[-1].values.normal_()
    tables = torch.randperm(shape[0]).int().split(num_blocks)
    block_tables = torch.nn.utils.rnn.pad_sequence(list(tables), batch_first=True)
    tokens = [count for count, _ in rows]
    contexts = [context for _, context in rows]
    metadata = AttentionMetadata(
        num_decode_rows=tokens.count(1),
        num_scheduled_tokens=tokens,
        num_computed_tokens=[context - count for count, context in rows],
        query_starts=torch.tensor([0, *tokens]).cumsum(0).int(),
        context_lens=torch.tensor(contexts).int(),
        block_tables=block_tables,
        slot_mapping=torch.zeros(sum(tokens), dtype=torch.int64),
        positions=torch.zeros(sum(tokens), dtype=torch.int64),
    )
    queries = torch.randn(sum(tokens), HEADS + 2 * KV_HEADS, HEAD_DIM).to(dtype)[:, :HEADS]
    calls = []
    for backend in (CpuKernelAttention(library), TorchPagedAttention(CPU)):
        layers = cycle(caches)
        calls.append(lambda b=backend, c=layers: b.attend(queries, metadata, next(c), HEAD_DIM**-0.5, None))
    num_pairs = sum(count * context - count * (count - 1) // 2 for count, context in rows)
    num_bytes = 2 * sum(contexts) * KV_HEADS * HEAD_DIM * dtype.itemsize
    return Case(name, *calls, num_bytes=num_bytes, num_flops=4 * HEADS * HEAD_DIM * num_pairs)


def attention_cases(variant: str) -> list[Case]:
    bf16, f32 = torch.bfloat16, torch.float32
    return [
        attention_case("attention: 1 decode of 1024, bf16", variant, [(1, 1024)], bf16),
        attention_case("attention: 32 decodes of 192, bf16", variant, [(1, 192)] * 32, bf16),
        attention_case("attention: 16 decodes of 1024, bf16", variant, [(1, 1024)] * 16, bf16),
        attention_case("attention: 16 decodes of 1024, f32", variant, [(1, 1024)] * 16, f32),
        attention_case("attention: prompt of 128, bf16", variant, [(128, 128)], bf16),
        attention_case("attention: prompt of 512, bf16", variant, [(512, 512)], bf16),
        attention_case("attention: 512 of 4096, bf16", variant, [(512, 4096)], bf16),
        attention_case("attention: prompt of 512, f32", variant, [(512, 512)], f32),
    ]


def row_cases(variant: str, num_rows: int) -> list[Case]:
    """Kernels that handle each row by itself; everything is in the cache, as after the layer before."""
    x, residual = torch.randn(2, num_rows, HIDDEN).bfloat16().unbind()
    gate_up = torch.randn(num_rows, 2 * INTERMEDIATE).bfloat16()
    logits = torch.randn(num_rows, VOCABULARY)
    weight = torch.ones(HIDDEN, dtype=torch.bfloat16)

    def both(name: str, make: Callable[[], Callable[[], object]], num_bytes: int) -> Case:
        return Case(f"{name}, {num_rows} rows", with_choice(variant, make), with_choice("torch", make), num_bytes)

    def make_norm() -> Callable[[], object]:
        norm = RMSNorm(weight, 1e-5)
        return lambda: norm(x, residual)

    return [
        both("norm of a sum, bf16", make_norm, 4 * x.nbytes),
        both("silu and mul, bf16", lambda: lambda: silu_and_mul(gate_up), gate_up.nbytes * 3 // 2),
        both("largest logit, f32", lambda: lambda: largest(logits), logits.nbytes),
        both("50 leading logits, f32", lambda: lambda: leading_tokens(logits, 50), logits.nbytes),
        rotate_case(variant, num_rows),
    ]


def rotate_case(variant: str, num_rows: int) -> Case:
    library = kernels.load_kernels(variant)
    assert library is not None
    heads = torch.randn(num_rows, HEADS + 2 * KV_HEADS, HEAD_DIM).bfloat16()
    shape = (num_rows, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    cache = LayerCache(torch.zeros(shape).bfloat16(), torch.zeros(shape).bfloat16())
    numbers = torch.arange(num_rows)
    metadata = AttentionMetadata(
        num_decode_rows=num_rows,
        num_scheduled_tokens=[1] * num_rows,
        num_computed_tokens=[0] * num_rows,
        query_starts=torch.arange(num_rows + 1).int(),
        context_lens=torch.ones(num_rows).int(),
        block_tables=numbers.int().unsqueeze(1),
        slot_mapping=numbers * BLOCK_SIZE,
        positions=numbers,
    )
    rotary = Rotary(RopeSpec(), HEAD_DIM, num_rows, CPU)
    ours, plain = CpuKernelAttention(library), TorchPagedAttention(CPU)
    return Case(
        f"rotate and store, bf16, {num_rows} rows",
        lambda: ours.rotate_and_store(heads, rotary, metadata, cache),
        lambda: plain.rotate_and_store(heads, rotary, metadata, cache),
        num_bytes=2 * heads.nbytes,
    )


def report(case: Case, seconds: float, bytes_per_s: float, flops_per_s: float) -> None:
    ours_s, torch_s = cpu_seconds([case.ours, case.torch], seconds)
    moved, computed = case.num_bytes / ours_s, case.num_flops / ours_s
    limit = max(moved / bytes_per_s, computed / flops_per_s)
    print(
        f"{case.name:42} {ours_s * 1e6:9.1f} us {moved / 1e9:7.1f} GB/s {computed / 1e9:7.1f} GFLOP/s "
        f"{limit:6.0%} of the limit   torch {torch_s * 1e6:9.1f} us   {torch_s / ours_s:5.1f} times faster",
        flush=True,
    )


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", default="auto", choices=("auto", "avx512", "avx2", "portable"))
    parser.add_argument("--seconds", type=float, default=0.2, help="for each call that is measured")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    bytes_per_s, flops_per_s = machine_limits(5 * args.seconds)
    library = kernels.load_kernels(args.variant)
    assert library is not None, "no compiled kernels: the log says why"
    print(f"variant {library.variant}; one thread: {bytes_per_s / 1e9:.1f} GB/s, {flops_per_s / 1e9:.0f} GFLOP/s bf16")
    for case in attention_cases(args.variant):
        report(case, args.seconds, bytes_per_s, flops_per_s)
    for num_rows in (1, 32, 512):
        for case in row_cases(args.variant, num_rows):
            report(case, args.seconds, bytes_per_s, flops_per_s)


if __name__ == "__main__":
    main()
