"""Finds the compiled kernels: in the package, where its installation put them, or in a cache that first use fills.

One idea: the library's name is a hash of what goes into it, so it is never out of date; it is compiled under another
name and renamed when complete, so it is never seen half-made. Processes that start together wait for the first one's
compilers instead of starting their own, and compilers do not outlive who started them. An installation compiles all
variants, for other machines may get them; first use compiles the one that it needs. setup.py loads this file by its
path and first use runs it as a program, so it needs the standard library only.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
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
# As /proc/cpuinfo calls what these need.
_X86_FEATURES = {
    "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_bf16", "avx512_vnni", "avx2", "fma"},
    "avx2": {"avx2", "fma"},
}
_CPU_INFO = Path("/proc/cpuinfo")
_WITHOUT_VARIANTS = ("program", "supported")
_PRIVATE = 0o700
_COMPILER_LIMIT_S = 300
_UNFINISHED = "unfinished-"
# Nobody waits for this process's library any more.
_is_over = threading.Event()
# Of one variant on one core that nobody else uses, and on a slower one, or one with other work; for the log.
_USUAL_CORE_S = (18, 60)


class KernelBuildError(Exception):
    """There are no compiled kernels; the message says why. Never reaches the user: the torch fallback is used."""


def variant_flags() -> dict[str, tuple[str, ...]]:
    """The variants that are compiled for this kind of machine, fastest first, and their compiler flags."""
    x86 = _X86_VARIANTS if platform.machine() in ("x86_64", "AMD64") else {}
    return {**x86, "portable": ()}


def runnable_variants() -> list[str]:
    """Those that this machine has the instructions for, fastest first; all where it does not say."""
    try:
        lines = _CPU_INFO.read_text().splitlines()
    except OSError:
        return list(variant_flags())
    has = {word for line in lines if line.startswith("flags") for word in line.partition(":")[2].split()}
    return [variant for variant in variant_flags() if _X86_FEATURES.get(variant, set()) <= has]


def build_library(cache_directory: Path, variant: str | None = None) -> Path:
    """The shared library of a variant: the package's own, or the cache's, compiled now if it is in neither.

    Args:
        cache_directory: made, for this user alone, if missing.
        variant: None, or one that this machine cannot run, for the fastest that it can.
    Raises: KernelBuildError if there is no compiler, it fails, or the directory cannot be used safely.
    """
    packaged = packaged_library()
    if packaged.exists() and _can_load(packaged):
        return packaged
    compiler = find_compiler()
    try:
        _make_private(cache_directory)
        runnable = runnable_variants()
        chosen = variant if variant in runnable else runnable[0]
        library = cache_directory / f"kernels-{chosen}-{_fingerprint(compiler, _version(compiler))}.so"
        if library.exists():
            return library
        with _lock(cache_directory / "lock") as is_alone:
            if not library.exists():
                _compile_aside(compiler, library, chosen, is_alone)
        return library
    except OSError as error:
        raise KernelBuildError(f"cannot write to {cache_directory}: {error}") from error


def packaged_library() -> Path:
    """Where the package has its library if it was compiled from these sources, for this kind of machine."""
    return PACKAGE / f"prebuilt-{_fingerprint()}.so"


def compile_library(compiler: str, library: Path, variants: Sequence[str] | None = None) -> None:
    """Compile variants, by default all, into `library`, whose directory exists. Raises: KernelBuildError, OSError."""
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=_UNFINISHED) as directory:
        objects = Path(directory)
        _run_all(_compile_commands(compiler, objects, list(variant_flags()) if variants is None else variants))
        linked = objects / "linked.so"
        _run_all([[compiler, "-shared", "-pthread", "-Wl,-s", *map(str, objects.glob("*.o")), "-o", str(linked)]])
        linked.replace(library)


def find_compiler() -> str:
    """Path of the system's C++ compiler. Raises: KernelBuildError if there is none."""
    for name in _COMPILERS:
        if path := shutil.which(name):
            return path
    raise KernelBuildError(f"no C++ compiler found ({', '.join(_COMPILERS)})")


def _compile_aside(compiler: str, library: Path, variant: str, is_alone: bool) -> None:
    """Compile in a process that ends its compilers when this one is gone, however that came.

    Args:
        is_alone: no other process compiles there.
    """
    # Left by a machine that went down.
    for left in library.parent.glob(f"{_UNFINISHED}*") if is_alone else ():
        shutil.rmtree(left, ignore_errors=True)
    least_s, most_s = (seconds / (os.cpu_count() or 1) + 1 for seconds in _USUAL_CORE_S)
    logger.info(
        "compiling the CPU kernels (%s) with %s, once; this takes about %.0f s, on a busy machine up to %.0f s",
        variant, compiler, least_s, most_s,
    )  # fmt: skip
    started_s = time.monotonic()
    command = [sys.executable, "-I", "-S", __file__, compiler, str(SOURCE), str(library), variant]
    # A group of its own: Ctrl-C is for this process, which then closes the pipe.
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True
    ) as aside:
        assert aside.stdin is not None and aside.stdout is not None
        with aside.stdin:
            failure = aside.stdout.read().decode(errors="replace").strip()
    if aside.returncode != 0:
        raise KernelBuildError(failure or f"{compiler} was ended")
    logger.info("compiled the CPU kernels in %.0f s", time.monotonic() - started_s)


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
def _lock(path: Path) -> Iterator[bool]:
    """Held by one process at a time; the system releases it when its holder dies.

    Yields: false where the disk knows no locks: then each process compiles for itself, and the last one's stays.
    """
    with path.open("w") as file:
        is_held = True
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("waiting for the CPU kernels, which another process compiles")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            logger.info("the disk of %s knows no locks (%s)", path.parent, error.strerror)
            is_held = False
        yield is_held


def _compile_commands(compiler: str, objects: Path, variants: Sequence[str]) -> list[list[str]]:
    """One command per source and variant; each makes one file in `objects`."""
    commands = []
    for source in sorted(SOURCE.glob("*.cpp")):
        for variant in ("",) if source.stem in _WITHOUT_VARIANTS else variants:
            flags = variant_flags()[variant] if variant else ()
            names = [f"-DSTAGELINE_VARIANT={variant}", f"-DSTAGELINE_{variant.upper()}"] if variant else []
            target = objects / f"{source.stem}-{variant}.o"
            commands.append([compiler, *_FLAGS, *flags, *names, "-c", str(source), "-o", str(target)])
    return commands


def _run_all(commands: Sequence[Sequence[str]]) -> None:
    """Run commands, as many at once as there are cores. Raises: KernelBuildError with the first failure's last line."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        failures = [failure for failure in pool.map(_failure_of, commands) if failure is not None]
    if failures:
        raise KernelBuildError(f"{commands[0][0]} failed: {failures[0]}")


def _failure_of(command: Sequence[str]) -> str | None:
    """Run it. Returns: its last line of output if it failed."""
    if _is_over.is_set():
        return "it is not needed any more"
    try:
        run = subprocess.run(
            command,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=_COMPILER_LIMIT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"it took more than {_COMPILER_LIMIT_S} s"
    lines = run.stderr.decode(errors="replace").strip().splitlines()
    return None if run.returncode == 0 else lines[-1] if lines else "it was killed"


def _end_with_standard_input() -> None:
    """Ends the compilers of this process, which then fails and clears up, when whoever started it is gone."""
    os.read(0, 1)
    _is_over.set()
    os.killpg(0, signal.SIGTERM)


def main(compiler: str, source: str, library: str, *variants: str) -> int:
    """What `_compile_aside` runs. Returns: the exit status; why it failed goes to standard output."""
    global SOURCE
    SOURCE = Path(source)
    signal.signal(signal.SIGTERM, lambda *_: None)  # a handler, unlike SIG_IGN, is not the compilers' too
    threading.Thread(target=_end_with_standard_input, daemon=True).start()
    try:
        compile_library(compiler, Path(library), variants)
    except (KernelBuildError, OSError) as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
