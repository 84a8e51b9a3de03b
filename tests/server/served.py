"""`stageline serve` as a user runs it: a process with a private home for sockets, its log read as it comes.

One idea: wait for what happens (a line of the log, the end of a process, a refused connection), with a deadline.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from tests.pipeline.failing import become_a_program, is_alive, wait_for_end

DEADLINE_S = 120.0

SMALL = ["--dtype", "float32", "--device", "cpu", "--kv-cache-memory", "8MiB", "--no-bind-cores", "--port", "0"]
"""For a small model that starts quickly, on any port that is free."""

_KINDS = {"stageline.engine.process": "engine", "stageline.server.api_process": "api", "stageline.worker": "stage"}


class Logged:
    """A `stageline` command that was started. `lines` is its log so far.

    Args:
        words: the command line behind `stageline`.
        home: its folder for temporary files.
    """

    def __init__(self, *words: str, home: Path, environ: dict[str, str] | None = None) -> None:
        self.home = home
        self.lines: list[str] = []
        self._has_news = threading.Condition()
        self._has_ended = False
        self.process = subprocess.Popen(
            [sys.executable, "-m", "stageline", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "TMPDIR": str(home), "STAGELINE_LOG_LEVEL": "INFO", **(environ or {})},
            preexec_fn=become_a_program,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._has_news:
                self.lines.append(line.rstrip("\n"))
                self._has_news.notify_all()
        with self._has_news:
            self._has_ended = True
            self._has_news.notify_all()

    @property
    def log(self) -> str:
        return "\n".join(self.lines)

    def wait_for_line(self, pattern: str, seen: int = 0) -> re.Match[str]:
        """Wait for a line of the log, behind the first `seen` ones, in which the pattern is found."""
        with self._has_news:
            while True:
                for line in self.lines[seen:]:
                    if found := re.search(pattern, line):
                        return found
                seen = max(seen, len(self.lines))
                assert not self._has_ended, f"ended without saying {pattern!r}:\n{self.log}"
                assert self._has_news.wait(DEADLINE_S), f"did not say {pattern!r}:\n{self.log}"

    def finish(self) -> int:
        """Wait for its end. Returns: the exit status."""
        status = self.process.wait(DEADLINE_S)
        self._reader.join(DEADLINE_S)
        return status


class Served(Logged):
    """A server that was started."""

    def __init__(self, model: str, *flags: str, home: Path, environ: dict[str, str] | None = None) -> None:
        super().__init__("serve", model, *SMALL, *flags, home=home, environ=environ)
        self.model = model
        self.pids: dict[str, list[int]] = {}

    def wait_until_listening(self) -> None:
        self.port = int(self.wait_for_line(r"listening on https?://127\.0\.0\.1:(\d+)")[1])

    def wait_until_ready(self) -> None:
        """Then the processes are known, by kind: engine, api, stage."""
        self.wait_until_listening()
        self.wait_for_line(r"ready after .* seconds")
        self.note_processes()

    def note_processes(self) -> None:
        self.pids = {kind: [] for kind in _KINDS.values()}
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                for module, kind in _KINDS.items():
                    with suppress(psutil.NoSuchProcess):
                        if module in child.cmdline():
                            self.pids[kind].append(child.pid)

    def leftovers(self) -> list[str]:
        """What is still there once all had time to leave."""
        alive = [f"{kind} {pid}" for kind, pids in self.pids.items() for pid in pids if not wait_for_end(pid)]
        folders = [str(path) for path in self.home.glob("stageline-*")]
        port = [] if self.is_refusing() else [f"port {self.port}"]
        return alive + folders + port

    def is_refusing(self) -> bool:
        """Whether nothing listens on its port."""
        with socket.socket() as client:
            client.settimeout(DEADLINE_S)
            return client.connect_ex(("127.0.0.1", self.port)) != 0

    def wait_until_refusing(self) -> None:
        wait_until(self.is_refusing)

    def connect(self, tls: ssl.SSLContext | None = None) -> http.client.HTTPConnection:
        if tls is not None:
            return http.client.HTTPSConnection("127.0.0.1", self.port, timeout=DEADLINE_S, context=tls)
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE_S)

    def get(self, path: str, tls: ssl.SSLContext | None = None, **headers: str) -> tuple[int, Any]:
        """Returns: status and JSON body, None if it is not JSON."""
        connection = self.connect(tls)
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        return answer.status, json.loads(body) if body.startswith(b"{") else None

    def post(self, max_tokens: int) -> tuple[int, http.client.HTTPMessage, Any]:
        """A whole completion. Returns: status, headers and JSON body."""
        connection = self.begin_post(max_tokens)
        answer = connection.getresponse()
        text = answer.read()
        connection.close()
        return answer.status, answer.headers, json.loads(text)

    def begin_post(self, max_tokens: int) -> http.client.HTTPConnection:
        """Send the request for a whole completion."""
        body = {"model": self.model, "prompt": [1, 2, 3], "max_tokens": max_tokens, "ignore_eos": True}
        connection = self.connect()
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        return connection

    def stream(self, max_tokens: int) -> http.client.HTTPResponse:
        """A streamed completion that has begun: its first event was read."""
        body = {"model": self.model, "prompt": [1, 2, 3], "max_tokens": max_tokens, "stream": True, "ignore_eos": True,
                "temperature": 0, "return_token_ids": True}  # fmt: skip
        connection = self.connect()
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        assert answer.readline().startswith(b"data: ")
        return answer

    def destroy(self) -> None:
        if not self.pids:
            self.note_processes()
        for pid in [self.process.pid, *(pid for pids in self.pids.values() for pid in pids)]:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join()


def wait_until(is_true: Callable[[], bool]) -> None:
    """For what cannot be waited for by an event: asks again and again, and leaves the core to what it waits for."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not is_true():
        assert time.monotonic() < deadline_s, f"{is_true} did not become true"
        threading.Event().wait(0.01)


@contextmanager
def serving(model: str, *flags: str, environ: dict[str, str] | None = None) -> Iterator[Served]:
    """A server in a home of its own; destroyed afterwards if it is still there."""
    with tempfile.TemporaryDirectory(prefix="home-") as home:
        server = Served(model, *flags, home=Path(home), environ=environ)
        try:
            yield server
        except BaseException:
            print(server.log)  # shown with a test that fails
            raise
        finally:
            server.destroy()
