"""This host is measured with a model's own layers, by processes that are gone afterwards, whatever happens."""

from __future__ import annotations

from pathlib import Path

import msgspec
import psutil
import pytest

from stageline.checkpoint import open_checkpoint
from stageline.config.engine_config import EngineConfig
from stageline.cost.host_profile import HostProfile
from stageline.errors import ConfigError
from stageline.planner.calibrate import calibrate_host, this_host
from tests.tiny_models import TinyModel


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TinyModel(num_layers=4).write(tmp_path_factory.mktemp("tiny"))


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


@pytest.fixture(scope="module")
def calibration(model: Path) -> tuple[HostProfile, set[int]]:
    """A profile, and the processes that measuring it left behind."""
    before = children()
    profile = calibrate_host(EngineConfig(model=str(model)), open_checkpoint(str(model)).spec, point_s=0.0)
    return profile, children() - before


@pytest.fixture(scope="module")
def profile(calibration: tuple[HostProfile, set[int]]) -> HostProfile:
    return calibration[0]


def test_every_number_was_measured_and_none_is_absurd(profile: HostProfile, model: Path) -> None:
    checkpoint = open_checkpoint(str(model))
    assert profile.key == this_host(EngineConfig(model=str(model)), checkpoint.spec)
    assert profile.model == str(model) and len(profile.shape.layer_weights) == checkpoint.spec.num_layers
    assert all(time_s > 0 for curve in (profile.layer_s, profile.head_s) for time_s in curve.times_s)
    assert profile.attention_token_s > 0 and profile.stage_s >= 0
    assert all(factor >= 1.0 for contention in profile.contention for factor in contention.factors)
    for run in (profile.run, profile.crowded_run):
        assert min(run.begin_s, run.send_s, run.result_send_s) > 0
        costs = msgspec.structs.asdict(run)
        assert all(time_s >= 0 for name, time_s in costs.items() if name.endswith("_s"))
        assert all(0 < share <= 1 for share in run.core_share.factors) and all(work >= 1 for work in run.work.factors)
    alone = (profile.run_of(1).work.at(1), profile.run.core_share.at(1))
    assert alone == (1.0, 1.0), "a stage with a core of its own computes as alone"
    assert profile.message_send_s > 0 and profile.link_bytes_per_s > 0
    assert all(time_s >= 0 for time_s in msgspec.structs.astuple(profile.engine))
    assert profile.engine.launch_s + profile.engine.launch_row_s > 0


def test_no_measuring_process_and_no_stage_is_left(calibration: tuple[HostProfile, set[int]]) -> None:
    assert calibration[1] == set()


def test_a_model_that_cannot_be_run_is_refused_and_leaves_nothing(model: Path) -> None:
    before = children()
    spec = msgspec.structs.replace(open_checkpoint(str(model)).spec, family="abacus")
    with pytest.raises(ConfigError, match=r"cannot be measured here.*abacus"):
        calibrate_host(EngineConfig(model=str(model)), spec, point_s=0.0)
    assert children() - before == set()


def test_a_model_of_one_layer_is_refused_before_anything_starts(model: Path) -> None:
    spec = msgspec.structs.replace(open_checkpoint(str(model)).spec, num_layers=1)
    steps: list[str] = []
    with pytest.raises(ConfigError, match="one layer makes no pipeline; calibrate with one of two or more"):
        calibrate_host(EngineConfig(model=str(model)), spec, steps.append, point_s=0.0)
    assert steps == []
