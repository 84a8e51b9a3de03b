"""The files of a model that is copied piece by piece: as large as the originals, with holes where nothing is yet.

One idea: nothing says what is there but the bytes themselves. A piece that is there is worth its digest; after an
interruption, or damage, what does not match is fetched again.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from stageline.checkpoint.gguf_parts import part_path
from stageline.checkpoint.hf_directory import CONFIG, GENERATION_CONFIG, INDEX
from stageline.checkpoint.safetensors_index import read_safetensors_index
from stageline.errors import CheckpointError
from stageline.transfer.messages import AboutModel, Run
from stageline.transfer.table import digest_of

logger = logging.getLogger(__name__)

GGUF = "model.gguf"
ORIGIN = "origin"
_DIGITS_IN_NAME = 24
_HEXADECIMAL = frozenset("0123456789abcdef")
_MOST_FILES, _MOST_FILE_BYTES = 10_000, 2**46
_MOST_FRONT_BYTES = 2**30
_WAY_OUT = "free space there (`stageline cache` shows what is kept), or name another folder with XDG_CACHE_HOME"


class CopyFiles:
    """Makes the files, in a folder that the model's digests name, or takes them up again.

    Args:
        cache: folder of all such copies.
        model: what the head calls it; written beside it.
    Raises: CheckpointError in one line if the folder cannot be written, or what is told of the model cannot be.
    """

    def __init__(self, cache: Path, about: AboutModel, model: str = "") -> None:
        check_about(about)
        self._about = about
        self._model = model
        self.folder = copy_folder(cache, about.model_digest, about.fingerprint)
        self._files: list[int] = []
        with _errors_in(self.folder):
            self._in_use = _made_and_held(self.folder)
            if self._in_use is None:
                logger.info("the disk of %s knows no locks: `stageline cache` cannot tell what is in use", self.folder)
            os.utime(self.folder)
            for number, num_bytes in enumerate(about.file_bytes):
                file = os.open(self.folder / self._name(number), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                self._files.append(file)
                if os.fstat(file).st_size != num_bytes:
                    os.ftruncate(file, num_bytes)

    def _name(self, number: int) -> str:
        if self._about.config is not None:
            return f"model-{number:05d}.safetensors"
        count = len(self._about.file_bytes)
        return GGUF if count == 1 else part_path(Path(), "model", number + 1, count).name

    @property
    def path(self) -> str:
        """What `open_checkpoint` opens, once the fronts are there and `finish` was called."""
        return str(self.folder / self._name(0) if self._about.config is None else self.folder)

    def digest(self, run: Run, piece: int) -> bytes:
        """Of what is there; empty where nothing is."""
        offset, num_bytes = run.piece(piece)
        with _errors_in(self.folder):
            if not _has_data(self._files[run.file], offset, num_bytes):
                return b""
            return digest_of(os.pread(self._files[run.file], num_bytes, offset))

    def write(self, run: Run, piece: int, data: memoryview) -> None:
        """Raises: CheckpointError if the disk is full."""
        offset, done = run.piece(piece)[0], 0
        with _errors_in(self.folder):
            while done < len(data):
                done += os.pwrite(self._files[run.file], data[done:], offset + done)

    def finish(self) -> None:
        """Write what a directory has besides weights; all fronts are there. Other processes may do the same."""
        with _errors_in(self.folder):
            self._put(ORIGIN, self._model.encode())
        if self._about.config is None:
            return
        names = [self._name(number) for number in range(len(self._files))]
        weight_map = {tensor: name for name in names for tensor in read_safetensors_index(self.folder / name)}
        with _errors_in(self.folder):
            self._put(CONFIG, self._about.config)
            if self._about.generation_config:
                self._put(GENERATION_CONFIG, self._about.generation_config)
            self._put(INDEX, json.dumps({"weight_map": weight_map}).encode())

    def _put(self, name: str, data: bytes) -> None:
        """Whole or not at all, for who reads it meanwhile."""
        path = self.folder / f"{name}.{os.getpid()}"
        path.write_bytes(data)
        path.replace(self.folder / name)

    def close(self) -> None:
        while self._files:
            os.close(self._files.pop())
        if self._in_use is not None:
            os.close(self._in_use)
            self._in_use = None


def copy_folder(cache: Path, digest: str, fingerprint: str) -> Path:
    return cache / f"{digest[:_DIGITS_IN_NAME]}-{fingerprint}"


def copy_folders(cache: Path, digest: str) -> list[Path]:
    """Of all copies of models of one shape; none for what is no digest, whatever it would find."""
    return list(cache.glob(f"{digest[:_DIGITS_IN_NAME]}-*")) if _is_plain(digest) else []


def _is_plain(digest: str) -> bool:
    """Names of folders are made of it, and other machines tell it."""
    return bool(digest) and set(digest) <= _HEXADECIMAL


def _made_and_held(folder: Path) -> int | None:
    """As `hold_folder`. Whoever removes the folder just now has to be waited for, and then it has to be made again."""
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        held = hold_folder(folder)
        if held is None or _is_still_there(folder, held):
            return held
        os.close(held)


def _is_still_there(folder: Path, held: int) -> bool:
    try:
        return os.path.samestat(folder.stat(), os.fstat(held))
    except FileNotFoundError:
        return False


def hold_folder(folder: Path) -> int | None:
    """Until what is returned is closed, `stageline cache` leaves the folder alone. Raises: OSError.

    None where the disk knows no such thing.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def check_cache(cache: Path) -> None:
    """Raises: CheckpointError if files cannot be kept there."""
    with _errors_in(cache):
        cache.mkdir(parents=True, exist_ok=True)
        probe = cache / f"probe.{os.getpid()}"
        probe.write_bytes(b"\0")
        probe.unlink()


def check_about(about: AboutModel) -> None:
    """Raises: CheckpointError if that is no model's; names of files and folders are made of it."""
    sizes = about.file_bytes
    is_plain = _is_plain(about.model_digest) and _is_plain(about.fingerprint)
    has_files = 1 <= len(sizes) <= _MOST_FILES and {run.file for run in about.fronts} == set(range(len(sizes)))
    are_possible = all(0 < size < _MOST_FILE_BYTES for size in sizes)
    if not (is_plain and has_files and are_possible) or not _are_inside(about.fronts, sizes):
        raise CheckpointError("what the head tells of its model cannot be: its files or their fronts are absurd")


def _are_inside(runs: Sequence[Run], file_bytes: Sequence[int]) -> bool:
    if sum(run.num_bytes for run in runs) > _MOST_FRONT_BYTES:
        return False
    return all(
        0 <= run.file < len(file_bytes) and 0 <= run.offset_bytes <= run.end_bytes <= file_bytes[run.file]
        for run in runs
    )


def _has_data(file: int, offset: int, num_bytes: int) -> bool:
    """False only if it is a hole."""
    if not hasattr(os, "SEEK_DATA"):
        return True
    try:
        return os.lseek(file, offset, os.SEEK_DATA) < offset + num_bytes
    except OSError as error:
        return error.errno != errno.ENXIO


def has_all_data(file: int, offset: int, num_bytes: int) -> bool:
    """False only if some of it is a hole, as far as the system tells: it counts in blocks."""
    if not hasattr(os, "SEEK_DATA"):
        return True
    try:
        is_data = os.lseek(file, offset, os.SEEK_DATA) == offset
        return is_data and os.lseek(file, offset, os.SEEK_HOLE) >= offset + num_bytes
    except OSError as error:
        return error.errno != errno.ENXIO


def _free_bytes(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free:,} bytes are free"
    except OSError as error:
        return str(error)


@contextmanager
def _errors_in(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        what = f"is full ({_free_bytes(folder)})" if is_full else f"cannot be used: {error.strerror or error}"
        raise CheckpointError(f"{folder}, which keeps weights from another machine, {what}; {_WAY_OUT}") from None
