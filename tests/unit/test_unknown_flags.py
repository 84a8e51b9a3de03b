"""A flag that is not known is answered with the one that was meant; one of vLLM's with what happens instead."""

from __future__ import annotations

import argparse

import pytest

from stageline.cli.main import build_parser, main
from stageline.config.foreign_flags import FOREIGN_FLAGS, LOAD_GENERATOR_FLAGS


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        (["serve", "m", "--prot", "17"], "unrecognized arguments: --prot 17; did you mean --port?"),
        (["generate", "m", "-dp", "2"], "unrecognized arguments: -dp 2; -dp: replicas are for stageline serve"),
        (["generate", "m", "--gpu-memory-utilization=0.9"], "sized with --kv-cache-memory"),
        (["serve", "m", "--kv-cache-dtype", "fp8"], "--kv-cache-dtype fp8 is not supported: keys and values have"),
        (["serve", "m", "--enable-lora", "--lora-modules=a=b"], "a=b is not supported: LoRA adapters are not applied"),
        (["bench", "latency", "m", "--rope-scaling", "{}"], "as the model's config.json says (rope_scaling,"),
        (["bench", "serve", "--trust-remote-code", "--host", "h"], "--host h is not supported: write --base-url http"),
        (["bench", "serve", "--random-input-len=8"], "--random-input-len 8 is not supported: write --input-len"),
        (["bench", "serve", "--quite-something-else"], "unrecognized arguments: --quite-something-else (see"),
        (["serve", "m", "--quantization", "awq"], "--quantization awq is not supported: the model's files say how"),
        (["serve", "m", "--dtype=half"], "--dtype half is not supported: write float16"),
        (["serve", "-m", "m", "-c", "64"], "-m -c 64; -m: MODEL is given without a flag; -c: see --max-model-len"),
        (["bench", "serve", "--url", "h"], "unrecognized arguments: --url h; --url: see --base-url"),
        (["generate", "m", "--json-schema", "nofile.json"], "cannot read nofile.json: No such file or directory (see"),
        (["generate", "m", "-p", "x"], "unrecognized arguments: -p; -p: see --prompt (see stageline generate --help)"),
        (["generate", "m", "-t", "8", "--prompt", "x"], "unrecognized arguments: -t; -t: see --threads-per-stage"),
        (["serve", "m", "-d=2"], "unrecognized arguments: -d=2 (see stageline serve --help)"),
        (["bench", "serve", "--base-url", "localhost:8000"], "it must begin with http:// or https://"),
        (["serve", "m", "--served-model-name", "a", "b"], "unrecognized arguments: b (see stageline serve --help)"),
        (["serve", "m", "--quite-something-else"], "unrecognized arguments: --quite-something-else (see"),
    ],
)
def test_a_flag_that_is_not_known(capsys: pytest.CaptureFixture[str], typed: list[str], told: str) -> None:
    assert main(typed) == 2
    assert told in capsys.readouterr().err


def test_a_flag_that_changes_nothing_is_taken_with_its_value_and_a_note(capsys: pytest.CaptureFixture[str]) -> None:
    """Here the command fails for another reason: MODEL was read, and no prompt was given."""
    typed = ["--swap-space", "4", "MODEL", "--enforce-eager", "--kv-cache-dtype=auto", "--load-format", "gguf"]
    assert main(["generate", *typed]) == 2
    *notes, error = capsys.readouterr().err.splitlines()
    flags = ["--swap-space 4", "--enforce-eager", "--kv-cache-dtype auto", "--load-format gguf"]
    assert [note.partition(" changes nothing: ")[0] for note in notes] == [f"stageline: note: {flag}" for flag in flags]
    assert error.startswith("stageline: error: no prompt")


def test_no_flag_of_stageline_is_a_foreign_one() -> None:
    """The command's own flag would win, and the row be read by nobody."""
    commands = _commands(build_parser())
    serving = set(commands["serve"]._option_string_actions)
    loading = set(_commands(commands["bench"])["serve"]._option_string_actions)
    assert "--pipeline-parallel-size" in serving and not serving & FOREIGN_FLAGS.keys()
    assert "--max-concurrency" in loading and not loading & LOAD_GENERATOR_FLAGS.keys()


def _commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    return dict(next(action.choices for action in parser._actions if action.choices))  # type: ignore[arg-type]
