"""TPOT against throughput over layouts and numbers of requests: what no other choice beats in both.

One idea: a layout is a curve, from one request, which is quick, to as many as its memory holds, which is much. The
picture needs matplotlib (the extra `plot`).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

from stageline.config.plan_config import PlanConfig
from stageline.errors import ConfigError
from stageline.planner.layouts import LayoutPlan
from stageline.planner.search import SearchResult

_MOST_LAYOUTS = 24
_CONCURRENCIES = tuple(1 << power for power in range(13))


@dataclass(frozen=True)
class ParetoPoint:
    """A layout with so many requests running."""

    plan: LayoutPlan
    concurrency: int

    @property
    def tpot_s(self) -> float:
        return self.plan.tpot_s

    @property
    def tokens_per_s(self) -> float:
        return self.plan.tokens_per_s


def curves(result: SearchResult, config: PlanConfig) -> list[list[ParetoPoint]]:
    """The best layouts, each with 1, 2, 4 … requests as far as its memory holds them."""
    found = []
    for ranked in result.ranked[:_MOST_LAYOUTS]:
        plans = ((count, ranked.plan.at_concurrency(count, config)) for count in _CONCURRENCIES)
        curve = [
            ParetoPoint(plan, count)
            for count, plan in plans
            if plan is not None and count >= ranked.plan.layout.data_parallel_size
        ]
        if curve:
            found.append(curve)
    return found


def pareto_front(points: Sequence[ParetoPoint]) -> list[ParetoPoint]:
    """Those that no other beats in both TPOT and throughput, by TPOT."""
    front: list[ParetoPoint] = []
    for point in sorted(points, key=lambda point: (point.tpot_s, -point.tokens_per_s)):
        if not front or point.tokens_per_s > front[-1].tokens_per_s:
            front.append(point)
    return front


def check_can_draw(flag: str) -> None:
    """Raises: ConfigError if there is nothing to draw with."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"{flag} needs matplotlib: pip install matplotlib")


def write_pareto(path: str, result: SearchResult, config: PlanConfig, title: str) -> None:
    """Draw a PNG: the curves, and the front with its layouts' names. Raises: OSError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    found = curves(result, config)
    for curve in found:
        axes.plot([p.tpot_s * 1e3 for p in curve], [p.tokens_per_s for p in curve], ".-", c="0.8", lw=0.8)
    front = pareto_front([point for curve in found for point in curve])
    axes.plot([p.tpot_s * 1e3 for p in front], [p.tokens_per_s for p in front], "o-", label="beaten by none")
    for point in front:
        text = f"{point.plan.layout}, {point.concurrency}"
        where = (point.tpot_s * 1e3, point.tokens_per_s)
        axes.annotate(text, where, xytext=(6, -9), textcoords="offset points", fontsize=7)
    axes.set(title=title, xlabel="TPOT (ms)", ylabel="output tokens/s", xscale="log", yscale="log")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.savefig(path, format="png", dpi=120)
