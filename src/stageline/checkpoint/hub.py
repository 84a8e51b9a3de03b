"""A name on the hub becomes local files: from the cache if they are whole there, else by download.

`HuggingFaceTB/SmolLM2-135M-Instruct` is a repository with safetensors; `unsloth/Qwen3-0.6B-GGUF:Q4_K_M` one GGUF model
of many in a repository, by its quantisation, and `unsloth/Qwen3-0.6B-GGUF/Qwen3-0.6B-Q4_K_M.gguf` the same by its file.
One idea: only what will be read is fetched: weights, JSON files and templates, never code, never pickles, and of GGUF
models the files of the one that was named.
"""

from __future__ import annotations

import glob
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stageline.checkpoint.encodings import ENCODINGS
from stageline.checkpoint.fields import read_json_object
from stageline.checkpoint.gguf_parts import files_by_model, has_all_parts
from stageline.errors import CheckpointError

ALLOW_PATTERNS = ["*.safetensors", "*.json", "*.jinja"]
# The same weights once more, in their authors' own layout.
IGNORE_PATTERNS = ["consolidated*", "original/*", "onnx/*"]
_HUB_NAME = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*)(?::(?P<quant>[A-Za-z0-9][\w.-]*)|/(?P<file>[^:]+\.gguf))?"
)
_QUANT = re.compile(r"(?:^|[-._/])((?:UD-)?(?:I?Q\d\w*|TQ\d\w*|BF16|F16|F32|FP16|FP32|MXFP4\w*))$", re.IGNORECASE)
# Mixtures with types of two and three bits, and with tables of numbers; told before gigabytes are fetched.
_UNSUPPORTED = re.compile(r"(?:UD-)?(?:[IT]Q|Q[23]_K)", re.IGNORECASE)
_PART = re.compile(r"-\d{5}-of-\d{5}$")
_MOST_NAMED = 24
Names = tuple[str, ...]


@dataclass(frozen=True)
class _HubName:
    """What was typed: a repository, and perhaps a GGUF model in it, by its quantisation or by one of its files."""

    typed: str
    repo: str
    quant: str | None
    file: str | None

    @property
    def is_gguf(self) -> bool:
        return self.quant is not None or self.file is not None


def is_hub_id(model: str) -> bool:
    """It reads as `organisation/name`, with or without a GGUF model behind it, and not as a path or a file."""
    return _parsed(model) is not None


def _parsed(model: str) -> _HubName | None:
    match = _HUB_NAME.fullmatch(model)
    if match is None or match["repo"].endswith((".gguf", ".safetensors", ".json")):
        return None
    is_path = match["file"] is not None and any(part in ("", ".", "..") for part in match["file"].split("/"))
    return None if is_path else _HubName(model, match["repo"], match["quant"], match["file"])


def resolve_hub_model(hub_id: str) -> Path:
    """Args: hub_id: for which `is_hub_id` holds.
    Returns: the local directory, or a GGUF file.
    Raises: CheckpointError if it does not exist, is gated, or there is no network.
    """
    name = _parsed(hub_id)
    assert name is not None, "only hub ids are resolved"
    cached = _cached_directory(name)
    if cached is not None and (found := _in_cache(name, cached)) is not None:
        return found
    return _reached(name)


def _cached_directory(name: _HubName) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    # Nothing is returned if something is missing that matches; which GGUF files are wanted is not known yet.
    wanted = [] if name.is_gguf else ALLOW_PATTERNS
    try:
        return Path(
            snapshot_download(
                name.repo, allow_patterns=wanted, ignore_patterns=IGNORE_PATTERNS, local_files_only=True
            )
        )
    except LocalEntryNotFoundError:
        return None
    except HFValidationError as error:
        raise CheckpointError(f"{name.typed!r} is neither a path that exists nor a valid hub id: {error}") from error


def _in_cache(name: _HubName, cached: Path) -> Path | None:
    """What the cache has whole of it. One model of others in the cache is only taken if it was named."""
    if not name.is_gguf:
        return cached if _is_complete(cached) else None
    models = files_by_model(str(file.relative_to(cached)) for file in cached.rglob("*.gguf"))
    fitting = [model for model in models if _fits(name, model)]
    return cached / fitting[0][0] if len(fitting) == 1 and has_all_parts(fitting[0]) else None


def _fetched(name: _HubName) -> Path:
    from huggingface_hub import HfApi, snapshot_download

    files = HfApi().list_repo_files(name.repo)
    if not name.is_gguf and any("/" not in file and file.endswith(".safetensors") for file in files):
        return Path(snapshot_download(name.repo, allow_patterns=ALLOW_PATTERNS, ignore_patterns=IGNORE_PATTERNS))
    model = _chosen(name, files_by_model(files))
    return Path(snapshot_download(name.repo, allow_patterns=[glob.escape(file) for file in model])) / model[0]


def _chosen(name: _HubName, models: Sequence[Names]) -> Names:
    """The one that was named, or the only one. Raises: CheckpointError, with what to type."""
    fitting = [model for model in models if _fits(name, model)]
    supported = [model for model in models if not _UNSUPPORTED.match(_quant(model))]
    if name.quant is not None and fitting and fitting[0] not in supported:
        raise CheckpointError(
            f"{name.typed}: what is quantised so has types that are not supported; supported are "
            f"{', '.join(ENCODINGS)}; give {_to_type(name.repo, supported) or 'another repository'}"
        )
    if len(fitting) == 1:
        return fitting[0]
    if not models:
        wanted = "GGUF models" if name.is_gguf else "safetensors and no GGUF models"
        raise CheckpointError(f"{name.repo} on the hub has no {wanted}")
    if name.quant is None:
        found = f"no {name.file}" if name.file else f"no safetensors but {len(models)} GGUF models"
    else:
        found = f"{len(fitting) or 'no'} GGUF models of {name.quant}"
    others = [model for model in fitting if model in supported] or supported or models
    raise CheckpointError(f"{name.repo} on the hub has {found}; give {_to_type(name.repo, others)}")


def _fits(name: _HubName, model: Names) -> bool:
    if name.file is not None:
        return name.file in model
    return name.quant is None or _quant(model).lower() == name.quant.lower()


def _quant(model: Names) -> str:
    """How a model is quantised, by its name or else its folder's; empty if neither tells."""
    stem = _PART.sub("", model[0].removesuffix(".gguf"))
    match = _QUANT.search(stem) or _QUANT.search(stem.rpartition("/")[0])
    return "" if match is None else match[1]


def _to_type(repo: str, models: Sequence[Names]) -> str:
    quants = [_quant(model) for model in models]
    once = {quant for quant, count in Counter(map(str.lower, quants)).items() if quant and count == 1}
    each = [
        f"{repo}:{quant}" if quant.lower() in once else f"{repo}/{model[0]}"
        for model, quant in zip(models, quants, strict=True)
    ]
    return ", ".join(each[:_MOST_NAMED]) + (f" or {len(each) - _MOST_NAMED} more" if len(each) > _MOST_NAMED else "")


def _reached(name: _HubName) -> Path:
    """As `_fetched`. Raises: CheckpointError also for whatever the hub or the way to it does."""
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        return _fetched(name)
    except CheckpointError:
        raise
    except GatedRepoError as error:
        raise CheckpointError(
            f"the hub model {name.repo} is gated: ask for access on its page, then log in with `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{name.typed!r} is not a path that exists, and the hub has no such model, or it is private and needs "
            "`hf auth login`"
        ) from error
    except Exception as error:  # offline mode, DNS, proxies and HTTP errors have no common base class
        raise CheckpointError(
            f"{name.typed!r} is not a path that exists and is not whole in the local cache, and the hub cannot be "
            f"reached ({type(error).__name__}: {_first_line(error)}); download it elsewhere and give its path"
        ) from error


def _is_complete(directory: Path) -> bool:
    if not (directory / "config.json").is_file():
        return False
    index = directory / "model.safetensors.index.json"
    if not index.is_file():
        return (directory / "model.safetensors").is_file()
    weight_map = read_json_object(index).get("weight_map")
    return isinstance(weight_map, dict) and all((directory / str(shard)).is_file() for shard in weight_map.values())


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "").rstrip(". ")
