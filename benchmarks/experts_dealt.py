"""A rank's time for a layer's experts with a part of every one, and with whole ones dealt: measured, and as planned.

    python benchmarks/experts_dealt.py [--ranks 2] [--experts 64] [--chosen 8] [--hidden 2048] [--size 768]

bfloat16, one thread, our kernel. With parts all ranks do the same, so one is timed. Dealt, every rank is timed
for the same tokens, and the busiest counts, for others wait. Times are the thread's own CPU time, the least of a few
calls, means over batches of random tokens, whose choices are as good as even. What is planned is the ratio of what is
read, and of the rows that are computed (docs/cost_model.md, "Experts"): few tokens follow the first, many the second.
"""

from __future__ import annotations

import argparse
import time

import torch
from msgspec.structs import replace

from stageline.checkpoint.model_spec import MoeSpec
from stageline.cost.model_costs import ItemShape
from stageline.kernels.experts import Expert
from stageline.layers.moe import MoeMLP, Router

NUM_CALLS, NUM_BATCHES = 3, 40
TOKENS = (1, 2, 4, 8, 16, 64, 256)


def seconds_of(layer: MoeMLP, x: torch.Tensor) -> float:
    """The least CPU time of a few calls."""
    least = float("inf")
    for _ in range(NUM_CALLS):
        start = time.thread_time()
        layer(x)
        least = min(least, time.thread_time() - start)
    return least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("ranks", 2), ("experts", 64), ("chosen", 8), ("hidden", 2048), ("size", 768)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).bfloat16()

    ranks, hidden, size = arguments.ranks, arguments.hidden, arguments.size
    spec = MoeSpec(num_experts=arguments.experts, num_experts_per_token=arguments.chosen, intermediate_size=size)
    router, own, part = Router(random(spec.num_experts, hidden)), spec.num_experts // ranks, size // ranks
    in_parts = MoeMLP(
        replace(spec, intermediate_size=part), router,
        iter([Expert(random(2 * part, hidden), random(hidden, part)) for _ in range(spec.num_experts)]),
    )  # fmt: skip
    dealt = [
        MoeMLP(
            replace(spec, own_experts=(rank * own, (rank + 1) * own)), router,
            iter([Expert(random(2 * size, hidden), random(hidden, size)) for _ in range(own)]),
        )
        for rank in range(ranks)
    ]  # fmt: skip
    planned = ItemShape(num_experts=spec.num_experts, num_experts_per_token=spec.num_experts_per_token, is_dealt=True)
    print(f"{'tokens':>6}  {'in parts':>9}  {'dealt':>9}  {'ratio':>6}  {'planned: read':>13}  {'computed':>8}")
    for num_tokens in TOKENS:
        parts_s = dealt_s = 0.0
        for _ in range(NUM_BATCHES):
            x = torch.randn(num_tokens, hidden, generator=generator).bfloat16()
            parts_s += seconds_of(in_parts, x) / NUM_BATCHES
            dealt_s += max(seconds_of(layer, x) for layer in dealt) / NUM_BATCHES
        read = planned.experts_worth(num_tokens, ranks) * ranks / planned.num_experts_read(num_tokens)
        computed = planned.rows_worth(num_tokens, ranks) * ranks / (num_tokens * spec.num_experts_per_token)
        print(
            f"{num_tokens:>6}  {parts_s * 1e3:>6.2f} ms  {dealt_s * 1e3:>6.2f} ms  {dealt_s / parts_s:>5.2f}x  "
            f"{read:>12.2f}x  {computed:>7.2f}x"
        )


if __name__ == "__main__":
    main()
