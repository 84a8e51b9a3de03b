"""The index of a safetensors file: an 8-byte length, a JSON header, then the bytes. Only the header is read here.

Source: the format section of the safetensors README.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import msgspec

from stageline.checkpoint.checkpoint import TensorEntry
from stageline.checkpoint.encodings import ENCODINGS
from stageline.errors import CheckpointError

LARGEST_HEADER_BYTES = 100 * 2**20
# Types that exist but hold no weight we can read; known so that their sizes can be checked too.
_OTHER_ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "U32": 4, "I32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip


class _HeaderEntry(msgspec.Struct, frozen=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def read_safetensors_index(path: Path) -> dict[str, TensorEntry]:
    """Every tensor of one safetensors file.

    Raises: CheckpointError if the header is absurd, tensors overlap, or the file is shorter than its header promises.
    """
    try:
        file_bytes = path.stat().st_size
        with path.open("rb") as file:
            header, data_start = _read_header(path, file, file_bytes)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    entries = {}
    for name, raw in header.items():
        if name != "__metadata__":
            entries[name] = _tensor_entry(path, name, raw, data_start)
    _check_extents(path, list(entries.values()), data_start, file_bytes)
    return entries


def _read_header(path: Path, file: Any, file_bytes: int) -> tuple[dict[str, msgspec.Raw], int]:
    prefix = file.read(8)
    if len(prefix) < 8:
        raise CheckpointError(f"{path} has {file_bytes} bytes; a safetensors file begins with an 8-byte header length")
    (header_bytes,) = struct.unpack("<Q", prefix)
    if header_bytes > LARGEST_HEADER_BYTES:
        raise CheckpointError(
            f"{path}: its header claims {header_bytes} bytes (at most {LARGEST_HEADER_BYTES} make sense); "
            "this is not a safetensors file"
        )
    header = file.read(header_bytes)
    if len(header) < header_bytes:
        raise CheckpointError(
            f"{path} is truncated: its header needs {8 + header_bytes} bytes, the file has {file_bytes}; "
            "download it again"
        )
    try:
        return msgspec.json.decode(header, type=dict[str, msgspec.Raw]), 8 + header_bytes
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a safetensors file: its header is not a JSON object ({error})") from error


def _tensor_entry(path: Path, name: str, raw: msgspec.Raw, data_start: int) -> TensorEntry:
    try:
        entry = msgspec.json.decode(raw, type=_HeaderEntry)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: the header's entry of tensor {name} is malformed: {error}") from error
    item_bytes = ENCODINGS[entry.dtype].block_bytes if entry.dtype in ENCODINGS else _OTHER_ITEM_BYTES.get(entry.dtype)
    begin, end = entry.data_offsets
    if any(size < 0 for size in entry.shape) or not 0 <= begin <= end:
        raise CheckpointError(f"{path}: tensor {name} of shape {entry.shape} at bytes {begin} to {end} cannot be")
    if item_bytes is not None and math.prod(entry.shape) * item_bytes != end - begin:
        raise CheckpointError(
            f"{path}: tensor {name} of shape {entry.shape} and type {entry.dtype} needs "
            f"{math.prod(entry.shape) * item_bytes} bytes, its header gives it {end - begin}"
        )
    return TensorEntry(
        name=name,
        file=str(path),
        offset_bytes=data_start + begin,
        num_bytes=end - begin,
        shape=tuple(entry.shape),
        encoding=entry.dtype,
        stored_name=name,
    )


def _check_extents(path: Path, entries: list[TensorEntry], data_start: int, file_bytes: int) -> None:
    """Tensors must not overlap and must lie in the file."""
    end, previous = data_start, "the header"
    for entry in sorted(entries, key=lambda entry: (entry.offset_bytes, entry.num_bytes)):
        if entry.offset_bytes < end:
            raise CheckpointError(
                f"{path}: tensors {previous} and {entry.stored_name} overlap at byte {entry.offset_bytes}"
            )
        end, previous = entry.offset_bytes + entry.num_bytes, entry.stored_name
    if end > file_bytes:
        raise CheckpointError(
            f"{path} is truncated: its tensors need {end} bytes, the file has {file_bytes} (tensor {previous} is cut "
            "off); download it again"
        )
