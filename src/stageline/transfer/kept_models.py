"""What copies of models this machine keeps, how large they are, and which of them may go.

One idea: whoever uses a copy holds its folder, so what is in use is never removed, and what is not is only a cache.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from stageline.transfer.copy_files import ORIGIN

_BYTES_PER_BLOCK = 512
_MOST_SHOWN = 200


@dataclass(frozen=True)
class KeptModel:
    """Args:
    model: as its head called it; empty if it was interrupted before that was known.
    num_bytes: on the disk; holes take none.
    used_s: when a stage opened it last, in seconds since 1970.
    is_in_use: None where the disk knows no locks, so that nobody can tell.
    """

    folder: Path
    model: str
    num_bytes: int
    used_s: float
    is_in_use: bool | None


def kept_models(cache: Path) -> list[KeptModel]:
    """The one used last first. Raises: OSError."""
    if not cache.is_dir():
        return []
    found = [_look_at(folder) for folder in cache.iterdir() if folder.is_dir()]
    return sorted((one for one in found if one is not None), key=lambda one: one.used_s, reverse=True)


def _look_at(folder: Path) -> KeptModel | None:
    """None if it is removed meanwhile."""
    with suppress(FileNotFoundError):
        # Asked and let go: a stage that opens its copy waits for who holds it.
        with _alone(folder) as is_free:
            pass
        origin = folder / ORIGIN
        text = origin.read_text(errors="replace")[:_MOST_SHOWN] if origin.is_file() else ""
        num_bytes = sum(map(_bytes_on_disk, folder.iterdir()))
        model = "".join(letter if letter.isprintable() else "?" for letter in text)
        is_in_use = None if is_free is None else not is_free
        return KeptModel(folder, model, num_bytes, folder.stat().st_mtime, is_in_use)
    return None


def _bytes_on_disk(file: Path) -> int:
    # A stage that opens its copy puts new files in the place of others.
    with suppress(FileNotFoundError):
        return file.stat().st_blocks * _BYTES_PER_BLOCK
    return 0


def to_remove(kept: Sequence[KeptModel], keep_bytes: int) -> list[KeptModel]:
    """Those to do without, so that at most `keep_bytes` are kept: unused longest first, none that may be in use."""
    left = sum(one.num_bytes for one in kept)
    chosen = []
    for one in sorted((one for one in kept if one.is_in_use is False), key=lambda one: one.used_s):
        if left <= keep_bytes:
            break
        chosen.append(one)
        left -= one.num_bytes
    return chosen


def remove(one: KeptModel) -> bool:
    """Returns: false if it is in use by now, or somebody else removes it. Raises: OSError."""
    with suppress(FileNotFoundError), _alone(one.folder) as is_free:
        if is_free:
            shutil.rmtree(one.folder)
        return bool(is_free)
    return False


@contextmanager
def _alone(folder: Path) -> Iterator[bool | None]:
    """Yields: whether nobody holds it, and nobody comes in meanwhile; None if this disk cannot tell."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield _has_locked(descriptor)
    finally:
        os.close(descriptor)


def _has_locked(descriptor: int) -> bool | None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True
