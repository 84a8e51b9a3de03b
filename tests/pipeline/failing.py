"""What tests of failures need: a private home for sockets, the stages' processes, ways to hurt them, programs to kill.

One idea: wait for what happens (a line, the end of a process), with a deadline, never for time to pass.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import zmq

from stageline import LLM, SamplingParams
from stageline.outputs import RequestOutput

DEADLINE_S = 60.0

_LIBC, _PR_SET_PDEATHSIG = ctypes.CDLL(None), 1

SETTINGS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "kv_cache_memory": "8MiB", "bind_cores": False}
"""For a small pipeline that starts quickly."""

LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
"""Far more tokens than are generated before the failure comes."""


def generate(llm: LLM, prompt: list[int], num_tokens: int) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids


def under_way(llm: LLM) -> tuple[Iterator[RequestOutput], list[int]]:
    """Returns: a stream that has given its first output, so microbatches are in flight; the stages' processes."""
    stream = iter(llm.stream([1, 2, 3], LONG))
    next(stream)
    return stream, worker_pids()


def worker_pids(engine_pid: int | None = None) -> list[int]:
    """The stages' processes of an engine, in their order if it runs one pipeline."""
    engine = psutil.Process(engine_pid)
    workers = [child for child in engine.children() if _is_ours(child, engine)]
    return [child.pid for child in sorted(workers, key=lambda child: (child.create_time(), child.pid))]


def _is_ours(child: psutil.Process, engine: psutil.Process) -> bool:
    """A program that runs tests has other children too. The system may show no words of one that has just started."""
    try:
        words = child.cmdline()
    except psutil.ZombieProcess:
        return False
    is_ours = any(word.startswith("stageline.") for word in words)
    return words != engine.cmdline() and (not words or is_ours)


def is_alive(pid: int) -> bool:
    """Neither gone nor a zombie."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def wait_for_end(pid: int) -> bool:
    """Whether the process ends within the deadline. It need not be a child."""
    try:
        watcher = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([watcher], [], [], DEADLINE_S)[0])
    finally:
        os.close(watcher)


def stop(pid: int) -> None:
    """SIGSTOP, and wait until it has come to pass."""
    os.kill(pid, signal.SIGSTOP)
    process = psutil.Process(pid)
    while process.status() != psutil.STATUS_STOPPED:
        os.sched_yield()


def send_frames(home: Path, socket_name: str, frames: list[bytes]) -> None:
    """Send to a stage's socket what nobody should send."""
    [folder] = home.glob("stageline-*")
    context = zmq.Context()
    socket = context.socket(zmq.PUSH)
    socket.connect(f"ipc://{folder}/{socket_name}")
    socket.send_multipart(frames)
    context.destroy(linger=int(DEADLINE_S * 1000))


def become_a_program() -> None:
    """In a child that is about to be a program.

    A test run in the background of a shell ignores SIGINT, and so would the program; a user's does not. And when the
    tests' process is killed, and so cannot end what it started, the program is told to end.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class Program:
    """A Python program with an engine, in a process (and process group) of its own. Its lines tell how far it is."""

    def __init__(self, code: str, *argv: str, home: Path) -> None:
        self.home = home
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "TMPDIR": str(home), "STAGELINE_LOG_LEVEL": "ERROR"},
            preexec_fn=become_a_program,
        )
        self.workers: list[int] = []

    def wait_for_line(self, wanted: str) -> None:
        """Wait for this line, then note the stages' processes."""
        assert self.process.stdout is not None
        seen = []
        for line in self.process.stdout:
            seen.append(line)
            if line.strip() == wanted:
                self.workers = worker_pids(self.process.pid)
                return
        raise AssertionError(f"ended without saying {wanted!r}: {''.join(seen)}{self.finish()[1]}")

    def finish(self) -> tuple[int, str]:
        """Returns: the exit status and what came on standard error."""
        _, stderr = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, stderr

    def leftovers(self) -> list[str]:
        """What is still there once the stages had time to leave."""
        alive = [f"process {pid}" for pid in self.workers if not wait_for_end(pid)]
        return alive + [str(path) for path in self.home.iterdir()]

    def destroy(self) -> None:
        for pid in [*self.workers, self.process.pid]:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate()
