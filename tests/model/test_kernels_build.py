"""Kernels are compiled once, by the package's installation or at first use; who has no compiler computes with torch."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import select
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import msgspec
import pytest
import torch

from stageline import kernels
from stageline.errors import ConfigError
from stageline.kernels import build
from tests.architecture.source_tree import ROOT

# Stands in for a compiler: says its version, notes every call, and writes a file where the output belongs.
COMPILER = """#!/bin/sh
if [ "$1" = --version ]; then echo "{version}"; exit 0; fi
echo "$@" >> "{calls}"
while [ $# -gt 0 ]; do
    if [ "$1" = -o ]; then echo library > "$2"; fi
    shift
done
"""
BROKEN = """#!/bin/sh
if [ "$1" = --version ]; then echo 1; exit 0; fi
echo "some context" >&2
echo "no such flag" >&2
exit 1
"""

# Tells who it is and who started it, and is never done.
ENDLESS = """#!/bin/sh
if [ "$1" = --version ]; then echo 1; exit 0; fi
echo $$ $PPID > "{started}"
exec /bin/sleep 600
"""


class Machine:
    """A directory of compilers, which is all of PATH, a place for the cache, and a package without a library."""

    def __init__(self, directory: Path) -> None:
        self.bin, self.cache, self.calls = directory / "bin", directory / "cache" / "stageline", directory / "calls"
        self.package = directory / "package"
        self.bin.mkdir()
        self.package.mkdir()

    def install(self, program: str, name: str = "c++") -> None:
        (self.bin / name).write_text(program)
        (self.bin / name).chmod(0o755)

    def install_working(self, version: str = "1.0") -> None:
        self.install(COMPILER.format(version=version, calls=self.calls))

    @property
    def num_libraries_linked(self) -> int:
        return sum("-shared" in call for call in self.calls.read_text().splitlines()) if self.calls.exists() else 0


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(tmp_path)
    monkeypatch.setattr(build, "PACKAGE", made.package)
    monkeypatch.setenv("PATH", str(made.bin))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return made


def test_a_library_is_compiled_once_and_found_afterwards(machine: Machine) -> None:
    machine.install_working()
    library = build.build_library(machine.cache)
    assert build.build_library(machine.cache) == library and library.read_text() == "library\n"
    assert machine.num_libraries_linked == 1
    assert [path.name for path in machine.cache.iterdir() if path.name != "lock"] == [library.name]


def test_the_cache_is_for_this_user_alone(machine: Machine) -> None:
    machine.install_working()
    build.build_library(machine.cache)
    assert machine.cache.stat().st_mode & 0o777 == 0o700


def test_a_cache_that_others_may_write_to_is_refused(machine: Machine) -> None:
    machine.install_working()
    machine.cache.mkdir(parents=True)
    machine.cache.chmod(0o777)
    with pytest.raises(build.KernelBuildError, match="chmod 700"):
        build.build_library(machine.cache)


def test_another_compiler_or_source_makes_another_library(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.install_working("1.0")
    first = build.build_library(machine.cache)
    machine.install_working("2.0")
    second = build.build_library(machine.cache)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "supported.cpp").write_text("int x;")
    monkeypatch.setattr(build, "SOURCE", tmp_path / "source")
    assert len({first, second, build.build_library(machine.cache)}) == 3


def test_processes_that_start_together_compile_once(machine: Machine) -> None:
    machine.install_working()
    program = (
        "import pathlib\n"
        "from stageline.config.environment import cache_directory\n"
        "from stageline.kernels import build\n"
        f"build.PACKAGE = pathlib.Path({str(machine.package)!r})\n"
        "print(build.build_library(cache_directory()))"
    )
    command, environment = [sys.executable, "-c", program], dict(os.environ)
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) for _ in range(3)]
    libraries = {process.communicate(timeout=120)[0] for process in running}
    assert all(process.returncode == 0 for process in running)
    assert len(libraries) == 1 and machine.num_libraries_linked == 1


def test_a_disk_without_locks_costs_nobody_the_kernels_nor_what_another_process_compiles(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", without_locks)
    machine.install_working()
    machine.cache.mkdir(mode=0o700, parents=True)
    others = machine.cache / f"{build._UNFINISHED}other"
    others.mkdir()
    assert build.build_library(machine.cache).read_text() == "library\n"
    assert others.exists()


def test_who_waits_for_another_process_to_compile_says_so(machine: Machine) -> None:
    machine.install_working()
    machine.cache.mkdir(mode=0o700, parents=True)
    told: list[str] = []
    with (machine.cache / "lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)

        class Done(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                told.append(record.getMessage())
                fcntl.flock(other, fcntl.LOCK_UN)

        handler, level = Done(), build.logger.level
        build.logger.addHandler(handler)
        build.logger.setLevel(logging.INFO)
        try:
            # Were nothing said, nobody would let it go on.
            assert build.build_library(machine.cache).exists()
        finally:
            build.logger.removeHandler(handler)
            build.logger.setLevel(level)
    assert "which another process compiles" in told[0]


def test_a_failing_compiler_leaves_nothing_and_its_last_words_are_told(machine: Machine) -> None:
    machine.install(BROKEN)
    with pytest.raises(build.KernelBuildError, match="no such flag"):
        build.build_library(machine.cache)
    assert [path.name for path in machine.cache.iterdir()] == ["lock"]


def test_compilers_do_not_outlive_who_started_them_and_leave_nothing(machine: Machine, tmp_path: Path) -> None:
    """Killed, so that nothing can be done about it there."""
    os.mkfifo(tmp_path / "started")
    machine.install(ENDLESS.format(started=tmp_path / "started"))
    program = (
        "import pathlib\n"
        "from stageline.kernels import build\n"
        f"build.PACKAGE = pathlib.Path({str(machine.package)!r})\n"
        f"build.build_library(pathlib.Path({str(machine.cache)!r}))"
    )
    with subprocess.Popen([sys.executable, "-c", program]) as starter, (tmp_path / "started").open() as started:
        processes = [os.pidfd_open(int(pid)) for pid in started.readline().split()]
        starter.kill()
        for process in processes:
            assert select.select([process], [], [], 60)[0], "it goes on"
            os.close(process)
    assert [path.name for path in machine.cache.iterdir()] == ["lock"]


def test_first_use_compiles_the_variant_that_this_machine_runs_best(machine: Machine) -> None:
    machine.install_working()
    [best, *others] = build.runnable_variants()
    assert build.build_library(machine.cache).name.startswith(f"kernels-{best}-")
    compiled = machine.calls.read_text()
    assert f"-DSTAGELINE_VARIANT={best}" in compiled
    assert not any(f"-DSTAGELINE_VARIANT={other}" in compiled for other in others)
    assert build.build_library(machine.cache, "portable").name.startswith("kernels-portable-")


@pytest.mark.parametrize("compiler", [None, BROKEN, COMPILER.format(version=1, calls="/dev/null")])
def test_without_a_working_library_the_log_says_so_once_and_torch_computes(
    machine: Machine, compiler: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No compiler, one that fails, and one whose library cannot be loaded."""
    if compiler is not None:
        machine.install(compiler)
    warnings: list[str] = []
    monkeypatch.setattr(kernels.logger, "warning", lambda message, *words: warnings.append(message % words))
    assert kernels.load_kernels.__wrapped__("auto") is None
    [warning] = warnings
    assert "torch computes instead" in warning


def _put_library(path: Path) -> None:
    """Any library that can be loaded."""
    shutil.copy(msgspec._core.__file__, path)


def test_the_packages_library_is_taken_without_a_compiler(machine: Machine) -> None:
    _put_library(build.packaged_library())
    assert build.build_library(machine.cache) == build.packaged_library()
    assert not machine.cache.exists()


def test_the_packages_library_is_left_when_the_sources_change(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.install_working()
    _put_library(build.packaged_library())
    shutil.copytree(build.SOURCE, tmp_path / "source")
    (tmp_path / "source" / "rows.h").write_text("int x;")
    monkeypatch.setattr(build, "SOURCE", tmp_path / "source")
    assert build.build_library(machine.cache).parent == machine.cache


def test_a_packages_library_that_cannot_be_loaded_is_compiled_again(machine: Machine) -> None:
    machine.install_working()
    build.packaged_library().write_text("for another system")
    assert build.build_library(machine.cache).parent == machine.cache


@pytest.fixture
def source_tree(tmp_path: Path) -> Path:
    """What the package is built from, as far as the kernels are concerned."""
    tree = tmp_path / "tree"
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "src/stageline/__init__.py"):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tree / name)
    package = Path("src", "stageline", "kernels")
    shutil.copytree(ROOT / package, tree / package, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return tree


def _build(kind: str, tree: Path) -> list[str]:
    """Build a wheel of `kind` as pip does. Returns: the libraries in it."""
    command = [sys.executable, "-c", f"from setuptools.build_meta import {kind}; {kind}('dist')"]
    run = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    [wheel] = (tree / "dist").glob("*.whl")
    return [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]


def _packaged(tree: Path) -> list[str]:
    return [path.name for path in (tree / "src" / "stageline" / "kernels").glob("*.so")]


def test_a_wheel_has_the_library_of_its_sources_and_no_other(machine: Machine, source_tree: Path) -> None:
    machine.install_working()
    old = source_tree / "src" / "stageline" / "kernels" / "prebuilt-of-other-sources.so"
    old.write_text("")
    assert _build("build_wheel", source_tree) == [f"stageline/kernels/{build.packaged_library().name}"]
    assert _packaged(source_tree) == [old.name]


def test_an_editable_installation_compiles_into_the_source_tree_once(machine: Machine, source_tree: Path) -> None:
    machine.install_working()
    for _ in range(2):
        (source_tree / "src" / "stageline" / "kernels" / "prebuilt-of-other-sources.so").write_text("")
        assert _build("build_editable", source_tree) == []
        assert _packaged(source_tree) == [build.packaged_library().name]
    assert machine.num_libraries_linked == 1


@pytest.mark.parametrize("kind", ["build_wheel", "build_editable"])
@pytest.mark.parametrize("compiler", [None, BROKEN])
def test_the_package_is_built_without_a_working_compiler(
    machine: Machine, source_tree: Path, kind: str, compiler: str | None
) -> None:
    if compiler is not None:
        machine.install(compiler)
    assert _build(kind, source_tree) == [] == _packaged(source_tree)


def test_an_unknown_choice_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"STAGELINE_KERNELS is 'sse'.*avx512, avx2, portable, torch"):
        kernels.load_kernels("sse")


def test_torch_can_be_asked_for() -> None:
    assert kernels.load_kernels("torch") is None


def test_kernels_take_bfloat16_and_float32_on_a_cpu_only() -> None:
    assert kernels.library(torch.device("cuda"), torch.bfloat16) is None
    assert kernels.library(torch.device("cpu"), torch.float16) is None
