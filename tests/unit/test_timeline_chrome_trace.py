"""A Chrome trace keeps the format's rules: time does not go back, every arrow starts and ends in a slice."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from stageline.timeline.chrome_trace import chrome_trace, write_chrome_trace
from stageline.timeline.span import Span

Event = dict[str, Any]


def _pipeline(num_stages: int, num_microbatches: int, step_s: float = 0.01) -> list[Span]:
    """A full pipeline as the engine and the stages record it."""
    spans = []
    for number in range(num_microbatches):
        start_s = 100.0 + number * step_s
        spans.append(Span(-1, number, "schedule", start_s - step_s / 10, start_s, 4, 2))
        for stage in range(num_stages):
            enter_s = start_s + stage * step_s
            spans.append(Span(stage, number, "receive_wait", enter_s - step_s / 20, enter_s, 4, 2))
            spans.append(Span(stage, number, "forward", enter_s, enter_s + step_s * 0.8, 4, 2))
            kind = "sample" if stage == num_stages - 1 else "send"
            spans.append(Span(stage, number, kind, enter_s + step_s * 0.8, enter_s + step_s * 0.9, 4, 2))
    return spans


def _of_phase(trace: dict[str, Any], *phases: str) -> list[Event]:
    return [event for event in trace["traceEvents"] if event["ph"] in phases]


def _flows(trace: dict[str, Any]) -> dict[int, list[Event]]:
    flows: dict[int, list[Event]] = defaultdict(list)
    for event in _of_phase(trace, "s", "t", "f"):
        flows[event["id"]].append(event)
    return flows


def test_every_stage_is_a_named_process_and_the_engine_is_one_too() -> None:
    trace = chrome_trace(_pipeline(3, 2))
    names = {e["pid"]: e["args"]["name"] for e in _of_phase(trace, "M") if e["name"] == "process_name"}
    assert names == {0: "engine", 1: "s0", 2: "s1", 3: "s2"}


def test_slices_are_named_after_microbatch_and_kind_with_counts() -> None:
    span = Span(1, 17, "forward", 2.0, 2.0015, 48, 33)
    [event] = _of_phase(chrome_trace([span]), "X")
    assert (event["name"], event["ts"], event["dur"]) == ("m17 forward", 0.0, 1500.0)
    assert event["args"] == {"tokens": 48, "rows": 33}


def test_time_never_goes_back_and_starts_at_zero() -> None:
    times = [event["ts"] for event in _of_phase(chrome_trace(_pipeline(3, 5)), "X", "s", "t", "f")]
    assert times == sorted(times)
    assert times[0] == 0.0


def test_a_microbatch_is_followed_through_all_stages() -> None:
    flows = _flows(chrome_trace(_pipeline(3, 5)))
    assert len(flows) == 5
    for events in flows.values():
        assert [event["ph"] for event in events] == ["s", "t", "t", "f"]
        assert [event["pid"] for event in events] == [0, 1, 2, 3]
        assert len({(event["name"], event["cat"]) for event in events}) == 1


@given(st.integers(1, 5), st.integers(1, 6), st.floats(1e-8, 3.0))
def test_every_arrow_end_lies_inside_a_slice_of_its_track(stages: int, microbatches: int, step_s: float) -> None:
    trace = chrome_trace(_pipeline(stages, microbatches, step_s))
    slices = _of_phase(trace, "X")
    for events in _flows(trace).values():
        for event in events:
            around = [
                s for s in slices
                if (s["pid"], s["tid"]) == (event["pid"], event["tid"]) and s["ts"] <= event["ts"] <= s["ts"] + s["dur"]
            ]  # fmt: skip
            assert any(s["name"].startswith(event["name"] + " ") for s in around)
            assert event["ph"] == "s" or event["bp"] == "e"


def test_an_arrow_end_comes_after_the_slice_that_it_binds_to() -> None:
    """Viewers read events in order: the slice has to be open already, also one of no length."""
    instant = [Span(0, 0, "forward", 1.0, 1.0, 1, 1), Span(1, 0, "forward", 2.0, 2.0, 1, 1)]
    phases = [event["ph"] for event in chrome_trace(instant)["traceEvents"] if event["ph"] != "M"]
    assert phases == ["X", "s", "X", "f"]


def test_a_number_that_starts_again_begins_a_new_arrow() -> None:
    first = _pipeline(2, 1)
    again = [Span(s.stage_index, s.microbatch, s.kind, s.start_s + 9, s.end_s + 9, 4, 2) for s in first]
    flows = _flows(chrome_trace([*first, *again]))
    assert sorted(len(events) for events in flows.values()) == [3, 3]


def test_the_file_is_json_that_reads_back_the_same(tmp_path: Path) -> None:
    spans = _pipeline(2, 3)
    write_chrome_trace(tmp_path / "trace.json", spans)
    assert json.loads((tmp_path / "trace.json").read_text()) == chrome_trace(spans)


def test_a_run_without_spans_is_an_empty_trace() -> None:
    assert chrome_trace([])["traceEvents"] == []
