"""What a run showed: percentiles, throughput, goodput, errors; as a table, as JSON, as a row among other rates.

The JSON's names are those of vLLM's benchmark, so that what reads its results reads these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stageline.errors import ConfigError
from stageline.loadgen.outcome import Outcome
from stageline.loadgen.run import RunResult

PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True)
class Distribution:
    """Of times in seconds; `percentiles_s` is in the order of PERCENTILES."""

    mean_s: float
    std_s: float
    percentiles_s: tuple[float, ...]

    @classmethod
    def of(cls, times_s: Sequence[float]) -> Distribution | None:
        """None if there is no time to speak of."""
        if not times_s:
            return None
        return cls(
            float(np.mean(times_s)), float(np.std(times_s)), tuple(np.percentile(times_s, PERCENTILES).tolist())
        )


@dataclass(frozen=True)
class Objective:
    """What a good answer keeps to: no slower than these, in seconds; None where it does not matter."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    @classmethod
    def parse(cls, parts: Sequence[str]) -> Objective | None:
        """From parts such as ttft:500 (milliseconds). Raises: ConfigError."""
        fields = {"ttft": "ttft_s", "tpot": "tpot_s", "e2e": "e2e_s", "e2el": "e2e_s"}
        found: dict[str, float] = {}
        for part in parts:
            name, _, text = part.partition(":")
            try:
                limit_ms = float(text)
            except ValueError:
                limit_ms = -1.0
            if name not in fields or not limit_ms > 0:
                raise ConfigError(f"--goodput {part!r} is none of ttft:MS, tpot:MS, e2e:MS with milliseconds above 0")
            found[fields[name]] = limit_ms / 1000
        return cls(**found) if found else None

    def is_kept_by(self, outcome: Outcome) -> bool:
        """A time that does not exist, such as TPOT of one token, keeps to anything."""
        limits = ((outcome.ttft_s, self.ttft_s), (outcome.tpot_s, self.tpot_s), (outcome.e2e_s, self.e2e_s))
        return all(limit is None or time_s is None or time_s <= limit for time_s, limit in limits)


@dataclass(frozen=True)
class Report:
    """Args:
    rate_per_s: of the open loop; None for a closed one.
    num_cut: requests of the plan that were shortened to fit the model.
    """

    result: RunResult
    objective: Objective | None
    rate_per_s: float | None
    max_concurrency: int | None
    num_cut: int = 0

    @property
    def answered(self) -> list[Outcome]:
        return [outcome for outcome in self.result.outcomes if outcome.is_answered]

    @property
    def errors(self) -> Counter[str]:
        return Counter(outcome.error for outcome in self.result.outcomes if outcome.error is not None)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(outcome.num_prompt_tokens for outcome in self.answered)

    @property
    def num_output_tokens(self) -> int:
        return sum(outcome.num_output_tokens for outcome in self.answered)

    def per_second(self, amount: float) -> float:
        return amount / self.result.duration_s if self.result.duration_s > 0 else 0.0

    @property
    def num_good(self) -> int | None:
        """Answers that keep to the objective; None without one."""
        objective = self.objective
        return None if objective is None else sum(objective.is_kept_by(outcome) for outcome in self.answered)

    @property
    def ttft(self) -> Distribution | None:
        return _distribution(self.answered, lambda outcome: outcome.ttft_s)

    @property
    def tpot(self) -> Distribution | None:
        return _distribution(self.answered, lambda outcome: outcome.tpot_s)

    @property
    def itl(self) -> Distribution | None:
        return Distribution.of([time_s for outcome in self.answered for time_s in outcome.itl_s])

    @property
    def e2e(self) -> Distribution | None:
        return _distribution(self.answered, lambda outcome: outcome.e2e_s)

    @property
    def latest_start_s(self) -> float:
        """How late the latest request was sent: a load generator that is a bottleneck shows here."""
        return max((outcome.late_s for outcome in self.result.outcomes), default=0.0)

    @property
    def cpu_fraction(self) -> float:
        """Of one core, that the load generator used."""
        return self.per_second(self.result.cpu_s)

    def as_json(self) -> dict[str, Any]:
        """JSON-ready; a time that was not measured is null."""
        good, answered = self.num_good, self.answered
        fields: dict[str, Any] = {
            "request_rate": self.rate_per_s,
            "max_concurrency": self.max_concurrency,
            "duration": self.result.duration_s,
            "num_prompts": self.result.num_planned,
            "completed": len(answered),
            "failed": len(self.result.outcomes) - len(answered),
            "errors": dict(self.errors),
            "shortened": self.num_cut,
            "total_input_tokens": self.num_prompt_tokens,
            "total_cached_tokens": sum(outcome.num_cached_tokens for outcome in answered),
            "total_output_tokens": self.num_output_tokens,
            "request_throughput": self.per_second(len(answered)),
            "output_throughput": self.per_second(self.num_output_tokens),
            "total_token_throughput": self.per_second(self.num_prompt_tokens + self.num_output_tokens),
            "request_goodput": None if good is None else self.per_second(good),
            "good_fraction": None if good is None or not answered else good / len(answered),
            "client_cpu_fraction": self.cpu_fraction,
            "client_latest_start_ms": self.latest_start_s * 1000,
        }
        named = (("ttft", self.ttft), ("tpot", self.tpot), ("itl", self.itl), ("e2el", self.e2e))
        for name, times in named:
            fields[f"mean_{name}_ms"] = None if times is None else times.mean_s * 1000
            fields[f"std_{name}_ms"] = None if times is None else times.std_s * 1000
            fields[f"median_{name}_ms"] = None if times is None else times.percentiles_s[0] * 1000
            for index, percent in enumerate(PERCENTILES):
                fields[f"p{percent}_{name}_ms"] = None if times is None else times.percentiles_s[index] * 1000
        return fields


def format_report(report: Report) -> str:
    """Rates, a table of times, errors; no newline at the end."""
    answered, result = report.answered, report.result
    lines = [
        f"{len(answered)} of {result.num_planned} requests answered in {result.duration_s:.2f} s: "
        f"{report.per_second(len(answered)):.2f} requests/s",
        f"prompt tokens  {report.num_prompt_tokens:>9}  {report.per_second(report.num_prompt_tokens):10.1f} tokens/s",
        f"output tokens  {report.num_output_tokens:>9}  {report.per_second(report.num_output_tokens):10.1f} tokens/s",
    ]
    if (good := report.num_good) is not None:
        share = good / len(answered) if answered else 0.0
        lines.append(f"goodput        {good:>9}  {report.per_second(good):10.2f} requests/s ({share:.0%} of answers)")
    names = ("mean", *(f"p{percent}" for percent in PERCENTILES))
    lines += ["", f"{'milliseconds':<12}" + "".join(f"{name:>11}" for name in names)]
    rows = (("TTFT", report.ttft), ("TPOT", report.tpot), ("ITL", report.itl), ("E2E", report.e2e))
    lines += [_row(name, times) for name, times in rows]
    notes = [f"{count} failed: {error} ({_example(report, error)})" for error, count in report.errors.most_common()]
    if (num_missing := result.num_planned - len(result.outcomes)) > 0:
        notes.append(f"{num_missing} given up: the run was stopped")
    if report.num_cut:
        notes.append(f"{report.num_cut} requests of the plan were shortened to fit the model")
    notes.append(
        f"load generator: {report.cpu_fraction:.0%} of a core; the latest request left "
        f"{report.latest_start_s * 1000:.0f} ms after its time"
    )
    return "\n".join([*lines, "", *notes])


def format_rates(reports: Sequence[Report]) -> str:
    """One row per rate; no newline at the end."""
    headings = ("rate", "requests/s", "tokens/s", "goodput/s", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99", "failed")
    rows: list[tuple[str, ...]] = [headings]
    for report in reports:
        good = report.num_good
        rows.append(
            (
                "-" if report.rate_per_s is None else f"{report.rate_per_s:g}",
                f"{report.per_second(len(report.answered)):.2f}",
                f"{report.per_second(report.num_output_tokens):.1f}",
                "-" if good is None else f"{report.per_second(good):.2f}",
                *(_milliseconds(times, index) for times in (report.ttft, report.tpot) for index in (0, -1)),
                f"{report.errors.total()}",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(headings))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def _milliseconds(times: Distribution | None, index: int) -> str:
    return "-" if times is None else f"{times.percentiles_s[index] * 1000:.1f}"


def _row(name: str, times: Distribution | None) -> str:
    if times is None:
        return f"{name:<12}" + f"{'-':>11}" * (1 + len(PERCENTILES))
    return f"{name:<12}" + "".join(f"{time_s * 1000:>11.2f}" for time_s in (times.mean_s, *times.percentiles_s))


def _example(report: Report, error: str) -> str:
    return next(outcome.message for outcome in report.result.outcomes if outcome.error == error)


def _distribution(outcomes: Sequence[Outcome], time_of: Callable[[Outcome], float | None]) -> Distribution | None:
    times = [time_of(outcome) for outcome in outcomes]
    return Distribution.of([time_s for time_s in times if time_s is not None])
