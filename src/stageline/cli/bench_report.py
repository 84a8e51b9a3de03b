"""What a benchmark found: numbers from the requests' timings and the stages' spans, as text and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from stageline.config.engine_config import EngineConfig
from stageline.outputs import CompletionOutput, RequestOutput
from stageline.timeline.analysis import PipelineReport, StageReport
from stageline.timeline.journeys import LatencySplit
from stageline.timeline.view import format_report, format_split


@dataclass(frozen=True)
class Percentiles:
    """Of a set of times, in seconds."""

    mean_s: float
    p50_s: float
    p90_s: float
    p95_s: float
    p99_s: float

    @classmethod
    def of(cls, times_s: Sequence[float]) -> Percentiles | None:
        """None if there is no time to speak of."""
        if not times_s:
            return None
        p50, p90, p95, p99 = np.percentile(times_s, (50, 90, 95, 99)).tolist()
        return cls(mean_s=float(np.mean(times_s)), p50_s=p50, p90_s=p90, p95_s=p95, p99_s=p99)


@dataclass(frozen=True)
class BenchReport:
    """A benchmark's measured part.

    Args:
        mode: throughput or latency.
        batch_times_s: wall time of each batch; one for throughput.
        advice: what the stages' spans say should be changed.
        decode_way: of the mean microbatch that carried no prompt, from its schedule to its tokens; None without one.
    """

    mode: str
    config: EngineConfig
    outputs: Sequence[RequestOutput]
    batch_times_s: Sequence[float]
    pipeline: PipelineReport
    advice: Sequence[str] = ()
    decode_way: LatencySplit | None = None

    @property
    def elapsed_s(self) -> float:
        return sum(self.batch_times_s)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(output.prompt_token_ids) for output in self.outputs)

    @property
    def num_output_tokens(self) -> int:
        return sum(len(completion.token_ids) for completion in self._completions)

    @property
    def ttft(self) -> Percentiles | None:
        """Time to first token, over requests."""
        times = [completion.timings.ttft_s for completion in self._completions]
        return Percentiles.of([time_s for time_s in times if time_s is not None])

    @property
    def tpot(self) -> Percentiles | None:
        """Mean time per output token after the first, over requests."""
        times = [completion.timings.tpot_s(len(completion.token_ids)) for completion in self._completions]
        return Percentiles.of([time_s for time_s in times if time_s is not None])

    @property
    def itl(self) -> Percentiles | None:
        """Time from one output token to the next, over all pairs of all requests."""
        return Percentiles.of([time_s for one in self._completions for time_s in one.timings.inter_token_s])

    @property
    def batch(self) -> Percentiles | None:
        return Percentiles.of(self.batch_times_s)

    @property
    def _completions(self) -> list[CompletionOutput]:
        return [completion for output in self.outputs for completion in output.outputs]

    def as_json(self) -> dict[str, Any]:
        """JSON-ready; a percentile group is null if nothing could be measured."""
        return {
            "mode": self.mode,
            "config": dataclasses.asdict(self.config),
            "num_requests": len(self.outputs),
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_output_tokens": self.num_output_tokens,
            "elapsed_s": self.elapsed_s,
            "requests_per_s": len(self.outputs) / self.elapsed_s,
            "prompt_tokens_per_s": self.num_prompt_tokens / self.elapsed_s,
            "output_tokens_per_s": self.num_output_tokens / self.elapsed_s,
            "batch_times_s": list(self.batch_times_s),
            "ttft": msgspec.to_builtins(self.ttft),
            "tpot": msgspec.to_builtins(self.tpot),
            "itl": msgspec.to_builtins(self.itl),
            "window_s": self.pipeline.window_s,
            "bubble_fraction": self.pipeline.bubble_fraction,
            "slowest_stage": self.pipeline.slowest_stage,
            "stages": [_stage_as_json(stage) for stage in self.pipeline.stages],
            "decode_way": msgspec.to_builtins(self.decode_way),
            "advice": list(self.advice),
        }


def _stage_as_json(stage: StageReport) -> dict[str, Any]:
    return dataclasses.asdict(stage) | {
        "busy_fraction": stage.busy_fraction,
        "waiting_for_input_fraction": stage.waiting_for_input_fraction,
        "blocked_on_output_fraction": stage.blocked_on_output_fraction,
        "idle_fraction": stage.idle_fraction,
        "bubble_fraction": stage.bubble_fraction,
    }


def format_bench_report(report: BenchReport) -> str:
    """Rates, percentiles and the stages' table; no newline at the end."""
    num_requests, elapsed_s = len(report.outputs), report.elapsed_s
    lines = [
        f"{num_requests} requests in {elapsed_s:.2f} s: {num_requests / elapsed_s:.2f} requests/s",
        f"prompt tokens  {report.num_prompt_tokens:>8}  {report.num_prompt_tokens / elapsed_s:10.1f} tokens/s",
        f"output tokens  {report.num_output_tokens:>8}  {report.num_output_tokens / elapsed_s:10.1f} tokens/s",
        "",
        f"{'milliseconds':<12}" + "".join(f"{name:>10}" for name in ("mean", "p50", "p90", "p95", "p99")),
        _percentile_row("TTFT", report.ttft),
        _percentile_row("TPOT", report.tpot),
        _percentile_row("ITL", report.itl),
    ]
    if report.mode == "latency":
        lines.append(_percentile_row("batch", report.batch))
    way = [] if report.decode_way is None else [f"a decode's way around, {format_split(report.decode_way)}"]
    return "\n".join([*lines, "", format_report(report.pipeline), *way, *report.advice])


def _percentile_row(name: str, percentiles: Percentiles | None) -> str:
    if percentiles is None:
        return f"{name:<12}" + f"{'-':>10}" * 5
    times_s = dataclasses.astuple(percentiles)
    return f"{name:<12}" + "".join(f"{time_s * 1000:10.2f}" for time_s in times_s)
