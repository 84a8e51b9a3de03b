"""/debug on a real server: as described, for the command line, and while the pipeline works."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from stageline.cli.main import main
from tests.server.conftest import KEY, MODEL


@pytest.fixture(autouse=True)
def _something_ran(http: httpx.Client) -> None:
    body = {"model": MODEL, "prompt": [5] * 30, "max_tokens": 20, "ignore_eos": True}
    assert http.post("/v1/completions", json=body).status_code == 200


@pytest.mark.parametrize(
    "asked", ["/debug/pipeline", "/debug/timeline?seconds=30", "/debug/timeline?seconds=30&format=chrome"]
)
def test_answers_are_as_described(http: httpx.Client, asked: str) -> None:
    api: dict[str, Any] = http.get("/openapi.json").json()
    success = api["paths"][asked.partition("?")[0]]["get"]["responses"]["200"]
    schema = success["content"]["application/json"]["schema"]
    judge = jsonschema.Draft202012Validator({**schema, "components": api["components"]})
    judge.validate(http.get(asked).json())


def test_a_request_s_time_is_told_by_cause(http: httpx.Client) -> None:
    view = http.get("/debug/pipeline").json()
    for split in (view["ttft"], view["itl"], *(journey["itl"] for journey in view["journeys"] if journey["itl"])):
        by_stage = sum(map(sum, (split["hops_s"], split["queues_s"], split["stages_s"])))
        parts = split["engine_s"] + split["sampling_s"] + by_stage
        assert parts == pytest.approx(split["total_s"]) and min(split["stages_s"]) > 0


def test_every_microbatch_of_the_last_stage_was_on_the_first_before(http: httpx.Client) -> None:
    spans = http.get("/debug/timeline?seconds=30").json()["spans"]
    ended = [{span[1]: span[4] for span in spans if (span[0], span[2]) == (stage, "forward")} for stage in (0, 1)]
    started = {span[1]: span[3] for span in spans if (span[0], span[2]) == (1, "forward")}
    both = ended[0].keys() & started.keys()
    assert len(both) >= 20
    assert all(ended[0][number] <= started[number] for number in both)


def test_many_who_ask_at_once_get_each_their_own_seconds(http: httpx.Client) -> None:
    def ask(seconds: float) -> tuple[float, dict[str, Any]]:
        return seconds, http.get(f"/debug/timeline?seconds={seconds}").json()

    with ThreadPoolExecutor(8) as pool:
        for seconds, timeline in pool.map(ask, [0.5 + 0.5 * number for number in range(32)]):
            assert timeline["end_s"] - timeline["start_s"] == pytest.approx(seconds, abs=1e-3)
            assert all(timeline["start_s"] - 1e-5 <= span[4] for span in timeline["spans"])


def test_the_command_line_shows_a_server_that_runs(
    base_url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "saved.json"
    flags = ["--url", base_url, "--api-key", KEY, "--seconds", "30", "--width", "100"]
    assert main(["timeline", *flags, "--save", str(saved)]) == 0
    shown = capsys.readouterr().out
    assert "\ns0 " in shown and "\ns1 " in shown and "bubble by reason" in shown
    assert all(f"{name}, mean: " in shown for name in ("a microbatch's way", "TTFT", "ITL"))
    assert re.search(r"^critical path, [\d.]+ s: s[01] \d+%, s[01] \d+%, between stages \d+%$", shown, re.M)
    assert main(["timeline", str(saved)]) == 0


def test_the_command_line_tells_that_a_key_is_refused(base_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["timeline", "--url", base_url, "--api-key", "wrong"]) == 1
    assert "answered 401: " in capsys.readouterr().err
