"""How far the planner's formula for tokens per second is from a simulation with the real scheduler, layout by layout.

    python benchmarks/layouts_simulated.py

Both ask the same cost model for a microbatch's time. The formula prices prompts as microbatches of their own; the
scheduler mixes them with decodes, which costs less, and requests have to queue, which costs more.
"""

from __future__ import annotations

import contextlib
import io
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from stageline.cli.main import main as stageline
from stageline.config.plan_config import PlanConfig
from stageline.cost.model_costs import model_costs
from stageline.planner.cluster import read_cluster
from stageline.planner.known_models import find_model
from stageline.planner.search import search

H100 = "nodes: [{device: h100-sxm, devices_per_node: 8, count: 2, link: nvlink4}]\nnetwork: infiniband-ndr\n"
L40S = "nodes: [{device: l40s, count: 4}]\nnetwork: ethernet-10g\n"
ROUNDS = 5


@dataclass(frozen=True)
class Case:
    """A layout under a load of `concurrency` requests, always."""

    model: str
    cluster: str
    tensor_parallel_size: int
    pipeline_parallel_size: int
    concurrency: int
    prompt_tokens: int
    output_tokens: int


CASES = (
    Case("llama-3.1-70b", H100, 8, 2, 64, 1024, 256),
    Case("llama-3.1-70b", H100, 8, 2, 8, 1024, 256),
    Case("llama-3.1-70b", H100, 8, 1, 64, 1024, 256),
    Case("qwen3-8b", L40S, 1, 4, 32, 1024, 256),
    Case("qwen3-8b", L40S, 1, 4, 4, 512, 512),
    Case("qwen3-8b", L40S, 1, 2, 64, 4096, 128),
    Case("qwen3-8b", L40S, 1, 1, 16, 256, 256),
)


def planned_tokens_per_s(case: Case, path: str) -> float:
    model = find_model(case.model)
    config = PlanConfig(
        concurrency=case.concurrency,
        prompt_tokens=case.prompt_tokens,
        output_tokens=case.output_tokens,
        tensor_parallel_size=case.tensor_parallel_size,
        pipeline_parallel_size=case.pipeline_parallel_size,
        data_parallel_size=1,
    )
    return search(model_costs(model.spec, model.weights), read_cluster(path), config).best.tokens_per_s


def simulated_tokens_per_s(case: Case, path: str) -> float:
    words = ["plan", case.model, "--cluster", path, "--simulate", "-dp", "1"]
    words += ["-tp", str(case.tensor_parallel_size), "-pp", str(case.pipeline_parallel_size)]
    words += ["--concurrency", str(case.concurrency), "--num-prompts", str(ROUNDS * case.concurrency)]
    words += ["--prompt-tokens", str(case.prompt_tokens), "--output-tokens", str(case.output_tokens)]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        status = stageline(words)
    found = re.search(r"output tokens +\d+ +([\d.]+) tokens/s", printed.getvalue())
    if status or found is None:
        raise SystemExit(f"stageline {' '.join(words)} failed")
    return float(found.group(1))


def main() -> None:
    errors = []
    print("model          layout     requests  prompt  output  planned/s  simulated/s  difference")
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "cluster.yaml"
            path.write_text(case.cluster)
            planned, simulated = planned_tokens_per_s(case, str(path)), simulated_tokens_per_s(case, str(path))
        errors.append(planned / simulated - 1)
        layout = f"TP{case.tensor_parallel_size} x PP{case.pipeline_parallel_size}"
        print(
            f"{case.model:14} {layout:10} {case.concurrency:8}  {case.prompt_tokens:6}  {case.output_tokens:6}  "
            f"{planned:9,.0f}  {simulated:11,.0f}  {errors[-1]:+10.1%}"
        )
    print(f"median {median(map(abs, errors)):.1%}, largest {max(map(abs, errors)):.1%}")


if __name__ == "__main__":
    main()
