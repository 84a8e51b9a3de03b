"""One stage's operating-system process, seen from the engine: start it, notice its end, end it.

The child's standard input carries its configuration and then stays open: when it ends, the engine is gone and the child
leaves. A second pipe, whose writing end only the child holds, ends when the child does. Both are noticed at once,
without a poll. The child has a process group of its own, so that Ctrl-C in a terminal reaches the engine alone, and so
that the kernel wakes a stopped child when its engine dies.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import msgspec

from stageline.executor.messages import WorkerConfig


class WorkerProcess:
    """A started stage. `exit_fd` becomes readable when the process ends, however it ends."""

    def __init__(self, config: WorkerConfig) -> None:
        self.stage_index = config.stage_index
        self.exit_fd, child_fd = os.pipe()
        environment = {**os.environ, "OMP_NUM_THREADS": str(config.num_threads)}
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "stageline.worker"],
                stdin=subprocess.PIPE,
                pass_fds=(child_fd,),
                process_group=0,
                env=environment,
            )
        except BaseException:
            os.close(self.exit_fd)
            raise
        finally:
            os.close(child_fd)
        self._send_config(config)

    def _send_config(self, config: WorkerConfig) -> None:
        assert self._process.stdin is not None
        body = msgspec.msgpack.encode(config)
        try:
            self._process.stdin.write(len(body).to_bytes(8, "little") + body)
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it died at once; `exit_fd` tells

    @property
    def pid(self) -> int:
        return self._process.pid

    def describe_exit(self) -> str:
        """How an ended process ended, in words."""
        status = self._process.wait()
        if status >= 0:
            return f"its process {self.pid} exited with status {status}"
        try:
            name = signal.Signals(-status).name
        except ValueError:
            name = f"signal {-status}"
        return f"its process {self.pid} was killed by {name}"

    def end(self, patience_s: float) -> None:
        """Wait for it to leave by itself for at most `patience_s`, then kill it. Leaves no zombie."""
        assert self._process.stdin is not None
        try:
            self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        finally:
            try:
                self._process.stdin.close()
            except BrokenPipeError:
                pass
            if self.exit_fd >= 0:
                os.close(self.exit_fd)
                self.exit_fd = -1
