"""A GGUF model that is split over several files: NAME-00001-of-00003.gguf and so on, as gguf-split names them.

One idea: the first file has the model's metadata, every file has some of its tensors, and each tensor names its file.
Put together they are one `GgufFile`, and who reads a model knows of no parts. That the files belong together is looked
at here, as far as it can be: only the first one says which model it is of.
Source: tools/gguf-split and src/llama-model-loader.cpp in the llama.cpp repository.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from stageline.checkpoint.fields import Fields
from stageline.checkpoint.gguf_container import GgufFile, GgufTensor, read_gguf
from stageline.errors import CheckpointError

_PART_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_BLOCK_TENSOR = re.compile(r"blk\.\d+\.(.+)")
_MOST_NAMED, _MOST_SUMMED, _MOST_MODELS = 3, 12, 16
_ENDING = ".gguf"
# Projectors of images, and statistics that quantisation used.
_BESIDE = ("mmproj", "imatrix")
_NO, _COUNT, _TENSORS = "split.no", "split.count", "split.tensors.count"


def part_path(folder: Path, name: str, number: int, count: int) -> Path:
    """Args: number: from 1."""
    return folder / f"{name}-{number:05d}-of-{count:05d}.gguf"


def first_part(path: Path) -> Path:
    """The file with the metadata of the model that `path` is a part of, by its name; `path` itself of other files."""
    match = _PART_NAME.fullmatch(path.name)
    first = path if match is None else part_path(path.parent, match[1], 1, int(match[3]))
    return first if first.is_file() else path


def files_by_model(names: Iterable[str]) -> tuple[tuple[str, ...], ...]:
    """Which GGUF files are one model, by their names; what only goes with a model, such as mmproj files, is left out.

    Args: names: of files, perhaps with folders in front.
    Returns: each model's names, in order.
    """
    models: dict[tuple[str, str], list[str]] = {}
    for name in sorted(names):
        is_model = name.endswith(_ENDING) and not any(word in name.rsplit("/", 1)[-1].lower() for word in _BESIDE)
        if is_model:
            match = _PART_NAME.fullmatch(name)
            models.setdefault((name, "1") if match is None else (match[1], match[3]), []).append(name)
    return tuple(map(tuple, models.values()))


def has_all_parts(names: Sequence[str]) -> bool:
    """Whether a model's files, as `files_by_model` gives them, are as many as their names say."""
    match = _PART_NAME.fullmatch(names[0])
    return match is None or len(names) == int(match[3])


def only_model(folder: Path) -> Path | None:
    """The first file of the only GGUF model that a folder has; None if it has none.

    Raises: CheckpointError if there are several, with their names.
    """
    models = files_by_model(file.name for file in folder.glob(f"*{_ENDING}"))
    if len(models) > 1:
        raise CheckpointError(
            f"{folder} has {len(models)} GGUF models: {told_models(models)}; give one of them, such as "
            f"{folder / models[0][0]}"
        )
    return first_part(folder / models[0][0]) if models else None


def told_models(models: Sequence[Sequence[str]]) -> str:
    """By a name of each, with how many files it has."""
    names = [names[0] + (f" ({len(names)} files)" if len(names) > 1 else "") for names in models[:_MOST_MODELS]]
    return ", ".join(names) + (f" and {len(models) - _MOST_MODELS} more" if len(models) > _MOST_MODELS else "")


def read_model(path: Path) -> GgufFile:
    """The whole model. Args: path: of any of its files. Raises: CheckpointError as `read_parts`, or for a tensor that
    is there twice.
    """
    parts = read_parts(path)
    tensors = [tensor for part in parts for tensor in part.tensors]
    told = _told_count(parts) if len(parts) > 1 else len(tensors)
    _check_once(tensors)
    if len(tensors) != told:
        each = " + ".join(str(len(part.tensors)) for part in parts[:_MOST_SUMMED])
        raise CheckpointError(
            f"{parts[0].path}: the model has {told} tensors ({_TENSORS}), but its {len(parts)} files have "
            f"{len(tensors)} ({each}{' + ...' if len(parts) > _MOST_SUMMED else ''})"
        )
    if len(parts) > 1:
        _check_alike(tensors)
    return GgufFile(parts[0].path, parts[0].metadata, tuple(tensors))


def read_parts(path: Path) -> tuple[GgufFile, ...]:
    """The front of each of a model's files, in order. Args: path: of any of them.
    Raises: CheckpointError if one is missing, damaged or truncated, or says that it is another part than its name says.
    """
    given = read_gguf(path)
    count = _integer(given, _COUNT, default=1)
    if count <= 1:
        return (given,)
    match = _PART_NAME.fullmatch(path.name)
    if match is None:
        raise CheckpointError(
            f"{path} is one of {count} files of a model, and their names tell which are the others: call it and them "
            f"{part_path(Path(), path.stem, 1, count)} and so on"
        )
    paths = [part_path(path.parent, match[1], number, int(match[3])) for number in range(1, int(match[3]) + 1)]
    _check_named(given, count, paths)
    _check_there(paths)
    parts = tuple(given if file == path else read_gguf(file) for file in paths)
    for number, part in enumerate(parts):
        _check_named(part, count, paths, number)
    return parts


def _integer(part: GgufFile, key: str, default: int | None = None) -> int:
    return Fields(part.metadata, str(part.path)).integer(key, default=default, lowest=0)


def _check_named(part: GgufFile, count: int, paths: Sequence[Path], number: int | None = None) -> None:
    found = _integer(part, _COUNT, default=1)
    if found != len(paths):
        raise CheckpointError(f"{part.path}: it is one of {found} files ({_COUNT}), but named one of {len(paths)}")
    if number is not None and (no := _integer(part, _NO)) != number:
        raise CheckpointError(
            f"{part.path}: it is file {no + 1} of {count} ({_NO} is {no}), but named file {number + 1}"
        )


def _check_there(paths: Sequence[Path]) -> None:
    missing = [file.name for file in paths if not file.is_file()]
    if missing:
        names = ", ".join(missing[:_MOST_NAMED]) + (" and so on" if len(missing) > _MOST_NAMED else "")
        raise CheckpointError(
            f"{paths[0].parent} has {len(paths) - len(missing)} of the model's {len(paths)} files; missing: {names}"
        )


def _check_once(tensors: Iterable[GgufTensor]) -> None:
    file_of: dict[str, Path] = {}
    for tensor in tensors:
        if tensor.name in file_of:
            raise CheckpointError(
                f"{tensor.file}: tensor {tensor.name} is there twice; first it is in {file_of[tensor.name].name}"
            )
        file_of[tensor.name] = tensor.file


def _told_count(parts: Sequence[GgufFile]) -> int:
    """Each file tells how many tensors the model has in all its files. Raises: CheckpointError if they differ."""
    first, told = parts[0], _integer(parts[0], _TENSORS)
    for part in parts[1:]:
        if (other := _integer(part, _TENSORS)) != told:
            raise CheckpointError(
                f"{part.path}: it is of a model of {other} tensors ({_TENSORS}), but {first.path.name} of one of {told}"
            )
    return told


def _check_alike(tensors: Iterable[GgufTensor]) -> None:
    """All layers have tensors of the same shapes, by name: a part of a larger or smaller model has others."""
    seen: dict[str, GgufTensor] = {}
    for tensor in tensors:
        if (match := _BLOCK_TENSOR.fullmatch(tensor.name)) is None:
            continue
        other = seen.setdefault(match[1], tensor)
        if other.shape != tensor.shape:
            raise CheckpointError(
                f"{tensor.file}: tensor {tensor.name} has shape {list(tensor.shape)}, but {other.name} in "
                f"{other.file.name} has {list(other.shape)}; one of the files is of another model"
            )
