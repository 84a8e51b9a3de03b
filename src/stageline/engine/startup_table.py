"""The table an operator reads first: what each stage holds, what that takes, and which stage limits the KV cache."""

from __future__ import annotations

from collections.abc import Sequence

from stageline.executor.messages import StageLoaded
from stageline.kv.kv_plan import KVPlan, StageKV
from stageline.pipeline.partition import StageLayers

_HEADINGS = ("stage", "layers", "also holds", "weights", "KV per token", "KV blocks possible", "left unused")


def format_startup_table(partition: Sequence[StageLayers], reports: Sequence[StageLoaded], plan: KVPlan) -> str:
    """One row per stage and a line on the KV cache."""
    rows = [_HEADINGS]
    for part, report, kv in zip(partition, reports, plan.stages, strict=True):
        also = [name for name, is_there in (("embedding", part.is_first), ("norm + LM head", part.is_last)) if is_there]
        rows.append(
            (
                f"s{part.stage_index}",
                f"[{part.layers.start}, {part.layers.stop})",
                ", ".join(also) or "-",
                format_bytes(report.weight_bytes),
                _kv_per_token(kv),
                f"{kv.num_possible_blocks:,}",
                format_bytes(kv.unused_bytes),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    ranks = _count_ranks([report.num_ranks for report in reports])
    return "\n".join([f"pipeline of {count_stages(len(partition))}{ranks}, {reports[0].dtype}", *lines, _kv_line(plan)])


def _count_ranks(sizes: Sequence[int]) -> str:
    if max(sizes) == 1:
        return ""
    if len(set(sizes)) == 1:
        return f" of {sizes[0]} ranks" + (" each" if len(sizes) > 1 else "")
    return f" of {', '.join(map(str, sizes))} ranks"


def _kv_per_token(kv: StageKV) -> str:
    if not kv.window_bytes_per_token:
        return format_bytes(kv.bytes_per_token)
    return f"{format_bytes(kv.bytes_per_token)} + {format_bytes(kv.window_bytes_per_token)} in windows"


def _kv_line(plan: KVPlan) -> str:
    if plan.limiting_stage is None:
        why = "as much as max_num_seqs requests of max_model_len can use"
    elif len(plan.stages) == 1:
        why = "all of its share"
    else:
        why = f"s{plan.limiting_stage} limits"
    line = f"KV cache: {plan.num_blocks:,} blocks of {plan.block_size} tokens = {plan.num_tokens:,} tokens ({why})"
    if plan.window is None:
        return line
    window, kept = plan.window, plan.window.num_blocks * plan.block_size
    return (
        f"{line}; layers with a window of {window.num_tokens:,} tokens keep {window.num_blocks:,} blocks = {kept:,} "
        "tokens of all requests"
    )


def count_stages(num_stages: int) -> str:
    """Such as 1 stage or 2 stages."""
    return "1 stage" if num_stages == 1 else f"{num_stages} stages"


def format_bytes(num_bytes: int) -> str:
    """Such as 1.5 GiB or 11.2 KiB."""
    amount = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"
