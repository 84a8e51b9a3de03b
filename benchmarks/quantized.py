"""Weights that stay quantised beside bfloat16: kernels, tokens per second of one sequence, perplexity, memory.

    python benchmarks/quantized.py MODEL.gguf [--parts kernels decode perplexity] [--peer-tokens-per-s 124]

One thread per stage. Kernels: one row of x reads matrices that lie in no cache (GB/s of packed bytes, beside what a
thread can read); many rows compute (GFLOP/s, beside the bfloat16 layer with the same rows). Decoding: one greedy
sequence, the best of several runs, both sides alternating. Perplexity: of topics of Python's own documentation, which
every Python carries (pydoc_data.topics), in pieces of 1,000 tokens, against the same file made floating-point.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import time
from collections.abc import Callable
from pydoc_data.topics import topics

import torch

from stageline import LLM, SamplingParams, kernels
from stageline.checkpoint import open_checkpoint, stage_weight_bytes
from stageline.kernels.huge_pages import HugePages
from stageline.kernels.quantized import BLOCK, Kind, QuantizedKernels, QuantizedMatrix, QuantizedProduct
from stageline.layers.linear import Linear

ROWS, COLUMNS = 576, 1536
CACHE_BYTES = 2**26
KIND_OF_TYPE = {
    "Q4_0": Kind.FOUR_BITS,
    "Q4_1, Q4_K": Kind.FOUR_BITS_MINIMUM,
    "Q8_0": Kind.EIGHT_BITS,
    "Q6_K": Kind.EIGHT_BITS_HALVES,
}
MANY_ROWS = (4, 8, 16, 32, 128, 512)
TOPICS = ("import", "with", "exceptions", "naming", "debugger", "lambda")
PIECE_TOKENS, PIECES = 1000, 6


def best_s(call: Callable[[], object], seconds: float = 0.3) -> float:
    """Shortest wall time of a call."""
    shortest, end = math.inf, time.monotonic() + seconds
    while time.monotonic() < end:
        start = time.perf_counter()
        call()
        shortest = min(shortest, time.perf_counter() - start)
    return shortest


def random_matrix(kind: Kind, memory: HugePages) -> QuantizedMatrix:
    matrix = QuantizedMatrix.empty(kind, ROWS, COLUMNS, memory)
    numbers = torch.randint(0, 16 if kind.is_four_bits else 256, (ROWS, COLUMNS), dtype=torch.uint8)
    matrix.pack_rows(0, numbers, torch.rand(ROWS, COLUMNS // BLOCK, kind.num_scales))
    return matrix


def copies(matrix: QuantizedMatrix, memory: HugePages) -> list[QuantizedMatrix]:
    """So many that they fit into no cache."""

    def copied(tensor: torch.Tensor) -> torch.Tensor:
        return memory.empty(tuple(tensor.shape), tensor.dtype).copy_(tensor)

    return [
        dataclasses.replace(matrix, numbers=copied(matrix.numbers), scales=copied(matrix.scales))
        for _ in range(-(-CACHE_BYTES // matrix.num_bytes))
    ]


def measure_kernels() -> None:
    torch.set_num_threads(1)
    library = kernels.load_kernels("auto")
    if library is None:
        raise SystemExit("there are no compiled kernels here; the log says why")
    stream = torch.ones(2**27, dtype=torch.uint8).view(torch.int64)
    stream_rate = stream.numel() * 8 / best_s(stream.max)
    print(
        f"kernels, {library.variant}, one thread; [{ROWS}, {COLUMNS}] matrices; it reads {stream_rate / 1e9:.1f} GB/s"
    )
    dense = Linear(torch.randn(ROWS, COLUMNS).bfloat16())
    header = "".join(f"{f'{rows} rows':>10}" for rows in MANY_ROWS)
    print(f"{'':12}{'1 row GB/s':>12}{'of read':>9}{header}   GFLOP/s")
    print(f"{'bfloat16':12}{'':21}" + "".join(f"{flops_per_s(dense, rows) / 1e9:10.0f}" for rows in MANY_ROWS))
    for name, kind in KIND_OF_TYPE.items():
        print(f"{name:12}" + measure_kind(kind, library.quantized, stream_rate))


def measure_kind(kind: Kind, functions: QuantizedKernels, stream_rate: float) -> str:
    memory = HugePages()
    matrices = copies(random_matrix(kind, memory), memory)
    products = [QuantizedProduct(functions, [matrix]) for matrix in matrices]
    x = torch.randn(1, COLUMNS).bfloat16()
    once_s = best_s(lambda: [product.linear(x, x.dtype) for product in products]) / len(products)
    rate = matrices[0].num_bytes / once_s
    flops = [flops_per_s(lambda many: products[0].linear(many, many.dtype), rows) for rows in MANY_ROWS]
    return f"{rate / 1e9:12.1f}{rate / stream_rate:9.0%}" + "".join(f"{value / 1e9:10.0f}" for value in flops)


def flops_per_s(multiply: Callable[[torch.Tensor], torch.Tensor], rows: int) -> float:
    x = torch.randn(rows, COLUMNS).bfloat16()
    return 2 * rows * ROWS * COLUMNS / best_s(lambda: multiply(x), 0.1)


STAGES_AND_THREADS = ((1, 1), (1, 2), (2, 1))


def open_llm(
    model: str, quantization: str, stages: int, executor: str = "multi_process", threads_per_stage: int = 1
) -> LLM:
    return LLM(
        model,
        quantization=quantization,
        pipeline_parallel_size=stages,
        threads_per_stage=threads_per_stage,
        distributed_executor_backend=executor,
        max_model_len=PIECE_TOKENS + 24,
        kv_cache_memory="128MiB",
        dtype="bfloat16",
    )


def measure_decode(model: str, peer_tokens_per_s: float, runs: int, num_tokens: int) -> None:
    """The rate after the first token, so that the prompt does not count."""
    greedy = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    print(f"decoding one sequence, {num_tokens} tokens, best of {runs}, tokens/s (peer: {peer_tokens_per_s:.0f})")
    for stages, threads in STAGES_AND_THREADS:
        rates = {"none": 0.0, "int8": 0.0}
        with (
            open_llm(model, "none", stages, threads_per_stage=threads) as dense,
            open_llm(model, "int8", stages, threads_per_stage=threads) as kept,
        ):
            for _ in range(runs):
                for name, llm in (("none", dense), ("int8", kept)):
                    [output] = llm.generate(["Once upon a time"], greedy, use_tqdm=False)
                    between_s = output.outputs[0].timings.inter_token_s
                    rates[name] = max(rates[name], len(between_s) / sum(between_s))
        dense_rate, kept_rate = rates["none"], rates["int8"]
        print(
            f"  stages {stages}, threads per stage {threads}: bfloat16 {dense_rate:.1f}, int8 {kept_rate:.1f} "
            f"({kept_rate / dense_rate:.2f} times bfloat16, {kept_rate / peer_tokens_per_s:.2f} times the peer)"
        )


def measure_perplexity(model: str) -> None:
    values = {}
    for name in ("none", "int8"):
        with open_llm(model, name, 1, "in_process") as llm:
            token_ids = llm.tokenizer.encode("\n".join(topics[topic] for topic in TOPICS))
            pieces = [token_ids[i * PIECE_TOKENS : (i + 1) * PIECE_TOKENS] for i in range(PIECES)]
            pieces = [piece for piece in pieces if len(piece) > 1]
            values[name] = perplexity(llm, pieces)
    num_tokens = sum(map(len, pieces))
    print(
        f"perplexity of {num_tokens:,} tokens: bfloat16 {values['none']:.4f}, int8 {values['int8']:.4f}, "
        f"ratio {values['int8'] / values['none']:.4f}"
    )


def perplexity(llm: LLM, pieces: list[list[int]]) -> float:
    logprobs = []
    for output in llm.generate(pieces, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False):
        assert output.prompt_logprobs is not None
        told = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
        logprobs += [of_token[token_id].logprob for token_id, of_token in told if of_token is not None]
    return math.exp(-sum(logprobs) / len(logprobs))


def print_memory(model: str) -> None:
    checkpoint = open_checkpoint(model)
    layers = range(checkpoint.spec.num_layers)
    dense, kept = (stage_weight_bytes(checkpoint, layers, True, True, 2, keeps) for keeps in (False, True))
    print(f"weights in memory: bfloat16 {dense:,} bytes, int8 {kept:,} bytes ({kept / dense:.2f} of it)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parts = ("kernels", "decode", "perplexity")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--peer-tokens-per-s", type=float, default=124.0, help="llama.cpp, Q4_1, two threads")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--num-tokens", type=int, default=128)
    args = parser.parse_args()
    print_memory(args.model)
    if "kernels" in args.parts:
        measure_kernels()
    if "perplexity" in args.parts:
        measure_perplexity(args.model)
    if "decode" in args.parts:
        measure_decode(args.model, args.peer_tokens_per_s, args.runs, args.num_tokens)


if __name__ == "__main__":
    main()
