"""One network of three machines for all tests of clusters, and a small chat model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from stageline.links.keys import ClusterKey
from tests.cluster.machines import PORT, Machines, machines
from tests.cluster.network import Network, NotPermitted
from tests.tiny_models import TinyModel


@pytest.fixture(scope="session")
def network() -> Iterator[Network]:
    try:
        made = Network(3)
    except NotPermitted as error:
        pytest.skip(str(error))
    yield made
    made.close()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(TinyModel(num_layers=4).write(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="session")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_key(tmp_path_factory.mktemp("key") / "key")


def write_key(path: Path) -> Path:
    path.touch(mode=0o600)
    path.write_text(ClusterKey.new().text() + "\n")
    return path


@pytest.fixture
def several(network: Network, tiny_model: str, key_file: Path) -> Iterator[Machines]:
    """Nothing runs yet; beside a pipeline that several tests share."""
    with machines(network, tiny_model, key_file, PORT + 100) as made:
        yield made
