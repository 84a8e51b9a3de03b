"""Hub ids: the cache first, only what is read, and errors that say what to do, with the hub's client replaced."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

from stageline.checkpoint import open_checkpoint
from stageline.checkpoint.hub import is_hub_id
from stageline.errors import CheckpointError
from tests.unit.checkpoint_files import split_gguf, write_gguf_model, write_hf_directory

HUB_ID = "somebody/some-model"


class FakeHub:
    """Stands in for snapshot_download and the list of a repository's files: a cache, and a network or what it raises.

    Args:
        cached: the local directory; None if there is none.
        network: a directory with the repository's files.
        tree: files that the cache knows the repository to have; with some of them missing nothing is whole.
    """

    def __init__(self, cached: Path | None, network: Path | Exception, tree: Sequence[str] = ()) -> None:
        self.cached, self.network, self.tree = cached, network, tree
        self.downloads: list[dict[str, Any]] = []

    def __call__(self, repo_id: str, local_files_only: bool = False, **kwargs: Any) -> str:
        assert repo_id == HUB_ID
        if local_files_only:
            if self.cached is None or not all((self.cached / file).exists() for file in matching(self.tree, **kwargs)):
                raise LocalEntryNotFoundError("not cached")
            return str(self.cached)
        self.downloads.append(kwargs)
        return str(self._reached())

    def list_repo_files(self, repo_id: str) -> list[str]:
        assert repo_id == HUB_ID
        return [str(path.relative_to(self._reached())) for path in self._reached().rglob("*") if path.is_file()]

    def _reached(self) -> Path:
        if isinstance(self.network, Exception):
            raise self.network
        return self.network

    @property
    def fetched(self) -> list[str]:
        """Files that match what the last download asked for."""
        return sorted(matching(self.list_repo_files(HUB_ID), **self.downloads[-1]))


def matching(files: Iterable[str], allow_patterns: Sequence[str], ignore_patterns: Sequence[str] = ()) -> list[str]:
    return [
        file
        for file in files
        if any(fnmatch(file, pattern) for pattern in allow_patterns)
        and not any(fnmatch(file, pattern) for pattern in ignore_patterns)
    ]


def http_error(kind: type[Exception]) -> Exception:
    """Made without the HTTP response that its constructor wants."""
    error = kind.__new__(kind)
    error.args = ("refused",)
    return error


def install(monkeypatch: pytest.MonkeyPatch, hub: FakeHub) -> FakeHub:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    return hub


def test_a_model_that_is_whole_in_the_cache_needs_no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tree = ["config.json", "model.safetensors", "original/params.json", "consolidated.safetensors", "README.md"]
    hub = install(monkeypatch, FakeHub(write_hf_directory(tmp_path), OSError("no network"), tree))
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
@pytest.mark.parametrize("behind", ["", ":Q4_K_M", "/a/b.gguf"])
def test_every_failure_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, error: Exception, words: str, behind: str
) -> None:
    install(monkeypatch, FakeHub(None, error))
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(HUB_ID + behind)


@pytest.fixture(scope="module")
def gguf_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models as publishers name them; `split` is of three files, in a folder named after what it is."""
    folder = tmp_path_factory.mktemp("repository")
    whole = write_gguf_model(folder / "Tiny-BF16.gguf")
    split_gguf(whole, folder / "BF16", 10)
    whole.unlink()
    (folder / "x").mkdir()
    for name in ("-Q4_K_M", "-UD-Q4_K_M", ".q8_0", "-Q4_K_S", "-chat", "-IQ4_XS"):
        write_gguf_model(folder / f"Tiny{name}.gguf")
    write_gguf_model(folder / "x" / "Other-Q8_0.gguf")
    for name in ("mmproj-F16.gguf", "config.json", "README.md", "model.py"):
        (folder / name).write_text("{}")
    return folder


@pytest.mark.parametrize(
    ("behind", "files"),
    [
        (":Q4_K_M", ["Tiny-Q4_K_M.gguf"]),
        (":q4_k_s", ["Tiny-Q4_K_S.gguf"]),
        (":UD-Q4_K_M", ["Tiny-UD-Q4_K_M.gguf"]),
        (":BF16", [f"BF16/Tiny-BF16-0000{number}-of-00003.gguf" for number in (1, 2, 3)]),
        ("/Tiny.q8_0.gguf", ["Tiny.q8_0.gguf"]),
        ("/BF16/Tiny-BF16-00002-of-00003.gguf", [f"BF16/Tiny-BF16-0000{n}-of-00003.gguf" for n in (1, 2, 3)]),
    ],
)
def test_of_gguf_models_only_the_files_of_the_one_that_was_named_are_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gguf_repository: Path, behind: str, files: list[str]
) -> None:
    hub = install(monkeypatch, FakeHub(None, gguf_repository))
    checkpoint = open_checkpoint(HUB_ID + behind)
    assert hub.fetched == files and len(hub.downloads) == 1
    assert checkpoint.path == str(gguf_repository / files[0])
    assert {entry.file for entry in checkpoint.tensors.values()} == {str(gguf_repository / file) for file in files}
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).symlink_to(gguf_repository / file)
    tree = hub.list_repo_files(HUB_ID)
    cached = install(monkeypatch, FakeHub(tmp_path, OSError("no network"), tree))
    again = open_checkpoint(HUB_ID + behind)
    assert again.path == str(tmp_path / files[0]) and cached.downloads == []
    assert again.spec == checkpoint.spec and list(again.tensors) == list(checkpoint.tensors)


@pytest.mark.parametrize(
    ("behind", "words"),
    [
        (
            "",
            r"has no safetensors but 8 GGUF models; give somebody/some-model:BF16, somebody/some-model:Q4_K_M, "
            r"somebody/some-model:Q4_K_S, somebody/some-model:UD-Q4_K_M, somebody/some-model/Tiny-chat\.gguf, "
            r"somebody/some-model/Tiny\.q8_0\.gguf, somebody/some-model/x/Other-Q8_0\.gguf$",
        ),
        (":iq4_xs", r"model:iq4_xs: what is quantised so has types .* supported are F32, .*; give somebody/some-"),
        (":Q2_K", r"has no GGUF models of Q2_K; give somebody/some-model:BF16, "),
        (":Q4_K", r"has no GGUF models of Q4_K; give somebody/some-model:BF16, "),
        (":Q8_0", r"has 2 GGUF models of Q8_0; give somebody/some-model/Tiny\.q8_0\.gguf, somebody/some-model/x/Oth"),
        ("/Tiny-Q2_K.gguf", r"has no Tiny-Q2_K\.gguf; give somebody/some-model:BF16, "),
    ],
)
def test_what_names_no_gguf_model_is_told_which_there_are(
    monkeypatch: pytest.MonkeyPatch, gguf_repository: Path, behind: str, words: str
) -> None:
    hub = install(monkeypatch, FakeHub(None, gguf_repository))
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(HUB_ID + behind)
    assert hub.downloads == []


def test_a_repository_with_one_gguf_model_needs_no_more_than_its_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_gguf_model(tmp_path / "Tiny-Q4_0.gguf")
    install(monkeypatch, FakeHub(None, tmp_path))
    assert open_checkpoint(HUB_ID).path == str(tmp_path / "Tiny-Q4_0.gguf")
    with_both = write_hf_directory(tmp_path)
    assert open_checkpoint(HUB_ID).path == str(with_both) and not open_checkpoint(HUB_ID).is_gguf


def test_a_split_model_that_is_not_whole_in_the_cache_is_fetched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gguf_repository: Path
) -> None:
    cached = tmp_path / "BF16"
    cached.mkdir()
    (cached / "Tiny-BF16-00002-of-00003.gguf").write_bytes(b"GGUF")
    hub = install(monkeypatch, FakeHub(tmp_path, gguf_repository))
    assert open_checkpoint(f"{HUB_ID}:BF16").path.startswith(str(gguf_repository))
    assert len(hub.fetched) == 3


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("HuggingFaceTB/SmolLM2-135M-Instruct", True),
        ("unsloth/Qwen3-0.6B-GGUF:Q4_K_M", True),
        ("unsloth/Qwen3-0.6B-GGUF:UD-Q4_K_XL", True),
        ("unsloth/Qwen3-0.6B-GGUF/Qwen3-0.6B-Q4_K_M.gguf", True),
        ("unsloth/Qwen3-0.6B-GGUF/BF16/Qwen3-0.6B-BF16-00001-of-00002.gguf", True),
        ("./here/there", False),
        ("/a/b", False),
        ("~/models/x", False),
        ("a/b/c", False),
        ("gpt2", False),
        ("folder/model.gguf", False),
        ("folder/model.gguf:Q4_0", False),
        ("../x", False),
        ("a/b/../c.gguf", False),
        ("a/b//c.gguf", False),
        ("./a/b.gguf", False),
        ("a/b:", False),
        ("a/b:../c", False),
        ("gpt2:Q4_0", False),
    ],
)
def test_only_a_repository_s_two_words_are_a_hub_id_and_what_names_a_gguf_model_in_it(
    model: str, expected: bool
) -> None:
    assert is_hub_id(model) is expected
