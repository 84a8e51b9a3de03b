"""A layer's experts by this project's kernel and by torch, expert after expert, at several numbers of tokens.

    python benchmarks/experts.py [--experts 64] [--chosen 8] [--hidden 2048] [--size 768]

bfloat16, one thread; the shape is that of Qwen3-30B-A3B with half its experts, by default. Times are the thread's own
CPU time, the least of several calls that alternate, so a busy neighbour shows little.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch

from stageline.checkpoint.model_spec import MoeSpec
from stageline.kernels.experts import Expert
from stageline.layers.moe import MoeMLP, Router, TorchExperts, choose_experts

NUM_CALLS = 5
TOKENS = (1, 4, 16, 64, 256)


def seconds_of(calls: list[Callable[[], object]]) -> list[float]:
    """The least CPU time of each."""
    least = [float("inf")] * len(calls)
    for _ in range(NUM_CALLS):
        for place, call in enumerate(calls):
            start = time.thread_time()
            call()
            least[place] = min(least[place], time.thread_time() - start)
    return least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("experts", 64), ("chosen", 8), ("hidden", 2048), ("size", 768)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).bfloat16()

    hidden, size = arguments.hidden, arguments.size
    spec = MoeSpec(
        num_experts=arguments.experts, num_experts_per_token=arguments.chosen, intermediate_size=size
    )
    experts = [Expert(random(2 * size, hidden), random(hidden, size)) for _ in range(spec.num_experts)]
    router = Router(random(spec.num_experts, hidden))
    ours, others = MoeMLP(spec, router, iter(experts)), TorchExperts(spec, experts, None)
    print(f"{'tokens':>6}  {'experts':>7}  {'kernel':>9}  {'torch':>9}  {'ratio':>6}  {'read':>10}  {'computed':>13}")
    for num_tokens in TOKENS:
        x = torch.randn(num_tokens, hidden, generator=generator).bfloat16()
        logits = router(x)
        num_active = choose_experts(spec, logits, None)[0].unique().numel()
        ours_s, torch_s = seconds_of([partial(ours, x), partial(others, x, logits, None, None)])
        weights = 3 * hidden * size
        print(
            f"{num_tokens:>6}  {num_active:>7}  {ours_s * 1e3:>6.2f} ms  {torch_s * 1e3:>6.2f} ms  "
            f"{torch_s / ours_s:>5.1f}x  {num_active * weights * 2 / ours_s / 1e9:>5.1f} GB/s  "
            f"{num_tokens * arguments.chosen * weights * 2 / ours_s / 1e9:>5.0f} GFLOP/s"
        )


if __name__ == "__main__":
    main()
