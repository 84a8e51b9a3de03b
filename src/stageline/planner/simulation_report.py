"""What a simulated run showed, in the words of `stageline bench`."""

from __future__ import annotations

from stageline.loadgen.report import PERCENTILES, Distribution
from stageline.planner.simulate import SimulatedRun
from stageline.timeline.view import format_report


def format_simulation(run: SimulatedRun) -> str:
    """Rates, percentiles and the stages' table; no newline at the end."""
    num_requests, duration_s = len(run.requests), run.duration_s
    busy = ", ".join(f"s{stage} {fraction:.1%}" for stage, fraction in enumerate(run.bubble_fractions))
    preempted = sum(request.num_preemptions for request in run.requests)
    lines = [
        f"{num_requests} requests in {duration_s:.2f} s (virtual): {num_requests / duration_s:.2f} requests/s, "
        f"{run.num_microbatches} microbatches"
        + (f", {preempted} preemptions" if preempted else ""),
        f"prompt tokens  {run.num_prompt_tokens:>8}  {run.num_prompt_tokens / duration_s:10.1f} tokens/s",
        f"output tokens  {run.num_output_tokens:>8}  {run.output_tokens_per_s:10.1f} tokens/s",
        "",
        f"{'milliseconds':<12}" + "".join(f"{name:>10}" for name in ("mean", *(f"p{p}" for p in PERCENTILES))),
        _row("TTFT", run.ttft_s),
        _row("TPOT", run.tpot_s),
        _row("ITL", run.itl_s),
        "",
        f"bubbles of the whole run: {busy}",
        f"the last {run.num_microbatches_kept} microbatches:",
        format_report(run.report()),
    ]
    return "\n".join(lines)


def _row(name: str, times_s: list[float]) -> str:
    times = Distribution.of(times_s)
    if times is None:
        return f"{name:<12}" + f"{'-':>10}" * (1 + len(PERCENTILES))
    return f"{name:<12}" + "".join(f"{time_s * 1000:>10.2f}" for time_s in (times.mean_s, *times.percentiles_s))
