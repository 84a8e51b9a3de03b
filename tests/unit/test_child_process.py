"""What a process that this one starts inherits."""

from __future__ import annotations

import errno
import os
import subprocess
from typing import Any

import pytest

from stageline.errors import ConfigError
from stageline.links.child_process import ChildProcess


class NotStarted(Exception):
    pass


def test_a_child_inherits_the_environment_but_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, str] = {}

    def start(*words: Any, env: dict[str, str], **options: Any) -> None:
        seen.update(env)
        raise NotStarted

    monkeypatch.setattr(subprocess, "Popen", start)
    for name in ("STAGELINE_CLUSTER_KEY", "STAGELINE_API_KEY", "SOMETHING_ELSE"):
        monkeypatch.setenv(name, "value")
    with pytest.raises(NotStarted):
        ChildProcess("stageline.worker", b"", environ={"OMP_NUM_THREADS": "1"})
    assert seen["SOMETHING_ELSE"] == "value" and seen["OMP_NUM_THREADS"] == "1"
    assert "STAGELINE_CLUSTER_KEY" not in seen and "STAGELINE_API_KEY" not in seen


def test_a_system_that_starts_no_more_processes_is_told_and_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(ConfigError, match="Resource temporarily unavailable; look at the limits"):
        ChildProcess("stageline.worker", b"")
    assert os.listdir("/proc/self/fd") == before
