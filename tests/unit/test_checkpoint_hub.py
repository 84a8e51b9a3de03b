"""Hub ids: the cache first, and errors that say what to do, with the hub's client replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

from stageline.checkpoint import open_checkpoint
from stageline.checkpoint.hub import is_hub_id
from stageline.errors import CheckpointError
from tests.unit.checkpoint_files import write_hf_directory

HUB_ID = "somebody/some-model"


class FakeHub:
    """Stands in for snapshot_download: answers from a cache, or from a network."""

    def __init__(self, cached: Path | None, network: Path | Exception) -> None:
        self.cached, self.network = cached, network
        self.downloads: list[dict[str, Any]] = []

    def __call__(self, repo_id: str, local_files_only: bool = False, **kwargs: Any) -> str:
        assert repo_id == HUB_ID
        if local_files_only:
            if self.cached is None:
                raise LocalEntryNotFoundError("not cached")
            return str(self.cached)
        self.downloads.append(kwargs)
        if isinstance(self.network, Exception):
            raise self.network
        return str(self.network)


def http_error(kind: type[Exception]) -> Exception:
    """Made without the HTTP response that its constructor wants."""
    error = kind.__new__(kind)
    error.args = ("refused",)
    return error


def install(monkeypatch: pytest.MonkeyPatch, hub: FakeHub) -> FakeHub:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    return hub


def test_a_model_that_is_whole_in_the_cache_needs_no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub = install(monkeypatch, FakeHub(write_hf_directory(tmp_path), OSError("no network")))
    assert open_checkpoint(HUB_ID).path == str(tmp_path)
    assert hub.downloads == []


def test_a_partly_cached_model_is_downloaded_without_code_or_pickles(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    partly = write_hf_directory(tmp_path / "partly")
    (partly / "model.safetensors").unlink()
    hub = install(monkeypatch, FakeHub(partly, write_hf_directory(tmp_path / "whole")))
    assert open_checkpoint(HUB_ID).path == str(tmp_path / "whole")
    assert hub.downloads[0]["allow_patterns"] == ["*.safetensors", "*.json", "*.jinja"]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError("Name or service not known"), "cannot be reached.*Name or service not known"),
        (http_error(RepositoryNotFoundError), "no such model"),
        (http_error(GatedRepoError), "gated"),
    ],
)
def test_every_failure_says_what_to_do(monkeypatch: pytest.MonkeyPatch, error: Exception, words: str) -> None:
    install(monkeypatch, FakeHub(None, error))
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(HUB_ID)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("HuggingFaceTB/SmolLM2-135M-Instruct", True),
        ("./here/there", False),
        ("/a/b", False),
        ("~/models/x", False),
        ("a/b/c", False),
        ("gpt2", False),
        ("folder/model.gguf", False),
        ("../x", False),
    ],
)
def test_only_two_plain_words_are_a_hub_id(model: str, expected: bool) -> None:
    assert is_hub_id(model) is expected
