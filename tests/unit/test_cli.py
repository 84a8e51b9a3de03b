"""The command line: what is typed reaches the engine, results are printed, and every error is one clear line."""

import argparse
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import stageline
from stageline.cli import generate
from stageline.cli.main import build_parser, main
from stageline.config.engine_config import EngineConfig
from stageline.errors import ConfigError, RequestError, StagelineError, WorkerLost
from stageline.sampling import SamplingParams
from tests.unit.fake_llm import FakeLLM


def _generate(*argv: str) -> FakeLLM:
    opened = []

    def open_llm(config: EngineConfig) -> Any:
        opened.append(FakeLLM(config))
        return opened[-1]

    assert generate.run(build_parser().parse_args(["generate", "model", *argv]), open_llm) == 0
    [llm] = opened
    assert llm.is_closed
    return llm


def _main_that_raises(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> int:
    def run(args: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr(generate, "run", run)
    return main(["generate", "model", "--prompt", "x"])


def test_a_single_completion_is_printed_bare(capsys: pytest.CaptureFixture[str]) -> None:
    _generate("--prompt", "the sea")
    assert capsys.readouterr().out == "about the sea\n"


def test_several_completions_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    _generate("--prompt", "one", "--prompt", "two", "--n", "2")
    out = capsys.readouterr().out
    assert out.count("=== ") == 2 and out.count("--- completion") == 4
    assert out.index("=== one") < out.index("about one") < out.index("=== two") < out.index("about two")


def test_json_is_one_object_per_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    _generate("--prompt", "one", "--prompt", "two", "--json", "--max-tokens", "3")
    objects = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [item["prompt"] for item in objects] == ["one", "two"]
    assert objects[0]["outputs"][0]["token_ids"] == [2, 2, 2]
    assert objects[0]["outputs"][0]["timings"]["first_token_s"] > 0


def test_flags_reach_the_engine_and_the_sampler() -> None:
    llm = _generate("--prompt", "x", "-pp", "2", "--temperature", "0", "--stop", "a", "--stop", "b", "--top-p", "0.5",
                    "--logit-bias", "4:-2,7:1.5", "--stop-token-ids", "1,2", "--ignore-eos")  # fmt: skip
    assert llm.config.pipeline_parallel_size == 2
    params = llm.calls[0][1]
    assert (params.temperature, params.top_p, params.stop, params.ignore_eos) == (0.0, 0.5, ["a", "b"], True)
    assert params.logit_bias == {4: -2.0, 7: 1.5}
    assert params.stop_token_ids == [1, 2]


def test_what_is_not_given_stays_the_models_own() -> None:
    params = _generate("--prompt", "x").calls[0][1]
    assert (params.temperature, params.top_k) == (0.6, 50)
    assert params.max_tokens == generate.DEFAULT_MAX_TOKENS


def test_none_asks_for_no_limit_but_the_model_s() -> None:
    assert _generate("--prompt", "x", "--max-tokens", "none").calls[0][1].max_tokens is None
    assert _generate("--prompt", "x", "--max-tokens", "7").calls[0][1].max_tokens == 7


def test_every_sampling_field_has_a_described_flag() -> None:
    [commands] = [a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction)]
    actions = {action.dest: action for action in commands.choices["generate"]._actions}
    for name in SamplingParams.__struct_fields__:
        assert actions[name].help, name


def test_prompts_come_from_a_file_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "prompts.txt").write_text("first\n\nsecond\n")
    llm = _generate("--prompt", "zeroth", "--prompt-file", str(tmp_path / "prompts.txt"))
    assert llm.calls[0][0] == ["zeroth", "first", "second"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("piped\n"))
    assert _generate("--prompt-file", "-").calls[0][0] == ["piped"]


def test_chat_flag_makes_each_prompt_a_conversation() -> None:
    llm = _generate("--prompt", "hello", "--chat")
    assert llm.calls[0][0] == [[{"role": "user", "content": "hello"}]]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["generate", "m"], "--prompt"),
        (["generate"], "MODEL"),
        (["generate", "m", "--prompt", "x", "--block-size", "many"], "--block-size"),
        (["generate", "m", "--prompt", "x", "-pp", "0"], "--pipeline-parallel-size is 0"),
        (["generate", "m", "--prompt-file", "missing"], "error: --prompt-file missing cannot be read: No such file"),
        (["generate", "m", "--prompt", "x", "--top-p", "1.5"], "top_p is 1.5; it must be above 0 and at most 1"),
        (["generate", "m", "--prompt", "x", "--max-tokens", "few"], "'few' is neither a number of tokens nor none"),
        (["generate", "", "--prompt", "x"], "the model's name is empty"),
        (["generate", "m", "--prompt", "x", "--logit-bias", "seven"], "ID:BIAS"),
        (["generate", "m", "--prompt", "x", "--flyy"], "--flyy (see stageline generate --help)"),
        (["bench", "latency", "m", "--flyy"], "--flyy (see stageline bench latency --help)"),
        (["fly"], "fly"),
        ([], "COMMAND"),
        (["bench", "throughput", "m", "--num-prompts", "0"], "--num-prompts is 0"),
        (["bench", "throughput", "m", "--output", "no/such/folder/x.json"], "no/such/folder"),
        (["bench", "latency", "m", "--num-iters", "0"], "--num-iters is 0"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_status_2(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("stageline: error: ") and error.count("\n") == 1
    assert words in error


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigError("bad"), 2),
        (RequestError("bad", "prompt"), 2),
        (WorkerLost(1, "killed"), 1),
        (StagelineError("bad"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_the_exit_status_tells_whose_fault_it_was(
    error: BaseException, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _main_that_raises(monkeypatch, error) == status
    assert "Traceback" not in capsys.readouterr().err


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"stageline {stageline.__version__}\n"


@pytest.mark.parametrize(
    "command", [["generate"], ["chat"], ["bench", "throughput"], ["bench", "latency"]], ids=" ".join
)
def test_help_begins_with_its_usage_and_ends_with_an_example(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([*command, "--help"])
    text = capsys.readouterr().out
    assert text.startswith(f"usage: stageline {' '.join(command)} MODEL")
    assert "example:\n  stageline " + " ".join(command) in text
    assert "None)" not in text


def test_help_loads_no_torch() -> None:
    program = (
        "import sys, stageline.cli.main as m\n"
        "try: m.main(['generate', '--help'])\n"
        "except SystemExit: pass\n"
        "sys.exit('torch' in sys.modules or 'stageline.engine.llm' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=30).returncode == 0


@pytest.mark.parametrize("closed", [0, 1, 2])
def test_a_closed_standard_stream_is_as_good_as_dev_null(closed: int) -> None:
    command = f'exec "{sys.executable}" -m stageline generate "" {closed}{"<" if closed == 0 else ">"}&-'
    run = subprocess.run(["sh", "-c", command], stdin=subprocess.DEVNULL, capture_output=True, timeout=30, text=True)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith("stageline: error: the model's name is empty") if closed != 2 else run.stderr == ""
    assert "Traceback" not in run.stderr


def test_a_reader_that_went_away_is_no_error() -> None:
    program = (
        "import sys\n"
        "from stageline.cli import generate, main\n"
        "generate.run = lambda args: print('an answer') or 0\n"
        "sys.exit(main.main(['generate', 'model']))"
    )
    read_end, write_end = os.pipe()
    os.close(read_end)
    run = subprocess.run([sys.executable, "-c", program], stdout=write_end, stderr=subprocess.PIPE, timeout=30)
    os.close(write_end)
    assert (run.returncode, run.stderr) == (141, b"")
