"""All layouts as points of TPOT and throughput, the best ones joined. Needs matplotlib (the extra `plot`)."""

from __future__ import annotations

import importlib.util

from stageline.errors import ConfigError
from stageline.planner.search import SearchResult


def check_can_draw(flag: str) -> None:
    """Raises: ConfigError if there is nothing to draw with."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"{flag} needs matplotlib: pip install matplotlib")


def write_pareto(path: str, result: SearchResult, title: str) -> None:
    """Draw a PNG. Raises: OSError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    front = result.pareto()
    others = [ranked.plan for ranked in result.ranked if ranked.plan not in front]
    axes.scatter([p.tpot_s * 1e3 for p in others], [p.tokens_per_s for p in others], s=18, c="0.7", label="beaten")
    axes.plot([p.tpot_s * 1e3 for p in front], [p.tokens_per_s for p in front], "o-", label="best of both")
    for plan in front:
        point = (plan.tpot_s * 1e3, plan.tokens_per_s)
        axes.annotate(str(plan.layout), point, xytext=(5, -10), textcoords="offset points", fontsize=8)
    axes.set(title=title, xlabel="TPOT (ms)", ylabel="output tokens/s", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, format="png", dpi=120)
