"""A timeline as a PNG: one lane per stage. Needs matplotlib (the extra `plot`)."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable

from stageline.errors import ConfigError
from stageline.timeline.span import Span

_COLORS = {"decode": "#2f6fde", "prompt tokens": "#d97706", "sampling": "#0f4aa3", "waiting for input": "#f2b8c2",
           "output": "#b79df5"}  # fmt: skip
_MOST_LABELS = 400


def check_can_draw(flag: str) -> None:
    """Raises: ConfigError if there is nothing to draw with."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"{flag} needs matplotlib: pip install matplotlib")


def write_picture(
    path: str, spans: Iterable[Span], num_stages: int, start_s: float, end_s: float, title: str
) -> None:
    """Draw what happened between two moments. Raises: OSError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(14, 1.8 + 0.45 * num_stages), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    lanes: dict[tuple[int, str], list[tuple[float, float]]] = {}
    forwards = []
    for span in spans:
        if 0 <= span.stage_index < num_stages and span.end_s > start_s:
            begins_s = max(span.start_s, start_s)
            bar = ((begins_s - start_s) * 1000, (span.end_s - begins_s) * 1000)
            lanes.setdefault((span.stage_index, _color_name(span)), []).append(bar)
            if span.kind == "forward":
                forwards.append((span, bar))
    for (stage, name), bars in lanes.items():
        height = 0.8 if name in ("decode", "prompt tokens", "sampling") else 0.3
        axes.broken_barh(bars, (stage - height / 2, height), facecolors=_COLORS[name], edgecolor="white", linewidth=0.3)
    # A label that does not fit its box would cover others.
    roomy = [(span, bar) for span, bar in forwards if bar[1] > (end_s - start_s) * 1000 / 45]
    for span, bar in roomy[:_MOST_LABELS]:
        middle = bar[0] + bar[1] / 2
        axes.text(middle, span.stage_index, f"m{span.microbatch}", ha="center", va="center", color="white", fontsize=7)
    axes.set(xlabel="ms", xlim=(0, (end_s - start_s) * 1000), ylim=(num_stages - 0.5, -0.5), title=title)
    axes.set_yticks(range(num_stages), [f"s{stage}" for stage in range(num_stages)])
    patches = [Patch(color=color, label=name) for name, color in _COLORS.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False)
    figure.savefig(path, format="png", dpi=120)


def _color_name(span: Span) -> str:
    if span.kind == "forward":
        return "prompt tokens" if span.num_tokens > span.num_rows else "decode"
    return {"sample": "sampling", "send": "output"}.get(span.kind, "waiting for input")
