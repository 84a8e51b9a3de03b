"""Imports point down: the table in rooms.py is what every file keeps, and the pure side never loads torch."""

from __future__ import annotations

import graphlib
import re
import subprocess
import sys

import pytest

from tests.architecture.rooms import COMMON, EXCEPTIONS, IMPORTS, LAZY_IMPORTS, TORCH_ROOMS
from tests.architecture.source_tree import Import, modules, room_of, stageline_imports


def _is_allowed(found: Import) -> bool:
    importer, imported = room_of(found.importer), room_of(found.imported)
    if importer == imported or (importer, found.imported) in EXCEPTIONS:
        return True
    if (importer, imported) in LAZY_IMPORTS:
        return found.is_lazy or found.is_for_types
    common = set() if importer in COMMON else COMMON
    return imported in IMPORTS[importer] | common


def test_the_table_has_every_room_and_no_other() -> None:
    assert {room_of(module) for module in modules()} == set(IMPORTS)


def test_rooms_import_only_what_the_table_allows() -> None:
    assert [str(found) for found in stageline_imports() if not _is_allowed(found)] == []


def test_the_table_has_no_cycle() -> None:
    common = {room: (set() if room in COMMON else COMMON) for room in IMPORTS}
    order = graphlib.TopologicalSorter({room: allowed | common[room] for room, allowed in IMPORTS.items()})
    order.prepare()


def test_no_two_modules_import_each_other_when_loaded() -> None:
    graph: dict[str, set[str]] = {module: set() for module in modules()}
    for found in stageline_imports():
        if not found.is_lazy and not found.is_for_types:
            graph[found.importer].add(found.imported)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(error.args[1])}")


def test_the_pure_side_loads_no_torch() -> None:
    pure = [m for m in modules() if room_of(m) not in TORCH_ROOMS and not m.endswith("__main__")]
    program = (
        f"import importlib, sys\nfor name in {pure!r}:\n    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules: sys.exit(f'{name} loads torch')"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr


FORBIDDEN = {
    "pickled objects run code": r"\bpickle\b|recv_pyobj|send_pyobj|torch\.load\(",
    "a checkpoint's code is never run": r"trust_remote_code",
    "a socket on every interface": r"tcp://\*|0\.0\.0\.0",
    "references of tests only": r"^\s*(import|from) (transformers|gguf)\b",
    "nothing evaluates text": r"\b(eval|exec)\(",
    "nothing sleeps": r"\bsleep\(|\bEvent\(\)\.wait\(",
    "nothing asks what its own objects are": r"\bhasattr\((?!os,)",
}


# Meant: a stage that is slowed down on purpose, to see what that does.
ALLOWED = {("nothing sleeps", "stageline.worker.stretch")}


@pytest.mark.parametrize("reason", FORBIDDEN)
def test_the_source_is_free_of(reason: str) -> None:
    pattern = re.compile(FORBIDDEN[reason])
    found = [
        f"{module}:{number}: {line.strip()}"
        for module, path in modules().items()
        if (reason, module) not in ALLOWED
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if pattern.search(line)
    ]
    assert found == []
