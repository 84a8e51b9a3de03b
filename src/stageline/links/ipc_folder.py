"""Folders for ipc sockets, each its owner's alone, and none left behind: not even by who was killed.

One idea: the owner holds a lock that the system takes back however it ends. So whoever makes the next folder can tell
those that nobody owns any more, whatever process ids mean in the containers that share the parent, and removes them.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import zmq

from stageline.errors import ConfigError

logger = logging.getLogger(__name__)

_FALLBACK_PARENT = "/tmp"
_PREFIX = "stageline-"
_LOCK, _NEW_LOCK = "owner", "owner.new"


class IpcFolder:
    """A new folder that only this user can enter, until `close`.

    It lies in the folder for temporary files; if that has a path too long for a socket, in /tmp.

    Args:
        longest_name: the longest of the sockets' file names.
    Raises: ConfigError if there is no place for it.
    """

    def __init__(self, longest_name: str) -> None:
        path = None
        try:
            self.path = path = _new_folder(longest_name)
            remove_abandoned(Path(path).parent)
            self._lock = _held_lock(Path(path, _NEW_LOCK))
        except OSError as error:
            if path is not None:
                shutil.rmtree(path, ignore_errors=True)
            raise ConfigError(
                f"the stages' sockets need a folder for temporary files: {error}; set TMPDIR to one that can be written"
            ) from None

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _held_lock(new: Path) -> BinaryIO:
    """Raises: OSError."""
    lock = new.open("wb")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
    except OSError as error:
        # Left without the name of a lock, it is nobody's to remove.
        logger.info("the disk of %s knows no locks (%s): set TMPDIR to another one, or sockets' folders of processes "
                    "that were killed stay there", new.parent.parent, error.strerror)  # fmt: skip
        return lock
    # Under its name only once it is locked: before, it would look like one that nobody owns.
    new.rename(new.with_name(_LOCK))
    return lock


def remove_abandoned(parent: Path) -> None:
    """Of this user's folders there those whose owner is gone; one without a lock is left alone."""
    for folder in parent.glob(f"{_PREFIX}*"):
        # It may be gone meanwhile, or another user's.
        with suppress(OSError), (folder / _LOCK).open("rb") as lock:
            if os.fstat(lock.fileno()).st_uid == os.getuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)


def _new_folder(longest_name: str) -> str:
    """Raises: OSError; ConfigError if every path is too long."""
    for parent in (tempfile.gettempdir(), _FALLBACK_PARENT):
        folder = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
        num_bytes = len(os.fsencode(os.path.join(folder, longest_name)))
        if num_bytes <= zmq.IPC_PATH_MAX_LEN:
            return folder
        os.rmdir(folder)
    raise ConfigError(
        f"a socket's path would have {num_bytes} bytes, and this system allows {zmq.IPC_PATH_MAX_LEN}; set TMPDIR to a "
        "folder with a shorter path"
    )
