"""A hub id such as `HuggingFaceTB/SmolLM2-135M-Instruct` becomes a local directory: from the cache if it is whole
there, else by download. Only weights, JSON files and templates are fetched: never code, never pickles.
"""

from __future__ import annotations

import re
from pathlib import Path

from stageline.checkpoint.fields import read_json_object
from stageline.errors import CheckpointError

ALLOW_PATTERNS = ["*.safetensors", "*.json", "*.jinja"]
# The same weights once more, in their authors' own layout.
IGNORE_PATTERNS = ["consolidated*", "original/*", "onnx/*"]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*")


def is_hub_id(model: str) -> bool:
    """It reads as `organisation/name` and not as a path or a file."""
    return _HUB_ID.fullmatch(model) is not None and not model.endswith((".gguf", ".safetensors", ".json"))


def resolve_hub_model(hub_id: str) -> Path:
    """Returns: the local directory. Raises: CheckpointError if it does not exist, is gated, or there is no network."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        cached = Path(snapshot_download(hub_id, allow_patterns=ALLOW_PATTERNS, local_files_only=True))
        if _is_complete(cached):
            return cached
    except LocalEntryNotFoundError:
        pass
    except HFValidationError as error:
        raise CheckpointError(f"{hub_id!r} is neither a path that exists nor a valid hub id: {error}") from error
    try:
        return Path(snapshot_download(hub_id, allow_patterns=ALLOW_PATTERNS, ignore_patterns=IGNORE_PATTERNS))
    except GatedRepoError as error:
        raise CheckpointError(
            f"the hub model {hub_id} is gated: ask for access on its page, then log in with `hf auth login`"
        ) from error
    except RepositoryNotFoundError as error:
        raise CheckpointError(
            f"{hub_id!r} is not a path that exists, and the hub has no such model, or it is private and needs "
            "`hf auth login`"
        ) from error
    except Exception as error:  # offline mode, DNS, proxies and HTTP errors have no common base class
        raise CheckpointError(
            f"{hub_id!r} is not a path that exists and is not whole in the local cache, and the hub cannot be reached "
            f"({type(error).__name__}: {_first_line(error)}); download it elsewhere and give its directory"
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
