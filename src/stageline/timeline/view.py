"""A pipeline report as a small table for a terminal."""

from __future__ import annotations

from stageline.timeline.analysis import PipelineReport, StageReport
from stageline.timeline.journeys import CriticalPath, LatencySplit

_HEADINGS = ("stage", "microbatches", "tokens", "busy", "waiting for input", "blocked on output", "idle", "bubble")


def format_report(report: PipelineReport) -> str:
    """One row per stage, times as shares of the window, and two closing lines; no newline at the end."""
    rows = [_HEADINGS, *(_row(stage) for stage in report.stages)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    lines.append(f"bubble by reason: {_reasons(report)}")
    lines.append(
        f"window {report.window_s:.2f} s, bubble {report.bubble_fraction:.1%} of all stage time, "
        f"busiest stage s{report.slowest_stage}"
    )
    return "\n".join(lines)


def format_split(split: LatencySplit) -> str:
    """Such as "10.2 ms: s0 4.0, s1 4.1, sampling 1.0, hops 0.4, queues 0.7"; what took no time is left out."""
    stages = {f"s{stage}": time_s for stage, time_s in enumerate(split.stages_s)}
    others = {
        "sampling": split.sampling_s,
        "hops": sum(split.hops_s),
        "queues": sum(split.queues_s),
        "engine": split.engine_s,
    }
    parts = [f"{name} {time_s * 1000:.1f}" for name, time_s in (stages | others).items() if time_s >= 5e-5]
    return f"{split.total_s * 1000:.1f} ms: {', '.join(parts)}"


def format_critical_path(path: CriticalPath) -> str:
    """Such as "4.97 s: s1 62%, s0 31%, between stages 7%", the largest stage first."""
    shares = {f"s{stage}": path.share(stage) for stage in range(len(path.stages_s))}
    parts = sorted(shares.items(), key=lambda part: -part[1])
    parts.append(("between stages", path.between_s / path.total_s if path.total_s > 0 else 0.0))
    return f"{path.total_s:.2f} s: {', '.join(f'{name} {share:.0%}' for name, share in parts)}"


def _reasons(report: PipelineReport) -> str:
    """Shares of all stage time."""
    all_s = sum(stage.window_s for stage in report.stages)
    reasons = {
        "starved": sum(stage.starved_s for stage in report.stages),
        "hops": sum(stage.in_transit_s for stage in report.stages),
        "blocked on output": sum(stage.blocked_on_output_s for stage in report.stages),
        "too little in flight": sum(stage.underfilled_s for stage in report.stages),
        "no work": sum(stage.unused_s for stage in report.stages),
    }
    return ", ".join(f"{name} {time_s / all_s if all_s > 0 else 0.0:.1%}" for name, time_s in reasons.items())


def _row(stage: StageReport) -> tuple[str, ...]:
    return (
        f"s{stage.stage_index}",
        f"{stage.num_microbatches}",
        f"{stage.num_tokens}",
        f"{stage.busy_fraction:.1%}",
        f"{stage.waiting_for_input_fraction:.1%}",
        f"{stage.blocked_on_output_fraction:.1%}",
        f"{stage.idle_fraction:.1%}",
        f"{stage.bubble_fraction:.1%}",
    )
