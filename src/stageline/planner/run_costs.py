"""From the spans of pipelines that ran to what a stage, a message and the engine take, each by itself.

One idea: a time is read only where nothing else can be in it. A preparation is what lies between two microbatches of a
stage that never waits; a message's latency is what an idle receiver was waiting for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from statistics import median

from stageline.cost.host_profile import Curve, EngineCosts, RunCosts
from stageline.planner.measure_run import EngineStep, SteadyDecodes
from stageline.timeline.span import Span, SpanKind

_ANNOUNCED_BEFORE_S = 5e-4
_LEAST_S = 1e-9


class _Run:
    """The spans of decodes by stage, kind and microbatch."""

    def __init__(self, decodes: SteadyDecodes) -> None:
        self.num_stages = len(decodes.layer_counts)
        self.steps = {step.microbatch: step for step in decodes.steps}
        self._spans = {(span.stage_index, span.kind, span.microbatch): span for span in decodes.spans}
        self.numbers = sorted({span.microbatch for span in decodes.spans if span.kind == "forward"})

    @property
    def last(self) -> int:
        return self.num_stages - 1

    def typical(self, of: Callable[[int], float | None]) -> float:
        """The median over microbatches for which there is such a time; 0 if there is none."""
        found = [time_s for number in self.numbers if (time_s := of(number)) is not None]
        return max(0.0, median(found)) if found else 0.0

    def span(self, stage: int, kind: SpanKind, number: int) -> Span | None:
        return self._spans.get((stage, kind, number))

    def duration_s(self, stage: int, kind: SpanKind) -> float:
        def of(number: int) -> float | None:
            span = self.span(stage, kind, number)
            return None if span is None else span.duration_s

        return self.typical(of)

    def between_s(self, one: tuple[int, SpanKind], other: tuple[int, SpanKind], at_start: bool = False) -> float:
        """From the end (or start) of one span of a microbatch to the start of another."""

        def gap_s(number: int) -> float | None:
            before, after = self.span(*one, number), self.span(*other, number)
            if before is None or after is None:
                return None
            return after.start_s - (before.start_s if at_start else before.end_s)

        return self.typical(gap_s)


def head_curve(single: Iterable[SteadyDecodes]) -> Curve:
    """Norm, head and choice, by rows, on the only stage of a pipeline."""
    points = [(decodes.num_requests, _Run(decodes).duration_s(0, "sample")) for decodes in single]
    return Curve(tuple(rows for rows, _ in points), tuple(max(_LEAST_S, time_s) for _, time_s in points))


def engine_costs(single: list[SteadyDecodes]) -> EngineCosts:
    """Of the engine's own process. Receiving is in a message's latency already, so here it holds up no launch."""
    few, many = single[0], single[-1]
    costs: list[float] = []
    for part in (_launch_s, _before_launch_s, _after_launch_s):
        few_s, many_s = (median(map(part, decodes.steps)) for decodes in (few, many))
        costs += _line(few.num_requests, few_s, many.num_requests, many_s)
    return EngineCosts(*costs)


def _launch_s(step: EngineStep) -> float:
    return step.launch_s


def _before_launch_s(step: EngineStep) -> float:
    return step.result_s


def _after_launch_s(step: EngineStep) -> float:
    return step.news_s + step.waiting_s + step.other_threads_s


def run_costs(
    single: list[SteadyDecodes], lone: SteadyDecodes, loaded: SteadyDecodes, undisturbed: RunCosts | None = None
) -> RunCosts:
    """Args:
    single: one stage with ever more requests.
    lone, loaded: several stages, with one request and with several for each.
    undisturbed: says what sending takes, where a sender may lose its core to whom it wakes; what is more is then the
        message's latency.
    """
    runs, one, many = [_Run(decodes) for decodes in single], _Run(lone), _Run(loaded)
    prepares_s = _line(
        single[0].num_requests, _prepare_s(runs[0]), single[-1].num_requests, _prepare_s(runs[-1])
    )
    begin_s = median(run.between_s((0, "receive_wait"), (0, "forward"), at_start=True) for run in runs)
    stages = range(one.num_stages - 1)
    announced_s = one.between_s((-1, "schedule"), (0, "forward"))
    hops_s = [one.between_s((stage, "send"), (stage + 1, "forward"), at_start=True) for stage in stages]

    def result_s(number: int) -> float | None:
        step, send = one.steps.get(number), one.span(one.last, "send", number)
        return None if step is None or send is None else step.at_s - send.start_s

    if undisturbed is None:
        send_s = median(one.duration_s(stage, "send") for stage in stages)
        result_send_s = one.duration_s(one.last, "send")
        hand_on_s = many.between_s((many.last, "sample"), (many.last, "send"))
    else:
        send_s, result_send_s, hand_on_s = undisturbed.send_s, undisturbed.result_send_s, undisturbed.hand_on_s
    return RunCosts(
        prepare_s=prepares_s[0],
        prepare_row_s=prepares_s[1],
        begin_s=begin_s,
        send_s=send_s,
        hand_on_s=hand_on_s,
        result_send_s=result_send_s,
        to_stages_s=max(0.0, announced_s - sum(prepares_s) - begin_s),
        to_next_stage_s=max(0.0, median(hops_s) - send_s - begin_s),
        to_engine_s=max(0.0, one.typical(result_s) - result_send_s),
    )


def forward_s(decodes: SteadyDecodes) -> float:
    """Of all stages together, typically."""
    run = _Run(decodes)
    return sum(run.duration_s(stage, "forward") for stage in range(run.num_stages))


def tokens_per_s(spans: Iterable[Span]) -> float:
    """Of decodes, as the last stage chose them; of a run or of a simulation of it."""
    chosen = sorted((span.end_s, span.num_rows) for span in spans if span.kind == "sample" and _is_decodes(span))
    if len(chosen) < 2:
        return 0.0
    return sum(num_rows for _, num_rows in chosen[1:]) / max(_LEAST_S, chosen[-1][0] - chosen[0][0])


def _is_decodes(span: Span) -> bool:
    return span.num_tokens == span.num_rows


def _prepare_s(run: _Run) -> float:
    """What a stage does before it looks for input, when the announcement was there as it became free."""

    def gap_s(number: int) -> float | None:
        send, wait = run.span(0, "send", number), run.span(0, "receive_wait", number + 1)
        launched = run.span(-1, "schedule", number + 1)
        if send is None or wait is None or launched is None:
            return None
        return wait.start_s - send.end_s if launched.end_s + _ANNOUNCED_BEFORE_S < send.end_s else None

    return run.typical(gap_s)


def _line(few: int, few_s: float, many: int, many_s: float) -> tuple[float, float]:
    """Returns: what is fixed, and what each row adds."""
    row_s = max(0.0, (many_s - few_s) / (many - few))
    return max(0.0, few_s - row_s * few), row_s

