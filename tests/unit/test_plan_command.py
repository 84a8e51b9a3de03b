"""`stageline plan` as it is typed: what it prints and writes, and one line for what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from stageline.cli.main import build_parser, main
from stageline.cli.plan_flags import USES
from tests.unit.plan_clusters import HOME, TWO_NODES_OF_H100, cluster_file


def test_a_plan_names_the_best_layout_its_stages_advice_and_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    yaml, png = tmp_path / "plan.yaml", tmp_path / "plan.png"
    file = cluster_file(tmp_path, TWO_NODES_OF_H100)
    words = ["plan", "llama-3.1-70b", "--cluster", file, "-tp", "8", "--yaml", str(yaml), "--pareto", str(png)]
    words += ["--speculate-tokens", "4", "--speculate-acceptance", "0.5"]
    assert main(words) == 0
    out = capsys.readouterr().out
    for part in (
        "meta-llama/Llama-3.1-70B: 80 layers, hidden 8,192, weights bf16",
        "2 nodes of 8 x h100-sxm (nvlink4), joined by infiniband-ndr",
        "1  TP8 x PP1 x DP2",
        "s0 limits the KV cache",
        "- replicas: two replicas beat this pipeline",
        "# NODE1, layers 0 to 79, replica 1\nstageline serve meta-llama/Llama-3.1-70B -tp 8 -pp 1",
        "# -tp above 1 has been measured on CPUs only",
        "- guessing ahead: 4 tokens guessed, each right in 50%, make 1.94 tokens a pass",
    ):
        assert part in out
    assert yaml.read_text().startswith("model: meta-llama/Llama-3.1-70B\n")
    assert png.read_bytes().startswith(b"\x89PNG")


def test_a_plan_with_experts_tells_how_they_are_shared_and_what_weights_it_takes_them_to_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = cluster_file(tmp_path, TWO_NODES_OF_H100)
    words = ["plan", "gpt-oss-20b", "--cluster", file, "-tp", "8", "-pp", "1", "-dp", "1", "--kv-cache-dtype", "fp8"]
    assert main(words) == 0
    out = capsys.readouterr().out
    for part in (
        "1  TP8+EP x PP1",
        "the best; no EP: ",
        "- experts whole or in parts: 64 rows take 32.0 of 32 experts",
        "# weights are planned in mxfp4, but the engine makes them 16 bits when it loads them; --weights bf16 plans",
        "# the KV cache is planned in fp8, but the engine keeps it in its compute dtype",
        "stageline serve openai/gpt-oss-20b -tp 8 -pp 1 --enable-expert-parallel ",
    ):
        assert part in out


@pytest.mark.parametrize(
    ("shape", "note"),
    [
        (["-tp", "8", "-pp", "2"], "\n# once, and copied to every machine: stageline key new --out cluster.key\n"),
        (["-tp", "16"], "a stage is planned over 2 machines, but the engine keeps its ranks on one: plan with -tp 8\n"),
        (["-tp", "8", "-pp", "1"], ""),
    ],
)
def test_commands_for_several_machines_come_with_what_they_need(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], shape: list[str], note: str
) -> None:
    assert main(["plan", "llama-3.1-70b", "--cluster", cluster_file(tmp_path, TWO_NODES_OF_H100), *shape]) == 0
    out = capsys.readouterr().out
    assert note in out
    # Two replicas of one machine each have nothing to protect.
    assert ("cluster.key" in out) == bool(note)


def test_the_table_is_printed_as_it_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--table"]) == 0
    assert "  8x2    16    64     8.85     7233          452" in capsys.readouterr().out
    assert main(["plan", "--table", "one-tensor-hop"]) == 0
    assert "  8x2    16    64     8.84     7241          453" in capsys.readouterr().out


def test_known_names_are_listed_with_their_sources(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--list"]) == 0
    out = capsys.readouterr().out
    assert "qwen3-235b-a22b" in out
    assert "NVIDIA H100 Tensor Core GPU datasheet" in out
    assert "IEEE 802.3ab" in out


def test_a_cluster_file_that_is_no_yaml_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.yaml").write_text(": [")
    assert main(["plan", "llama-3.1-8b", "--cluster", str(tmp_path / "c.yaml")]) == 2
    error = capsys.readouterr().err
    assert "c.yaml: while parsing" in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plan"], "give a model and --cluster FILE, or --table, or --list"),
        (["plan", "llama-3.1-8b"], "give a model and --cluster FILE"),
        (["plan", "--table", "mine"], "--table 'mine' is not known; known are two-tensor-hop, one-tensor-hop"),
        (["plan", "llama-9", "--cluster", "FILE"], "model 'llama-9' is not known; did you mean"),
        (["plan", "llama-3.1-8b", "--cluster", "none.yaml"], "none.yaml cannot be read"),
        (["plan", "llama-3.1-8b", "--cluster", "FILE", "--top", "0"], "--top is 0; it must be at least 1"),
        (["plan", "llama-3.1-8b", "--cluster", "FILE", "--concurrency", "-3"], "--concurrency is -3"),
        (["plan", "llama-3.1-8b", "--cluster", "FILE", "--speculate-tokens", "-1"], "--speculate-tokens is -1"),
        (["plan", "llama-3.1-8b", "--cluster", "FILE", "--speculate-acceptance", "2"], "must be between 0 and 1"),
        (["plan", "llama-3.1-8b", "--cluster", "FILE", "--prompt-tokens", "131072"], "takes at most 131,072"),
        (["plan", "llama-3.1-8b", "--cluster", "FILE", "--yaml", "/nowhere/x"], "--yaml /nowhere/x cannot be written"),
        (["plan", "llama-3.1-8b", "--cluster", "FILE", "-tp", "5"], "32 heads and 8 KV heads do not divide over 5"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_the_way_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    file = cluster_file(tmp_path, HOME)
    assert main([file if word == "FILE" else word for word in words]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--table", "--list"], "--table does nothing with --list; leave it out, or use it with --table"),
        (["llama-3.1-8b", "--table"], "MODEL does nothing with --table"),
        (["--list", "--concurrency", "3", "-tp", "2"], "--concurrency and --tensor-parallel-size do nothing with"),
        (["m", "--calibrate", "-pp", "2"], "--pipeline-parallel-size does nothing with --calibrate"),
        (["m", "--cluster", "f", "--num-prompts", "3"], "or use it with --simulate on this host or --simulate --"),
        (["m", "--cluster", "f", "--speculate-acceptance", "0.5"], "of the guesses of --speculate-tokens"),
        (["m", "--simulate", "-tp", "2"], "as one pipeline whose stages are one process each); leave it out, or"),
        (["m", "--simulate", "-dp", "2"], "--data-parallel-size does nothing with --simulate on this host"),
        (["m", "--simulate", "--weights", "int4"], "--weights does nothing with --simulate on this host"),
        (["m", "--simulate", "--calibrate", "--objective", "tpot"], "nothing with --calibrate --simulate on this host"),
        (["m", "--simulate", "--cluster", "f", "--yaml", "x"], "--yaml does nothing with --simulate --cluster FILE"),
        (["m", "--simulate", "--cluster", "f", "--speculate-tokens", "2"], "--speculate-tokens does nothing with"),
        (["m", "--simulate", "--burstiness", "2"], "--burstiness does nothing here: it is of the gaps of a finite"),
        (["m", "--simulate", "--prefix-len", "2"], "--prefix-len does nothing here: it is of --dataset-name prefix"),
        (["m", "--simulate", "--time-scale", "2"], "it scales a trace's times where no --request-rate replaces them"),
        (
            ["m", "--simulate", "--dataset-name", "sharegpt", "--prompt-tokens", "9"],
            "--prompt-tokens does nothing here: sharegpt has lengths of its own",
        ),
        (
            ["m", "--simulate", "--dataset-name", "azure", "--dataset-path", "f", "--seed", "9"],
            "--seed does nothing here: nothing is drawn",
        ),
        (
            ["m", "--simulate", "--dataset-name", "azure", "--dataset-path", "f", "--request-rate", "inf"],
            "--request-rate does nothing here: a trace has times of its own",
        ),
    ],
)
def test_no_flag_is_ignored_in_silence(capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    assert main(["plan", *words]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1
    assert captured.out == ""


def test_every_flag_of_a_plan_is_read_by_something() -> None:
    given = vars(build_parser().parse_args(["plan"])).keys() - {"run"}
    assert given == frozenset().union(*USES.values())
