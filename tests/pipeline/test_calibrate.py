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


@pytest.fixture(scope="module")
def profile(model: Path) -> HostProfile:
    return calibrate_host(EngineConfig(model=str(model)), open_checkpoint(str(model)).spec, point_s=0.0)


def test_every_number_was_measured_and_none_is_absurd(profile: HostProfile, model: Path) -> None:
    checkpoint = open_checkpoint(str(model))
    assert profile.key == this_host(EngineConfig(model=str(model)), checkpoint.spec)
    assert profile.model == str(model) and len(profile.shape.layer_weights) == checkpoint.spec.num_layers
    assert all(time_s > 0 for curve in (profile.layer_s, profile.head_s) for time_s in curve.times_s)
    assert profile.attention_token_s > 0 and profile.stage_s >= 0 and profile.prepare_s > 0
    assert all(factor >= 1.0 for contention in profile.contention for factor in contention.factors)
    assert profile.messages.send_s > 0 and profile.messages.bytes_per_s > 0
    assert all(time_s >= 0 for time_s in msgspec.structs.astuple(profile.engine))
    assert profile.engine.launch_s + profile.engine.launch_row_s > 0


def test_no_measuring_process_is_left(profile: HostProfile) -> None:
    assert [child for child in psutil.Process().children() if "host_measure" in " ".join(child.cmdline())] == []


def test_a_model_that_cannot_be_run_is_refused_and_leaves_nothing(model: Path) -> None:
    spec = msgspec.structs.replace(open_checkpoint(str(model)).spec, family="abacus")
    with pytest.raises(ConfigError, match=r"cannot be measured here.*abacus"):
        calibrate_host(EngineConfig(model=str(model)), spec, point_s=0.0)
    assert [child for child in psutil.Process().children() if "host_measure" in " ".join(child.cmdline())] == []
