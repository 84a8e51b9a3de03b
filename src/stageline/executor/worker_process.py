"""One stage's operating-system process, seen from the engine: start it, notice its end, end it.

The child's standard input carries its configuration and then stays open: when it ends, the engine is gone and the child
leaves. A second pipe, whose writing end only the child holds, ends when the child does. Both are noticed at once,
without a poll. The child has a process group of its own, so that Ctrl-C in a terminal reaches the engine alone.
"""

from __future__ import annotations

import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

import msgspec
import psutil

from stageline.executor.messages import WorkerConfig


class WorkerProcess:
    """A started stage. `exit_fd` becomes readable when the process ends, however it ends."""

    def __init__(self, config: WorkerConfig) -> None:
        self.stage_index = config.stage_index
        config_fd, engine_fd = os.pipe()
        exit_fd, child_exit_fd = os.pipe()
        # File objects: an interrupt at any place closes them with this object, and the child leaves.
        self._lifeline = os.fdopen(engine_fd, "wb", buffering=0)
        self._exit = os.fdopen(exit_fd, "rb", buffering=0)
        try:
            # Written before there is a reader, so that a child can always read it; a pipe holds at least a page.
            body = msgspec.msgpack.encode(config)
            self._lifeline.write(len(body).to_bytes(8, "little") + body)
            self._process = subprocess.Popen(
                [sys.executable, *_import_flags(), "-m", "stageline.worker"],
                stdin=config_fd,
                pass_fds=(child_exit_fd,),
                process_group=0,
                env={**os.environ, "OMP_NUM_THREADS": str(config.num_threads)},
            )
        except BaseException:
            self._close()
            raise
        finally:
            os.close(config_fd)
            os.close(child_exit_fd)

    @property
    def exit_fd(self) -> int:
        return self._exit.fileno()

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_stopped(self) -> bool:
        """Whether it was stopped by a signal or a debugger, and so cannot show a sign of life."""
        try:
            return bool(psutil.Process(self.pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP))
        except psutil.NoSuchProcess:
            return False

    def was_killed(self) -> bool:
        """Whether an ended process was ended by a signal, and so had no time for last words."""
        return self._process.wait() < 0

    def describe_exit(self) -> str:
        """How an ended process ended, in words."""
        status = self._process.wait()
        if status > 0:
            return f"its process {self.pid} exited with status {status}"
        if status == 0:
            return f"its process {self.pid} left unasked (its exit status is 0, or was taken by a handler of SIGCHLD)"
        try:
            name = signal.Signals(-status).name
        except ValueError:
            name = f"signal {-status}"
        return f"its process {self.pid} was killed by {name}"

    def kill(self) -> None:
        self._process.kill()

    def reap(self) -> None:
        """Wait for its end, which must be near; leaves neither a zombie nor an open file. May be called twice."""
        self._process.wait()
        self._close()

    def _close(self) -> None:
        self._lifeline.close()
        self._exit.close()


def wait_for_ends(workers: Sequence[WorkerProcess], patience_s: float) -> None:
    """Wait until all have ended, for at most `patience_s`."""
    poller = select.poll()
    running = {worker.exit_fd for worker in workers}
    for exit_fd in running:
        poller.register(exit_fd, select.POLLIN)
    deadline_s = time.monotonic() + patience_s
    while running and (left_s := deadline_s - time.monotonic()) > 0:
        for exit_fd, _ in poller.poll(math.ceil(left_s * 1000)):
            poller.unregister(exit_fd)
            running.discard(exit_fd)


def _import_flags() -> list[str]:
    """The child imports from the current directory only if this process does: a `random.py` there must not break it."""
    return [] if {"", os.getcwd()} & set(sys.path) else ["-P"]
