"""A benchmark measures what comes after the warm-up, and prints and writes the same numbers."""

import json
from pathlib import Path
from typing import Any

import pytest

from stageline.cli import bench
from stageline.cli.bench_report import Percentiles
from stageline.cli.main import build_parser
from stageline.config.engine_config import EngineConfig
from stageline.errors import ConfigError
from tests.unit.fake_llm import FakeLLM


def _bench(mode: str, *argv: str) -> FakeLLM:
    opened = []

    def open_llm(config: EngineConfig) -> Any:
        opened.append(FakeLLM(config))
        return opened[-1]

    run = {"throughput": bench.run_throughput, "latency": bench.run_latency}[mode]
    args = build_parser().parse_args(["bench", mode, "model", "-pp", "2", *argv])
    try:
        assert run(args, open_llm) == 0
    finally:
        assert all(llm.is_closed for llm in opened)
    return opened[0]


SMALL = ("--num-prompts", "5", "--input-len", "7", "--output-len", "20")


def test_throughput_runs_random_prompts_of_the_asked_shape() -> None:
    warm_up, measured = _bench("throughput", *SMALL, "--num-warmup", "3").calls
    prompts, params = measured
    assert len(warm_up[0]) == 3 and len(prompts) == 5
    assert {len(prompt) for prompt in prompts} == {7}
    assert (params.max_tokens, params.temperature, params.ignore_eos) == (20, 0.0, True)
    assert not {tuple(p) for p in warm_up[0]} & {tuple(p) for p in prompts}


def test_the_same_seed_gives_the_same_prompts() -> None:
    first, second = (_bench("throughput", *SMALL, "--seed", "3").calls[-1][0] for _ in range(2))
    assert first == second != _bench("throughput", *SMALL, "--seed", "4").calls[-1][0]


def test_the_warm_up_is_not_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _bench("throughput", *SMALL, "--num-warmup", "4", "--output", str(tmp_path / "r.json"))
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["elapsed_s"] == pytest.approx(5 * 20 * 0.01)
    assert (result["num_requests"], result["num_prompt_tokens"], result["num_output_tokens"]) == (5, 35, 100)
    assert result["output_tokens_per_s"] == pytest.approx(100.0)
    assert result["ttft"]["p50_s"] == pytest.approx(0.01)
    assert result["tpot"]["p99_s"] == pytest.approx(0.01)
    assert (result["itl"]["p50_s"], result["itl"]["p99_s"]) == pytest.approx((0.01, 0.01))
    assert [stage["busy_fraction"] for stage in result["stages"]] == pytest.approx([0.5, 0.5])
    assert result["config"]["pipeline_parallel_size"] == 2
    out = capsys.readouterr().out
    for words in ("requests/s", "TTFT", "TPOT", "ITL", "p99", "waiting for input", "blocked on output", "bubble"):
        assert words in out


def test_the_timeline_holds_only_the_measured_microbatches(tmp_path: Path) -> None:
    _bench("throughput", *SMALL, "--timeline", str(tmp_path / "t.json"))
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 2 * 100


def test_prompts_from_a_file_end_where_the_model_ends_them(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("a\nb\nc\n")
    prompts, params = _bench("throughput", "--prompt-file", str(tmp_path / "p.txt"), "--num-prompts", "2").calls[-1]
    assert prompts == ["a", "b"] and params.ignore_eos is False
    with pytest.raises(ConfigError, match="holds 3"):
        _bench("throughput", "--prompt-file", str(tmp_path / "p.txt"), "--num-prompts", "4")


def test_prompts_that_do_not_fit_the_model_are_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"500 .* 64 make 564 .* 512"):
        _bench("throughput", "--input-len", "500")


def test_latency_times_each_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("--batch-size", "2", "--num-iters", "3", "--num-warmup", "1", "--output-len", "10")
    llm = _bench("latency", *argv, "--output", str(tmp_path / "r.json"))
    assert [len(prompts) for prompts, _ in llm.calls] == [2, 2, 2, 2]
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["batch_times_s"] == pytest.approx([0.2] * 3)
    assert "batch" in capsys.readouterr().out


def test_percentiles_of_nothing_are_none_and_of_one_time_that_time() -> None:
    assert Percentiles.of([]) is None
    assert Percentiles.of([2.0]) == Percentiles(2.0, 2.0, 2.0, 2.0, 2.0)
