"""Safetensors headers: believed only where they fit the file."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stageline.checkpoint.safetensors_index import read_safetensors_index
from stageline.errors import CheckpointError
from tests.unit.checkpoint_files import write_raw_safetensors, write_safetensors

SHAPES = {"a": (2, 3), "b": (4,), "scalar": ()}


def entry(begin: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_offsets_are_counted_from_the_start_of_the_file(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "m.safetensors", SHAPES)
    index = read_safetensors_index(path)
    start = path.stat().st_size - (6 + 4 + 1) * 4
    assert [(e.offset_bytes - start, e.num_bytes, e.shape) for e in index.values()] == [
        (0, 24, (2, 3)),
        (24, 16, (4,)),
        (40, 4, ()),
    ]


def test_a_truncated_file_gives_both_sizes(tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "m.safetensors", SHAPES)
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(CheckpointError, match=rf"truncated.*{size} bytes.*{size - 5}"):
        read_safetensors_index(path)


@pytest.mark.parametrize(
    ("header", "data", "words"),
    [
        ({"a": entry(0, 24, [2, 3]), "b": entry(20, 36, [4])}, 36, "overlap"),
        ({"a": entry(0, 20, [2, 3])}, 20, "needs 24 bytes"),
        ({"a": entry(8, 4, [])}, 8, "cannot be"),
        ({"a": entry(0, 8, [-2])}, 8, "cannot be"),
        ({"a": {"dtype": "F32"}}, 8, "malformed"),
        ({"a": entry(0, 2**60, [2**58])}, 8, "truncated"),
    ],
)
def test_a_header_that_cannot_be_is_refused(tmp_path: Path, header: dict[str, Any], data: int, words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        read_safetensors_index(write_raw_safetensors(tmp_path / "m.safetensors", header, data))


@pytest.mark.parametrize(
    "content", [b"", b"abc", struct.pack("<Q", 2**40) + b"{}", struct.pack("<Q", 5) + b"{", b"x" * 64]
)
def test_a_file_of_another_kind_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "m.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"m\.safetensors"):
        read_safetensors_index(path)


@settings(max_examples=300, deadline=None)
@given(position=st.integers(0, 250), value=st.integers(0, 255))
def test_a_changed_byte_is_refused_or_harmless_but_never_a_crash(
    tmp_path_factory: pytest.TempPathFactory, position: int, value: int
) -> None:
    path = write_safetensors(tmp_path_factory.mktemp("s") / "m.safetensors", SHAPES)
    data = bytearray(path.read_bytes())
    data[position % len(data)] = value
    path.write_bytes(data)
    try:
        index = read_safetensors_index(path)
    except CheckpointError:
        return
    assert all(e.offset_bytes + e.num_bytes <= len(data) for e in index.values())
