"""Finds the compiled kernels: in the package, where its installation put them, or in a cache that first use fills.

One idea: the library's name is a hash of what goes into it, so it is never out of date; it is compiled under another
name and renamed when complete, so it is never seen half-made. Processes that start together wait for the first one's
compiler instead of starting their own. setup.py loads this file by its path, so it needs the standard library only.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)

PACKAGE = Path(__file__).parent
SOURCE = PACKAGE / "source"
_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno", "-pthread")
_X86_VARIANTS = {
    "avx512": (
        *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16", "-mavx512vnni"),
        *("-mavx2", "-mfma"),
    ),
    "avx2": ("-mavx2", "-mfma"),
}
_WITHOUT_VARIANTS = ("program", "supported")
_PRIVATE = 0o700
_COMPILER_LIMIT_S = 300


class KernelBuildError(Exception):
    """There are no compiled kernels; the message says why. Never reaches the user: the torch fallback is used."""


def variant_flags() -> dict[str, tuple[str, ...]]:
    """The variants that are compiled for this kind of machine, fastest first, and their compiler flags."""
    x86 = _X86_VARIANTS if platform.machine() in ("x86_64", "AMD64") else {}
    return {**x86, "portable": ()}


def build_library(cache_directory: Path) -> Path:
    """The shared library of all variants: the package's own, or the cache's, compiled now if it is in neither.

    Args:
        cache_directory: made, for this user alone, if missing.
    Raises: KernelBuildError if there is no compiler, it fails, or the directory cannot be used safely.
    """
    packaged = packaged_library()
    if packaged.exists() and _can_load(packaged):
        return packaged
    compiler = find_compiler()
    try:
        _make_private(cache_directory)
        library = cache_directory / f"kernels-{_fingerprint(compiler, _version(compiler))}.so"
        if library.exists():
            return library
        with _lock(cache_directory / "lock"):
            if not library.exists():
                logger.info("compiling the CPU kernels with %s, once; this takes about 20 s", compiler)
                compile_library(compiler, library)
        return library
    except OSError as error:
        raise KernelBuildError(f"cannot write to {cache_directory}: {error}") from error


def packaged_library() -> Path:
    """Where the package has its library if it was compiled from these sources, for this kind of machine."""
    return PACKAGE / f"prebuilt-{_fingerprint()}.so"


def compile_library(compiler: str, library: Path) -> None:
    """Compile all variants into `library`, whose directory exists. Raises: KernelBuildError, OSError."""
    with tempfile.TemporaryDirectory(dir=library.parent) as directory:
        objects = Path(directory)
        _run_all(_compile_commands(compiler, objects))
        linked = objects / "linked.so"
        _run_all([[compiler, "-shared", "-pthread", "-Wl,-s", *map(str, objects.glob("*.o")), "-o", str(linked)]])
        linked.replace(library)


def find_compiler() -> str:
    """Path of the system's C++ compiler. Raises: KernelBuildError if there is none."""
    for name in _COMPILERS:
        if path := shutil.which(name):
            return path
    raise KernelBuildError(f"no C++ compiler found ({', '.join(_COMPILERS)})")


def _make_private(directory: Path) -> None:
    """A library that another user could have put there must not be loaded."""
    directory.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
    status = directory.stat()
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise KernelBuildError(f"{directory} must belong to this user and be writable by nobody else: chmod 700")


def _can_load(library: Path) -> bool:
    """A package may have been built on a newer system than this one."""
    try:
        ctypes.CDLL(str(library))
    except OSError as error:
        logger.info("the package's compiled CPU kernels cannot be loaded here: %s", error)
        return False
    return True


def _version(compiler: str) -> bytes:
    return subprocess.run([compiler, "--version"], capture_output=True, timeout=_COMPILER_LIMIT_S).stdout


def _fingerprint(*compiler: object) -> str:
    digest = hashlib.sha256(repr((compiler, platform.machine(), _FLAGS, variant_flags())).encode())
    for source in sorted(SOURCE.iterdir()):
        digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
    return digest.hexdigest()[:24]


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Held by one process at a time; the system releases it when its holder dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile_commands(compiler: str, objects: Path) -> list[list[str]]:
    """One command per source and variant; each makes one file in `objects`."""
    commands = []
    for source in sorted(SOURCE.glob("*.cpp")):
        variants = {"": ()} if source.stem in _WITHOUT_VARIANTS else variant_flags()
        for variant, flags in variants.items():
            names = [f"-DSTAGELINE_VARIANT={variant}", f"-DSTAGELINE_{variant.upper()}"] if variant else []
            target = objects / f"{source.stem}-{variant}.o"
            commands.append([compiler, *_FLAGS, *flags, *names, "-c", str(source), "-o", str(target)])
    return commands


def _run_all(commands: list[list[str]]) -> None:
    """Run commands side by side. Raises: KernelBuildError with the first failure's last line of output."""
    running = [
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        for command in commands
    ]
    failures = []
    for process in running:
        try:
            _, output = process.communicate(timeout=_COMPILER_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            _, output = process.communicate()
        if process.returncode != 0:
            failures.append(output.decode(errors="replace").strip().splitlines()[-1:])
    if failures:
        reason = failures[0][0] if failures[0] else "it was killed"
        raise KernelBuildError(f"{commands[0][0]} failed: {reason}")
