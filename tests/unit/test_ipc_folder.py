"""A folder of sockets is gone with its owner: at its end, or when the next folder is made; and no sooner."""

from __future__ import annotations

import errno
import fcntl
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from stageline.errors import ConfigError
from stageline.links.ipc_folder import IpcFolder

_KILLED_OWNER = """
import os, signal
from stageline.links.ipc_folder import IpcFolder
print(IpcFolder("s0.input").path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_folders_of_who_was_killed_are_removed_by_the_next_owner_and_no_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    strange = tmp_path / "stageline-notes"
    strange.mkdir()
    mine = IpcFolder("s0.input")
    (Path(mine.path) / "s0.input").touch()
    killed = subprocess.run([sys.executable, "-c", _KILLED_OWNER], stdout=subprocess.PIPE, text=True, timeout=60)
    abandoned = Path(killed.stdout.strip())
    assert abandoned.parent == tmp_path and abandoned.is_dir()
    other = IpcFolder("s0.input")
    assert not abandoned.exists()
    assert (Path(mine.path) / "s0.input").exists() and Path(other.path).is_dir() and strange.is_dir()
    for folder in (mine, other):
        folder.close()
    assert list(tmp_path.iterdir()) == [strange]


def test_a_disk_without_locks_has_folders_too_and_keeps_those_that_may_have_an_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def without_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(fcntl, "flock", without_locks)
    with caplog.at_level("INFO", "stageline"):
        mine = IpcFolder("s0.input")
    assert [record.getMessage() for record in caplog.records if "knows no locks" in record.getMessage()]
    monkeypatch.undo()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    other = IpcFolder("s0.input")
    assert Path(mine.path).is_dir()
    mine.close()
    other.close()
    assert list(tmp_path.iterdir()) == []


def test_who_finds_no_room_for_a_folder_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(ConfigError, match="No space left on device"):
        IpcFolder("s0.input")
    assert list(tmp_path.iterdir()) == []
