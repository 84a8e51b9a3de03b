"""A process that this one starts: given its configuration, noticed when it ends, ended.

The child's standard input carries its configuration, perhaps further messages, and then stays open: when it ends, its
parent is gone and the child leaves. A second pipe, whose writing end only the child holds, ends when the child does;
until then the child may write to it what its parent should know. Both are noticed at once, without a poll. The child
has a process group of its own, so that Ctrl-C in a terminal reaches its parent alone.
"""

from __future__ import annotations

import errno
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from stageline.config import environment
from stageline.errors import ConfigError

_LENGTH_BYTES = 8
_READ_BYTES = 1 << 16

_MAX_BYTES_UNREAD = 4096
"""What a pipe holds in any case, so that it can be written before there is a reader."""


class ChildProcess:
    """A started process. `exit_fd` ends when the process does, however it ends.

    Args:
        module: run as `python -m MODULE FD`; FD is the number of the child's end of the second pipe.
        config: the first message on its standard input.
        pass_fds: further files it inherits, under the same numbers.
        environ: variables to set besides this process's own.
    Raises: ConfigError if the system starts no more processes, or opens no more files.
    """

    def __init__(
        self, module: str, config: bytes, pass_fds: Sequence[int] = (), environ: Mapping[str, str] | None = None
    ) -> None:
        try:
            self._start(module, config, pass_fds, environ or {})
        except OSError as error:
            way_out = "look at the limits of this user (ulimit -a), of its container, and at the memory that is left"
            if error.errno in (errno.EACCES, errno.ENOENT, errno.ENOEXEC):
                way_out = f"{sys.executable} is no interpreter that can be run"
            raise ConfigError(f"no process can be started for {module}: {error.strerror or error}; {way_out}") from None

    def _start(self, module: str, config: bytes, pass_fds: Sequence[int], environ: Mapping[str, str]) -> None:
        """Raises: OSError."""
        config_fd, parent_fd = os.pipe()
        try:
            exit_fd, child_exit_fd = os.pipe()
        except OSError:
            os.close(config_fd)
            os.close(parent_fd)
            raise
        # File objects: an interrupt at any place closes them with this object, and the child leaves.
        self._lifeline = os.fdopen(parent_fd, "wb", buffering=0)
        self._exit = os.fdopen(exit_fd, "rb", buffering=0)
        self._unread = b""
        try:
            # Written before there is a reader, if the pipe holds it, so that a child can always read it.
            if len(config) + _LENGTH_BYTES <= _MAX_BYTES_UNREAD:
                self.send(config)
            self._process = subprocess.Popen(
                [sys.executable, *_import_flags(), "-m", module, str(child_exit_fd)],
                stdin=config_fd,
                pass_fds=(child_exit_fd, *pass_fds),
                process_group=0,
                env={**environment.for_children(), **environ},
            )
        except BaseException:
            self._close()
            raise
        finally:
            os.close(config_fd)
            os.close(child_exit_fd)
        if len(config) + _LENGTH_BYTES > _MAX_BYTES_UNREAD:
            self.send(config)

    @property
    def exit_fd(self) -> int:
        return self._exit.fileno()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: bytes) -> None:
        """Write a message to its standard input; to a child that has ended, nothing is sent."""
        with suppress(BrokenPipeError):
            self._lifeline.write(len(message).to_bytes(_LENGTH_BYTES, "little") + message)

    def read_messages(self) -> list[bytes] | None:
        """What the child wrote, waiting if there is nothing. Returns: None when it has ended."""
        part = os.read(self.exit_fd, _READ_BYTES)
        if not part:
            return None
        self._unread += part
        messages = []
        while len(self._unread) >= _LENGTH_BYTES:
            end = _LENGTH_BYTES + int.from_bytes(self._unread[:_LENGTH_BYTES], "little")
            if len(self._unread) < end:
                break
            messages.append(self._unread[_LENGTH_BYTES:end])
            self._unread = self._unread[end:]
        return messages

    def let_go(self) -> None:
        """Close its standard input: it leaves, as it would if this process had ended."""
        self._lifeline.close()

    def was_killed(self) -> bool:
        """Whether an ended process was ended by a signal, and so had no time for last words."""
        return self._process.wait() < 0

    def exit_status(self) -> int:
        """Of an ended process; negative if a signal ended it."""
        return self._process.wait()

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


def write_message(fd: int, message: bytes) -> None:
    """In the child: a message to its parent, short enough to be written at once. If that is gone, to nobody."""
    with suppress(BrokenPipeError):
        os.write(fd, len(message).to_bytes(_LENGTH_BYTES, "little") + message)


def read_message(fd: int) -> bytes | None:
    """In the child: the next message on its standard input, waiting for it; None when its parent is gone."""
    length = _read_exactly(fd, _LENGTH_BYTES)
    return None if length is None else _read_exactly(fd, int.from_bytes(length, "little"))


def _read_exactly(fd: int, num_bytes: int) -> bytes | None:
    body = b""
    while len(body) < num_bytes:
        part = os.read(fd, num_bytes - len(body))
        if not part:
            return None
        body += part
    return body


def wait_for_ends(children: Sequence[ChildProcess], patience_s: float) -> None:
    """Wait until all have ended, for at most `patience_s`."""
    poller = select.poll()
    running = {child.exit_fd: child for child in children}
    for exit_fd in running:
        poller.register(exit_fd, select.POLLIN)
    deadline_s = time.monotonic() + patience_s
    while running and (left_s := deadline_s - time.monotonic()) > 0:
        for exit_fd, _ in poller.poll(math.ceil(left_s * 1000)):
            if not os.read(exit_fd, 65536):
                poller.unregister(exit_fd)
                del running[exit_fd]


def _import_flags() -> list[str]:
    """The child imports from the current directory only if this process does: a `random.py` there must not break it."""
    return [] if {"", os.getcwd()} & set(sys.path) else ["-P"]
