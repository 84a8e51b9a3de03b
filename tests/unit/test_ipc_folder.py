"""A folder of sockets is gone with its owner: at its end, or when the next folder is made; and no sooner."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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
