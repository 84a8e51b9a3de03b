"""The GGUF container: key/value metadata, a tensor index, then aligned bytes. Nothing but the front is touched.

One idea: walk the front once through mmap with struct; long arrays (vocabularies) are stepped over unless asked for.
Every count and length is checked against the bytes that are left before anything is allocated for it.
Source: docs/gguf.md in the ggml repository.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stageline.checkpoint.encodings import ENCODINGS, GGML_TYPE_NAMES, Encoding
from stageline.errors import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
# Longer arrays are vocabularies; opening a model does not need them.
SHORT_ARRAY = 4096

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_SMALLEST_PAIR_BYTES = 8 + 4 + 1
_SMALLEST_TENSOR_BYTES = 8 + 4 + 4 + 8


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of the index; `shape` is in Hugging Face's order (slowest dimension first)."""

    name: str
    shape: tuple[int, ...]
    encoding: str
    offset_bytes: int
    num_bytes: int
    file: Path


@dataclass(frozen=True)
class GgufFile:
    """The front of a GGUF file, or of the files of a split model together.

    Args:
        path: of a split model's, the first file.
        metadata: values by key; arrays are lists. Those longer than SHORT_ARRAY are left out unless asked for.
        tensors: in the file's order, `offset_bytes` counted from the start of theirs.
    """

    path: Path
    metadata: Mapping[str, object]
    tensors: tuple[GgufTensor, ...]


def is_gguf(path: Path) -> bool:
    """The file begins with GGUF's magic bytes."""
    with path.open("rb") as file:
        return file.read(4) == MAGIC


def read_gguf(path: Path, with_vocabulary: bool = False) -> GgufFile:
    """Args: with_vocabulary: also read the long arrays.
    Raises: CheckpointError if the file is not GGUF, damaged, truncated or of an unsupported version or tensor type.
    """
    try:
        with path.open("rb") as file:
            if path.stat().st_size < 24:
                raise CheckpointError(f"{path} has {path.stat().st_size} bytes; GGUF begins with 24 bytes of header")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Walker(path, data).read(with_vocabulary)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error


class _Walker:
    """Reads one mapped file front to back; `_position` is the next byte."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._size = len(data)
        self._position = 0

    def read(self, with_vocabulary: bool) -> GgufFile:
        num_tensors, num_pairs = self._header()
        metadata: dict[str, object] = {}
        for _ in range(num_pairs):
            key = self._string("a metadata key")
            kind = self._scalar("<I", key)
            if kind != _ARRAY:
                metadata[key] = self._value(kind, key)
            elif (array := self._array(key, with_vocabulary)) is not None:
                metadata[key] = array
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 8 or alignment % 8:
            raise self._error(f"general.alignment is {alignment!r}; it must be a positive multiple of 8")
        index = [self._tensor_head() for _ in range(num_tensors)]
        data_start = math.ceil(self._position / alignment) * alignment
        tensors = tuple(self._tensor(*head, data_start) for head in index)
        self._check_extents(tensors, data_start)
        return GgufFile(self._path, metadata, tensors)

    def _header(self) -> tuple[int, int]:
        """Returns: number of tensors and of metadata pairs."""
        if self._data[:4] != MAGIC:
            raise CheckpointError(f"{self._path} is not a GGUF file: it begins with {self._data[:4]!r}, not {MAGIC!r}")
        version, num_tensors, num_pairs = struct.unpack_from("<IQQ", self._data, 4)
        if version not in VERSIONS:
            note = " (it is big-endian; convert it to little-endian)" if version in (2 << 24, 3 << 24) else ""
            raise self._error(f"version {version}{note}; supported are {', '.join(map(str, VERSIONS))}")
        self._position = 24
        self._check_count(num_tensors, _SMALLEST_TENSOR_BYTES, "tensors")
        self._check_count(num_pairs, _SMALLEST_PAIR_BYTES, "metadata pairs")
        return num_tensors, num_pairs

    def _value(self, kind: int, key: str) -> object:
        if kind == _STRING:
            return self._string(key)
        if kind not in _SCALARS:
            raise self._error(f"{key} has value type {kind}, which GGUF does not define; the file is damaged")
        return self._scalar(_SCALARS[kind], key)

    def _array(self, key: str, with_vocabulary: bool) -> list[object] | None:
        kind, count = self._scalar("<I", key), self._scalar("<Q", key)
        if kind != _STRING and kind not in _SCALARS:
            raise self._error(f"{key} is an array of value type {kind}, which is not supported")
        wanted = with_vocabulary or count <= SHORT_ARRAY
        if kind == _STRING:
            self._check_count(count, 8, f"strings in {key}")
            return self._strings(count, key, wanted)
        item = struct.Struct(_SCALARS[kind])
        self._check_count(count, item.size, f"values in {key}")
        begin, self._position = self._position, self._position + count * item.size
        if not wanted:
            return None
        return list(struct.unpack_from(f"<{count}{_SCALARS[kind][1]}", self._data, begin))

    def _strings(self, count: int, key: str, wanted: bool) -> list[object] | None:
        """The hot loop of opening a file: two vocabularies of ~50 000 strings each."""
        data, position, size = self._data, self._position, self._size
        unpack_length = struct.Struct("<Q").unpack_from
        strings: list[object] = []
        try:
            for _ in range(count):
                end = position + 8 + unpack_length(data, position)[0]
                if end > size:
                    raise self._truncated(end, key)
                if wanted:
                    strings.append(data[position + 8 : end].decode())
                position = end
        except struct.error:
            raise self._truncated(position + 8, key) from None
        except UnicodeDecodeError as error:
            raise self._error(f"{key} holds a string that is not UTF-8: {error}") from error
        self._position = position
        return strings if wanted else None

    def _string(self, what: str) -> str:
        length = self._scalar("<Q", what)
        begin, end = self._position, self._position + length
        if end > self._size:
            raise self._truncated(end, what)
        self._position = end
        try:
            return self._data[begin:end].decode()
        except UnicodeDecodeError as error:
            raise self._error(f"{what} is not UTF-8: {error}") from error

    def _scalar(self, layout: str, what: str) -> int:
        """An int for the layouts of counts and lengths; for values also a float or a bool."""
        end = self._position + struct.calcsize(layout)
        if end > self._size:
            raise self._truncated(end, what)
        value: int = struct.unpack_from(layout, self._data, self._position)[0]
        self._position = end
        return value

    def _tensor_head(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string("a tensor's name")
        num_dimensions = self._scalar("<I", name)
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise self._error(f"tensor {name} has {num_dimensions} dimensions; GGUF allows 1 to {MAX_DIMENSIONS}")
        shape = tuple(self._scalar("<Q", name) for _ in range(num_dimensions))[::-1]
        return name, shape, self._scalar("<I", name), self._scalar("<Q", name)

    def _tensor(self, name: str, shape: tuple[int, ...], type_id: int, offset: int, data_start: int) -> GgufTensor:
        encoding = self._encoding(name, type_id)
        if shape[-1] % encoding.block_elements:
            raise self._error(
                f"tensor {name} of type {encoding.name} has rows of {shape[-1]} elements, not a multiple of "
                f"{encoding.block_elements}"
            )
        num_bytes = encoding.num_bytes(math.prod(shape))
        return GgufTensor(name, shape, encoding.name, data_start + offset, num_bytes, self._path)

    def _encoding(self, name: str, type_id: int) -> Encoding:
        type_name = GGML_TYPE_NAMES.get(type_id, f"number {type_id}")
        if type_name not in ENCODINGS:
            raise self._error(
                f"tensor {name} is of type {type_name}, which is not supported; supported are {', '.join(ENCODINGS)}"
            )
        return ENCODINGS[type_name]

    def _check_extents(self, tensors: tuple[GgufTensor, ...], data_start: int) -> None:
        end, previous = data_start, "the header"
        for tensor in sorted(tensors, key=lambda tensor: tensor.offset_bytes):
            if tensor.offset_bytes < end:
                raise self._error(f"tensors {previous} and {tensor.name} overlap at byte {tensor.offset_bytes}")
            end, previous = tensor.offset_bytes + tensor.num_bytes, tensor.name
        if tensors and end > self._size:
            raise self._truncated(end, f"tensor {previous}")

    def _check_count(self, count: int, smallest_bytes: int, what: str) -> None:
        if count * smallest_bytes > self._size - self._position:
            raise self._error(
                f"{count} {what} cannot fit in the {self._size - self._position} bytes that follow; the file is "
                "damaged or truncated"
            )

    def _truncated(self, needed: int, what: str) -> CheckpointError:
        return self._error(
            f"truncated or damaged at {what}: {needed} bytes are needed, the file has {self._size}; download it again"
        )

    def _error(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {message}")
