"""The command line with a real engine: two worker processes and a tiny model, in its own process as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_models import TinyModel

DEADLINE_S = 120


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(TinyModel().write(tmp_path_factory.mktemp("tiny")))


def _stageline(*argv: str, typed: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "stageline", *argv]
    environment = {**os.environ, **environ}
    return subprocess.run(command, input=typed, capture_output=True, text=True, timeout=DEADLINE_S, env=environment)


def test_generate_gives_the_same_tokens_on_one_stage_and_on_two_and_no_stage_starts_a_compiler(model: str) -> None:
    shared = ["--prompt", "hello", "--prompt", "sea", "--json"]
    shared += ["--temperature", "0", "--max-tokens", "6", "--ignore-eos"]
    one = _stageline("generate", model, *shared, "--distributed-executor-backend", "in_process")
    two = _stageline("generate", model, *shared, "-pp", "2", PYTHONPROFILEIMPORTTIME="1")
    assert (one.returncode, two.returncode) == (0, 0), one.stderr + two.stderr
    tokens = [[json.loads(line)["outputs"][0]["token_ids"] for line in run.stdout.splitlines()] for run in (one, two)]
    assert tokens[0] == tokens[1]
    assert [len(token_ids) for token_ids in tokens[0]] == [6, 6]
    assert "s1" in two.stderr and "[2, 4)" in two.stderr
    # torch imports its compiler at odd occasions; that takes as long as importing torch.
    imported = [line.split("|")[-1].strip() for line in two.stderr.splitlines() if line.startswith("import time:")]
    assert imported.count("torch._C") == 2 and "torch._dynamo" not in imported


def test_a_piped_conversation_is_answered_and_ends_with_the_input(model: str) -> None:
    run = _stageline("chat", model, "--max-tokens", "4", "--temperature", "0", typed="hi\n/reset\nhi\n")
    assert run.returncode == 0, run.stderr
    half = len(run.stdout) // 2
    assert run.stdout and run.stdout[:half] == run.stdout[half:]


def test_a_benchmark_accounts_for_every_stage_and_draws_every_microbatch(model: str, tmp_path: Path) -> None:
    result_path, timeline_path = tmp_path / "r.json", tmp_path / "t.json"
    run = _stageline(
        "bench", "throughput", model, "-pp", "2", "--num-prompts", "6", "--input-len", "20", "--output-len", "8",
        "--output", str(result_path), "--timeline", str(timeline_path),
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    result = json.loads(result_path.read_text())
    assert (result["num_prompt_tokens"], result["num_output_tokens"]) == (120, 48)
    first, last = result["stages"]
    assert first["num_microbatches"] == last["num_microbatches"] > 0
    # Every token is computed but each request's last, which is only sampled.
    assert last["num_tokens"] == 120 + 48 - 6
    assert 0 < first["busy_fraction"] < 1
    slices = [event for event in json.loads(timeline_path.read_text())["traceEvents"] if event["ph"] == "X"]
    forwards = {(event["pid"], event["name"]) for event in slices if event["cat"] == "forward"}
    assert len(forwards) == 2 * first["num_microbatches"]


def test_more_stages_than_layers_are_refused_in_one_line(model: str) -> None:
    run = _stageline("generate", model, "--prompt", "x", "-pp", "5")
    assert run.returncode == 2
    assert run.stderr.startswith("stageline: error: ") and run.stderr.count("\n") == 1
    assert "5" in run.stderr and "4" in run.stderr
