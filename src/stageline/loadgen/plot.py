"""Latency over throughput as a picture: one point per rate. Needs matplotlib (the extra `plot`)."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence

from stageline.errors import ConfigError
from stageline.loadgen.report import Distribution, Report

_CURVES: tuple[tuple[str, Callable[[Report], Distribution | None]], ...] = (
    ("TTFT", lambda report: report.ttft),
    ("TPOT", lambda report: report.tpot),
)


def check_can_plot() -> None:
    """Raises: ConfigError if there is nothing to draw with."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install matplotlib")


def write_plot(path: str, reports: Sequence[Report], title: str) -> None:
    """Draw TTFT and TPOT, median and p99, over output tokens per second. Raises: OSError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    for axes, (name, curve) in zip(figure.subplots(1, 2), _CURVES, strict=True):
        for label, index, style in (("median", 0, "o-"), ("p99", -1, "s--")):
            points = [
                (report.per_second(report.num_output_tokens), times.percentiles_s[index] * 1000, report.rate_per_s)
                for report in reports
                if (times := curve(report)) is not None
            ]
            axes.plot([x for x, _, _ in points], [y for _, y, _ in points], style, label=label)
            for x, y, rate_per_s in points if index == 0 else ():
                axes.annotate(f"{rate_per_s:g}/s" if rate_per_s else "closed", (x, y), fontsize=8)
        axes.set(xlabel="output tokens/s", ylabel=f"{name} (ms)", ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, format="png", dpi=120)
