"""A checkpoint's table: its files by number, and every tensor as a run of bytes, in an order both sides agree on.

One idea: a file is its front, which tells where tensors lie, and the tensors. A copy that has the front and some of the
tensors, and holes for the rest, is opened and read like the original.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from stageline.checkpoint.checkpoint import Checkpoint, TensorEntry
from stageline.checkpoint.digest import model_digest
from stageline.checkpoint.gguf_parts import read_parts
from stageline.transfer.messages import DIGEST_BYTES, Run

_SAMPLE_BYTES = 512


@dataclass(frozen=True)
class ModelTable:
    """Args:
    files: paths, in the order of their numbers.
    fronts: what has to be there before the checkpoint can be opened.
    tensors: every stored tensor; those of a quantised matrix one by one.
    owners: names of the model's tensors that these are of.
    """

    files: tuple[str, ...]
    fronts: tuple[Run, ...]
    tensors: tuple[Run, ...]
    owners: tuple[str, ...]

    def runs_of(self, names: Collection[str]) -> list[int]:
        """Numbers of the runs that hold these tensors."""
        wanted = set(names)
        return [len(self.fronts) + place for place, owner in enumerate(self.owners) if owner in wanted]


def table_of(checkpoint: Checkpoint) -> ModelTable:
    """The same on every machine that has the model, or a copy of its fronts."""
    stored = [(entry.name, part) for _, entry in sorted(checkpoint.tensors.items()) for part in _parts(entry)]
    more = _not_stored(checkpoint, {(part.file, part.offset_bytes) for _, part in stored})
    files = sorted({part.file for _, part in stored} | set(more))
    number_of = {file: number for number, file in enumerate(files)}
    tensors = [Run(number_of[part.file], part.offset_bytes, part.num_bytes) for _, part in stored]
    begins: dict[int, int] = {}
    for run in tensors:
        begins[run.file] = min(run.offset_bytes, begins.get(run.file, run.offset_bytes))
    fronts = [Run(number, 0, begins.get(number, 0) or os.stat(file).st_size) for number, file in enumerate(files)]
    fronts += [Run(number_of[file], *place) for file, places in more.items() for place in places]
    return ModelTable(tuple(files), tuple(fronts), tuple(tensors), tuple(name for name, _ in stored))


def _parts(entry: TensorEntry) -> list[TensorEntry]:
    return [part for _, part in sorted(entry.parts.items())] if entry.parts else [entry]


def _not_stored(checkpoint: Checkpoint, known: set[tuple[str, int]]) -> dict[str, list[tuple[int, int]]]:
    """What a GGUF model's metadata lie in, besides its fronts: frequencies of RoPE.

    Returns: for each of its files, also one without tensors, where such tensors begin and their bytes.
    """
    if not checkpoint.is_gguf:
        return {}
    parts = {str(part.path): part.tensors for part in read_parts(Path(checkpoint.path))}
    return {
        file: [(one.offset_bytes, one.num_bytes) for one in tensors if (file, one.offset_bytes) not in known]
        for file, tensors in parts.items()
    }


def digest_of(data: bytes | bytearray | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


def fingerprint_of(checkpoint: Checkpoint, table: ModelTable) -> str:
    """Of the model's shape and the beginning of every tensor: two models of one shape get different ones."""
    found = hashlib.blake2b(model_digest(checkpoint).encode(), digest_size=DIGEST_BYTES)
    for number, runs in groupby(sorted(table.tensors, key=lambda run: run.file), key=lambda run: run.file):
        with open(table.files[number], "rb", buffering=0) as opened:
            # Models of which one has its tensors in more files than the other have other copies.
            found.update(b"file" * number)
            for run in runs:
                found.update(os.pread(opened.fileno(), min(run.num_bytes, _SAMPLE_BYTES), run.offset_bytes))
    return found.hexdigest()
