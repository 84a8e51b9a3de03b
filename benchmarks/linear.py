"""Linear layers in bfloat16 on one core: this project's kernels, torch's F.linear and oneDNN over packed weights.

    python benchmarks/linear.py [--rows 1 8 32] [--seconds 0.4]

Shapes are SmolLM2-135M's: fused q/k/v, attention's output, fused gate and up, down, LM head. Weights are cold: enough
copies take turns to exceed the caches, as the layers of a model do. Candidates take turns too, and the best of many
short runs counts, in CPU time of this thread, so that other load on the machine hardly does. This core's limits are
measured in the same run: bfloat16 dot products on registers alone (the peak), a large matmul through oneDNN, and
reading memory. "gated" adds silu(gate) * up, which the others do not.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from stageline.kernels import load_kernels
from stageline.kernels.build import find_compiler, variant_flags
from stageline.kernels.gemm import Gemm

_SHAPES = {"qkv": (576, 960), "out": (576, 576), "gate_up": (576, 3072), "down": (1536, 576), "head": (576, 49152)}
_ROWS = [1, 2, 4, 8, 16, 32, 64, 128, 512, 2048]
_CANDIDATES = ("ours", "gated", "F.linear", "oneDNN")
_COLD_BYTES = 2**27
_NUM_DOTS, _DOT_FLOPS = 24 * 20_000, 64
_LIMITS = """
#include <immintrin.h>
#include <stdint.h>
extern "C" float dots() {
    __m512 sums[24];
    for (int j = 0; j < 24; j++) sums[j] = _mm512_set1_ps(j);
    __m512bh x = (__m512bh)_mm512_set1_epi32(1), y = (__m512bh)_mm512_set1_epi32(2);
    for (int i = 0; i < 20000; i++) {
#pragma GCC unroll 24
        for (int j = 0; j < 24; j++) sums[j] = _mm512_dpbf16_ps(sums[j], x, y);
        asm volatile("" : "+v"(x));
    }
    for (int j = 1; j < 24; j++) sums[0] = _mm512_add_ps(sums[0], sums[j]);
    return _mm512_reduce_add_ps(sums[0]);
}
extern "C" int32_t read(const char* p, int64_t size) {
    __m512i sums[4] = {};
    for (int64_t i = 0; i < size; i += 256)
        for (int j = 0; j < 4; j++) {
            sums[j] = _mm512_add_epi32(sums[j], _mm512_load_si512(p + i + 64 * j));
            _mm_prefetch(p + i + 64 * j + 8192, _MM_HINT_T0);
        }
    sums[0] = _mm512_add_epi32(sums[0], sums[1]);
    sums[2] = _mm512_add_epi32(sums[2], sums[3]);
    return _mm512_reduce_add_epi32(_mm512_add_epi32(sums[0], sums[2]));
}
"""


@dataclass(frozen=True)
class _Limits:
    register_flops_per_s: float
    matmul_flops_per_s: float
    read_bytes_per_s: float


def _best_s(runs: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """The shortest of many runs of each, which take turns for so long in all."""
    best = dict.fromkeys(runs, float("inf"))
    end_s = time.perf_counter() + seconds
    while True:
        for name, run in runs.items():
            start_s = time.thread_time()
            run()
            best[name] = min(best[name], time.thread_time() - start_s)
        if time.perf_counter() > end_s:
            return best


def _measure_limits(gemm: Gemm, seconds: float) -> _Limits:
    with tempfile.TemporaryDirectory() as directory:
        source, library = Path(directory) / "limits.cpp", Path(directory) / "limits.so"
        source.write_text(_LIMITS)
        flags = ["-O2", "-shared", "-fPIC", *variant_flags()["avx512"]]
        subprocess.run([find_compiler(), *flags, str(source), "-o", str(library)], check=True)
        limits = ctypes.CDLL(str(library))
    data = gemm.pack(torch.zeros(_COLD_BYTES // 2048, 1024, dtype=torch.bfloat16)).panels
    pointer, size = ctypes.c_void_p(data.data_ptr()), ctypes.c_int64(_COLD_BYTES)
    a, b = torch.randn(1024, 1024).bfloat16(), torch.randn(1024, 1024).bfloat16()
    runs = {"dots": limits.dots, "matmul": lambda: F.linear(a, b), "read": lambda: limits.read(pointer, size)}
    best = _best_s(runs, seconds)
    return _Limits(_NUM_DOTS * _DOT_FLOPS / best["dots"], 2 * 1024**3 / best["matmul"], _COLD_BYTES / best["read"])


def _candidates(
    gemm: Gemm, x: torch.Tensor, weights: list[torch.Tensor], is_gated: bool
) -> dict[str, Callable[[], object]]:
    """Each call of a candidate takes the next copy of the weight."""
    plain = itertools.cycle([gemm.pack(weight) for weight in weights])
    torch_weights = itertools.cycle(weights)
    reordered = itertools.cycle([torch.ops.mkldnn._reorder_linear_weight(weight) for weight in weights])
    runs: dict[str, Callable[[], object]] = {
        "ours": lambda: gemm.linear(x, next(plain)),
        "F.linear": lambda: F.linear(x, next(torch_weights)),
        "oneDNN": lambda: torch.ops.mkldnn._linear_pointwise(x, next(reordered), None, "none", [], ""),
    }
    if is_gated:
        gated = itertools.cycle([gemm.pack(weight, is_gated=True) for weight in weights])
        runs["gated"] = lambda: gemm.gated(x, next(gated))
    return runs


def _bench_shape(name: str, rows: list[int], seconds: float, gemm: Gemm, limits: _Limits) -> None:
    inputs, outputs = _SHAPES[name]
    weight = torch.randn(outputs, inputs).bfloat16()
    weights = [weight.clone() for _ in range(-(-_COLD_BYTES // weight.nbytes))]
    x = torch.randn(max(rows), inputs).bfloat16()
    for num_rows in rows:
        best = _best_s(_candidates(gemm, x[:num_rows], weights, name == "gate_up"), seconds)
        flops = 2.0 * num_rows * weight.numel()
        rates = [f"{flops / best[candidate] / 1e9:9.0f}" if candidate in best else " " * 9 for candidate in _CANDIDATES]
        read_bytes_per_s = weight.nbytes / best["ours"]
        columns = [
            f"{name:8}{inputs:5} x{outputs:6}{num_rows:6}",
            *rates,
            f"{flops / best['ours'] / limits.register_flops_per_s:8.0%}",
            f"{best['F.linear'] / best['ours']:9.1f}{best['oneDNN'] / best['ours']:9.1f}",
        ]
        if num_rows <= 8:
            columns.append(f"{read_bytes_per_s / 1e9:8.1f}{read_bytes_per_s / limits.read_bytes_per_s:7.0%}")
        print("".join(columns), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=_ROWS)
    parser.add_argument("--shapes", nargs="+", choices=_SHAPES, default=list(_SHAPES))
    parser.add_argument("--seconds", type=float, default=0.4, help="for each line")
    args = parser.parse_args()
    torch.set_num_threads(1)
    kernels = load_kernels("avx512")
    assert kernels is not None, "the kernels did not compile"
    limits = _measure_limits(kernels.gemm, 2.0)
    print(
        f"this core: {limits.register_flops_per_s / 1e9:.0f} GFLOP/s on registers, "
        f"{limits.matmul_flops_per_s / 1e9:.0f} GFLOP/s in a large matmul, "
        f"reads {limits.read_bytes_per_s / 1e9:.1f} GB/s"
    )
    rates = "".join(f"{candidate:>9}" for candidate in _CANDIDATES)
    print(f"{'':28}{'GFLOP/s':^36}{'ours:':>8}{'times':>18}")
    print(f"{'shape':22}{'rows':>6}{rates} of peak F.linear   oneDNN    GB/s of reading")
    with torch.inference_mode():
        for name in args.shapes:
            _bench_shape(name, args.rows, args.seconds, kernels.gemm, limits)


if __name__ == "__main__":
    main()
