"""The timeline as text: every stage has its row, computing is dark, microbatches of the end are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from stageline.cli.main import main
from stageline.timeline.chrome_trace import chrome_trace, spans_of_chrome_trace, write_chrome_trace
from stageline.timeline.span import Span
from stageline.timeline.text_gantt import format_gantt


def spans_of(num_stages: int, num_microbatches: int, step_s: float = 0.01) -> list[Span]:
    """A full pipeline, one microbatch behind the other; each stage is busy from its first one on."""
    return [
        Span(stage, number, "forward", (stage + number) * step_s, (stage + number + 1) * step_s, 4, 4)
        for number in range(num_microbatches)
        for stage in range(num_stages)
    ]


def rows(text: str) -> tuple[list[str], list[str]]:
    """The rows of both pictures."""
    overview, close_up = text.split("\n\n")[:2]
    return overview.splitlines()[1:], close_up.splitlines()[1:]


def test_a_stage_is_dark_while_it_computes_and_only_then() -> None:
    spans = [Span(0, 0, "forward", 0.0, 0.5, 1, 1), Span(1, 0, "forward", 0.5, 1.0, 1, 1)]
    first, second = rows(format_gantt(spans, 2, 103, 0.0, 1.0))[0]
    assert first == "s0 " + "█" * 50
    assert second == "s1 " + " " * 50 + "█" * 50


def test_the_shade_tells_the_share() -> None:
    spans = [Span(0, number, "forward", number * 0.01, number * 0.01 + 0.005, 1, 1) for number in range(100)]
    assert rows(format_gantt(spans, 1, 53, 0.0, 1.0))[0] == ["s0 " + "▒" * 50]


def test_long_times_are_written_out() -> None:
    text = format_gantt([Span(0, 0, "forward", 0.0, 1234.0, 1, 1)], 1, 80, 0.0, 1234.0)
    assert text.startswith("1234 s, shade") and "\nthe last 1234000 ms\n" in text


def test_the_close_up_names_microbatches_one_stage_after_the_other() -> None:
    first, second = rows(format_gantt(spans_of(2, 50), 2, 103, 0.0, 0.51))[1]
    assert "│ m48 │ m49" in first.replace("  ", " ")
    assert first.index("m48") < second.index("m48")


@pytest.mark.parametrize("num_stages", [1, 12, 64])
@pytest.mark.parametrize("width", [20, 80, 300])
def test_every_stage_has_a_row_that_fits(num_stages: int, width: int) -> None:
    overview, close_up = rows(format_gantt(spans_of(num_stages, 90), num_stages, width, 0.0, 1.5))
    for picture in (overview, close_up):
        assert [row.split()[0] for row in picture] == [f"s{stage}" for stage in range(num_stages)]
        assert max(map(len, picture)) <= max(40, width)


def test_spans_survive_a_chrome_trace() -> None:
    spans = [*spans_of(2, 5), Span(-1, 3, "schedule", 0.02, 0.021, 4, 4), Span(1, 4, "sample", 0.06, 0.0625, 4, 3)]
    back = spans_of_chrome_trace(chrome_trace(spans))
    assert sorted(map(str, back)) == sorted(map(str, spans))
    by_name = {str(span): span for span in back}
    for span in spans:
        assert by_name[str(span)].start_s == pytest.approx(span.start_s, abs=1e-8)
        assert by_name[str(span)].end_s == pytest.approx(span.end_s, abs=1e-8)
        assert (by_name[str(span)].num_tokens, by_name[str(span)].num_rows) == (span.num_tokens, span.num_rows)


def test_a_file_becomes_text_a_trace_and_spans_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, trace, saved = (tmp_path / name for name in ("source.json", "trace.json", "saved.json"))
    write_chrome_trace(source, spans_of(2, 20))
    assert main(["timeline", str(source), "--width", "80", "--chrome", str(trace), "--save", str(saved)]) == 0
    text = capsys.readouterr().out
    assert "m19" in text and "busiest stage" in text
    for copy in (trace, saved):
        assert main(["timeline", str(copy), "--width", "80"]) == 0
        assert capsys.readouterr().out == text


def test_only_the_last_seconds_are_shown_if_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "source.json"
    write_chrome_trace(source, spans_of(2, 200))
    assert main(["timeline", str(source), "--seconds", "0.5"]) == 0
    assert "0.5 s, shade" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("body", "complaint"),
    [("{}", "neither"), ("[", "neither"), ('{"traceEvents": [{"ph": "X"}]}', "neither"),
     ('{"traceEvents": []}', "no span"), (None, "cannot be read")],
)  # fmt: skip
def test_other_files_are_refused(
    body: str | None, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file.json"
    if body is not None:
        file.write_text(body)
    assert main(["timeline", str(file)]) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["f", "--url", "http://h"], ["--url", "ftp://h"], ["--url", "http://h",
                                       "--seconds", "61"], ["f", "--seconds", "0"]])  # fmt: skip
def test_what_cannot_be_meant_is_refused(arguments: list[str]) -> None:
    assert main(["timeline", *arguments]) == 2


def test_a_server_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["timeline", "--url", "http://127.0.0.1:1"]) == 1
    assert "http://127.0.0.1:1 does not answer" in capsys.readouterr().err


def test_the_picture_is_a_png_or_matplotlib_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, picture = tmp_path / "source.json", tmp_path / "picture.png"
    write_chrome_trace(source, spans_of(2, 20))
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        assert main(["timeline", str(source), "--png", str(picture)]) == 2
        assert "--png needs matplotlib" in capsys.readouterr().err
    else:
        assert main(["timeline", str(source), "--png", str(picture)]) == 0
        assert picture.read_bytes().startswith(b"\x89PNG")
