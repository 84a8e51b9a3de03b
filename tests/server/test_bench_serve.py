"""`stageline bench serve` against a real server: counts are the server's, every kind of load runs, errors are told."""

from __future__ import annotations

import io
import json
import re
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from stageline.cli.main import main
from tests.server.conftest import KEY, MAX_MODEL_LEN
from tests.server.served import DEADLINE_S
from tests.server.test_metrics import scrape

SMALL = ["--input-len", "12", "--output-len", "6", "--num-warmup", "0"]


@dataclass(frozen=True)
class Ran:
    """How a command ended, and what it wrote."""

    returncode: int
    stdout: str
    stderr: str


def bench(base_url: str, *flags: str, key: str = KEY) -> Ran:
    """The command in this process: starting one takes longer than most runs."""
    stdout, stderr = io.StringIO(), io.StringIO()
    with redirect_stdout(stdout), redirect_stderr(stderr):
        status = main(["bench", "serve", "--base-url", base_url, "--api-key", key, *flags])
    return Ran(status, stdout.getvalue(), stderr.getvalue())


def result(path: Path, base_url: str, *flags: str) -> dict:
    run = bench(base_url, *flags, "--json", str(path))
    assert run.returncode == 0, run.stderr
    found = json.loads(path.read_text())
    assert KEY not in path.read_text()
    return found


def test_a_closed_loop_counts_what_the_server_counts(tmp_path: Path, base_url: str, http: httpx.Client) -> None:
    before = scrape(http)
    found = result(
        tmp_path / "r.json", base_url, *SMALL, "--num-prompts", "9", "--max-concurrency", "3", "--goodput", "e2e:60000"
    )
    after = scrape(http)
    assert (found["completed"], found["failed"], found["max_concurrency"]) == (9, 0, 3)
    assert found["total_input_tokens"] == 9 * 12 and found["total_output_tokens"] == 9 * 6
    assert found["request_goodput"] == found["request_throughput"] > 0 and found["good_fraction"] == 1.0
    added = {name: after[name, ()] - before[name, ()] for name, labels in before if not labels}
    assert added["vllm:generation_tokens_total"] == 9 * 6 and added["vllm:prompt_tokens_total"] == 9 * 12
    for name in ("ttft", "tpot", "itl", "e2el"):
        assert 0 < found[f"median_{name}_ms"] <= found[f"p90_{name}_ms"] <= found[f"p99_{name}_ms"]
    assert found["p99_ttft_ms"] < found["p99_e2el_ms"]


def test_an_open_loop_over_several_rates_draws_a_picture(tmp_path: Path, base_url: str) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "latency.png"
    flags = ["--num-prompts", "4", "--rates", "20,40", "--endpoint", "chat", "--plot", str(picture)]
    found = result(tmp_path / "r.json", base_url, *SMALL, *flags)
    assert [run["request_rate"] for run in found["runs"]] == [20, 40]
    assert [run["completed"] for run in found["runs"]] == [4, 4]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_prompts_that_share_a_prefix_hit_the_prefix_cache(tmp_path: Path, base_url: str) -> None:
    flags = ["--dataset-name", "prefix", "--num-prefixes", "1", "--prefix-len", "64", "--num-prompts", "4"]
    found = result(tmp_path / "r.json", base_url, *SMALL, *flags, "--max-concurrency", "1")
    assert found["total_cached_tokens"] == 3 * 64


def test_a_trace_is_played_with_its_times_and_lengths(tmp_path: Path, base_url: str) -> None:
    trace = tmp_path / "azure.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.0,20,3\n2023-11-16 18:17:05.0,30,2\n"
        "2023-11-16 18:17:09.0,5000,4\n"
    )
    flags = ["--dataset-name", "azure", "--dataset-path", str(trace), "--time-scale", "0.1", "--num-warmup", "0"]
    found = result(tmp_path / "r.json", base_url, *flags)
    # The longest prompt does not fit the model: its end is cut, for one token of answer.
    assert found["shortened"] == 1 and found["total_input_tokens"] == 20 + 30 + MAX_MODEL_LEN - 1
    assert found["total_output_tokens"] == 3 + 2 + 1 and found["duration"] >= 0.6


def test_failures_are_counted_by_kind_and_shown_in_the_servers_words(base_url: str) -> None:
    run = bench(base_url, *SMALL, "--num-prompts", "2", "--temperature", "-3")
    assert run.returncode == 1
    assert "0 of 2 requests answered" in run.stdout
    assert "2 failed: HTTP 400" in run.stdout and "temperature" in run.stdout


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--model", "nobody"], "nobody.*smol"),
        (["--rates", "1,zero"], "--rates is '1,zero'"),
        (["--goodput", "speed:3"], "speed:3"),
        (["--dataset-name", "mooncake"], "--dataset-path"),
        (["--num-prompts", "0"], "--num-prompts is 0"),
        (["--burstiness", "0"], "--burstiness is 0"),
        (["--ca-file", "/nowhere.pem"], "--ca-file /nowhere.pem"),
        (["--base-url", "no-scheme:80"], "no-scheme"),
    ],
)
def test_what_cannot_work_is_told_in_one_line(base_url: str, flags: list[str], told: str) -> None:
    run = bench(base_url, *flags)
    assert run.returncode == 2 and run.stdout == ""
    [line] = run.stderr.splitlines()
    assert re.search(told, line), line


def test_a_wrong_key_and_a_missing_server_are_told(base_url: str) -> None:
    assert "HTTP 401" in bench(base_url, key="wrong").stderr
    assert "is the server up" in bench("http://127.0.0.1:9").stderr


def test_an_interrupt_shows_what_there_is(base_url: str, http: httpx.Client) -> None:
    """One request is answered at once, the next one would come in an hour."""
    command = [sys.executable, "-m", "stageline", "bench", "serve", "--base-url", base_url, "--api-key", KEY, *SMALL]
    before = scrape(http)["vllm:generation_tokens_total", ()]
    with subprocess.Popen(
        [*command, "--num-prompts", "2", "--rates", "0.0003", "--burstiness", "inf"],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        try:
            deadline_s = time.monotonic() + DEADLINE_S
            while scrape(http)["vllm:generation_tokens_total", ()] < before + 6:
                assert process.poll() is None and time.monotonic() < deadline_s
            process.send_signal(signal.SIGINT)
            output, _ = process.communicate(timeout=DEADLINE_S)
        finally:
            process.kill()
    assert process.returncode == 130
    assert "of 2 requests answered" in output and "given up" in output
