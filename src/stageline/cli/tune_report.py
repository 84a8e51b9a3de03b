"""What tuning found, as text and as JSON."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stageline.engine.tuning import Proposal, Trial

_WIDTH = 118
_HEADINGS = ("partition", "stage", "layers", "predicted", "measured", "off by", "busy", "starved", "hops", "idle")


def format_items(proposal: Proposal) -> str:
    """Every item's time on its stage, in milliseconds."""
    planned = proposal.planned
    lines = [
        f"items, in ms, for {planned.num_rows} rows of {planned.context_tokens} tokens "
        f"(medians of {min(stage.num_microbatches for stage in proposal.measured)} microbatches)"
    ]
    for stage, speed in zip(proposal.measured, proposal.costs.speeds, strict=True):
        if stage.embedding_s is not None:
            lines.append(f"  s{stage.stage_index} embedding         {stage.embedding_s * 1000:.2f}")
        name = f"  s{stage.stage_index} layers {stage.layers[0]} to {stage.layers[-1]}"
        times = " ".join(f"{time_s * 1000:.2f}" for time_s in stage.layers_s)
        lines += textwrap.wrap(f"{name:<22}{times}", _WIDTH, subsequent_indent=" " * 22, drop_whitespace=True)
        if stage.head_s is not None:
            lines.append(f"  s{stage.stage_index} norm + LM head    {stage.head_s * 1000:.2f}")
        if speed != 1.0:
            lines.append(f"  s{stage.stage_index} is {speed:.2f} times as fast as s0")
    return "\n".join(lines)


def format_trials(trials: Sequence[Trial], predicted_s: Sequence[Sequence[float]]) -> str:
    """A row per partition and stage, and a closing line per partition.

    Args:
        predicted_s: [partitions, stages]
    """
    rows = [_HEADINGS]
    for trial, times_s in zip(trials, predicted_s, strict=True):
        for stage, (expected_s, found_s) in enumerate(zip(times_s, trial.stage_times_s, strict=True)):
            shares = trial.runs[-1].report.stages[stage]
            window_s = shares.window_s or 1.0
            rows.append(
                (
                    counts_text(trial.counts) if stage == 0 else "",
                    f"s{stage}",
                    f"{trial.counts[stage]}",
                    f"{expected_s * 1000:.1f} ms",
                    f"{found_s * 1000:.1f} ms",
                    f"{found_s / expected_s - 1:+.1%}",
                    f"{shares.busy_fraction:.1%}",
                    f"{shares.starved_s / window_s:.1%}",
                    f"{shares.in_transit_s / window_s:.1%}",
                    f"{(shares.idle_s + shares.blocked_on_output_s) / window_s:.1%}",
                )
            )
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    for trial in trials:
        lines.append(
            f"{counts_text(trial.counts)}: {trial.output_tokens_per_s:.1f} output tokens/s, "
            f"bubble {trial.bubble_fraction:.1%} (medians of {len(trial.runs)})"
        )
    if len(trials) > 1:
        lines.append(f"throughput of {counts_text(trials[1].counts)}: {gain(trials):.2f} times that of the first")
    return "\n".join(lines)


def gain(trials: Sequence[Trial]) -> float:
    """Throughput of the second partition over the first's."""
    return trials[1].output_tokens_per_s / trials[0].output_tokens_per_s


def counts_text(counts: Sequence[int]) -> str:
    return ",".join(map(str, counts))


def trials_as_json(
    trials: Sequence[Trial], predicted_s: Sequence[Sequence[float]], proposal: Proposal
) -> dict[str, Any]:
    """JSON-ready."""
    return {
        "num_rows": proposal.planned.num_rows,
        "context_tokens": proposal.planned.context_tokens,
        "embedding_s": proposal.costs.items.embedding_s,
        "layers_s": list(proposal.costs.items.layers_s),
        "head_s": proposal.costs.items.head_s,
        "speeds": list(proposal.costs.speeds),
        "proposal": list(proposal.counts),
        "partitions": [
            {
                "counts": list(trial.counts),
                "predicted_stage_times_s": list(times_s),
                "stage_times_s": list(trial.stage_times_s),
                "output_tokens_per_s": [run.output_tokens_per_s for run in trial.runs],
                "bubble_fraction": trial.bubble_fraction,
            }
            for trial, times_s in zip(trials, predicted_s, strict=True)
        ],
        "gain": gain(trials) if len(trials) > 1 else 1.0,
    }
