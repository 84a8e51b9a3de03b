"""`stageline plan --simulate`: a host that was measured or a cluster from a file, and what cannot be simulated."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from stageline.cli.main import main
from stageline.config.engine_config import EngineConfig
from stageline.cost.host_profile import layer_shape, save_host_profile
from stageline.cost.model_costs import model_costs
from stageline.planner.calibrate import this_host
from stageline.planner.known_models import find_model
from tests.unit.test_host_profile import profile

MODEL = "qwen3-0.6b"
LOAD = ("--num-prompts", "6", "--prompt-tokens", "40", "--output-tokens", "5", "--concurrency", "3")
CLUSTER = """nodes:
  - {device: h100-sxm, devices_per_node: 2, count: 2, link: nvlink4}
network: ethernet-10g
"""


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def measured_host() -> None:
    """A profile of this machine, whatever it can do."""
    spec = find_model(MODEL).spec
    key = this_host(EngineConfig(model=MODEL), spec)
    save_host_profile(msgspec.structs.replace(profile(), key=key, shape=layer_shape(model_costs(spec))))


@pytest.mark.usefixtures("measured_host")
def test_a_measured_host_is_simulated_and_its_timeline_is_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, saved = tmp_path / "trace.json", tmp_path / "spans.json"
    files = ("--trace-out", str(trace), "--save", str(saved))
    assert main(["plan", MODEL, "--simulate", "-pp", "2", *LOAD, *files]) == 0
    out = capsys.readouterr().out
    assert "2 stages of this host" in out and "6 requests in" in out and "30  " in out
    assert all(name in out for name in ("TTFT", "TPOT", "ITL", "bubble by reason"))
    assert json.loads(trace.read_text())["traceEvents"]
    for source in (["--simulated"], [str(saved)], [str(trace)]):
        assert main(["timeline", *source, "--width", "80"]) == 0
        assert "busiest stage s1" in capsys.readouterr().out


def test_the_best_layout_of_a_cluster_is_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(CLUSTER)
    layout = ("--cluster", str(cluster), "-tp", "1", "-pp", "4", "-dp", "1")
    assert main(["plan", MODEL, "--simulate", *layout, *LOAD, "--request-rate", "50"]) == 0
    out = capsys.readouterr().out
    assert "TP1 x PP4" in out and "s3" in out and "6 requests in" in out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["plan", "--simulate"], "needs a model"),
        (["plan", MODEL, "--simulate"], "--calibrate"),
        (["plan", MODEL, "--simulate", "--num-prompts", "0"], "--num-prompts is 0"),
        (["plan", MODEL, "--simulate", "--request-rate", "-1"], "--request-rate is -1.0"),
        (["plan", MODEL, "--simulate", "--dataset-name", "azure"], "--dataset-path"),
        (["plan", MODEL, "--simulate", "--trace-out", "/nowhere/at/all"], "--trace-out"),
        (["plan", "qwen3-0.7b", "--calibrate"], "did you mean"),
        (["timeline", "--simulated"], "nothing was simulated yet"),
        (["timeline", "--simulated", "file.json"], "one of them"),
    ],
)
def test_what_cannot_be_simulated_is_refused_in_one_line(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1


@pytest.mark.usefixtures("measured_host")
def test_too_many_stages_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", MODEL, "--simulate", "-pp", "99"]) == 2
    assert "99" in capsys.readouterr().err
