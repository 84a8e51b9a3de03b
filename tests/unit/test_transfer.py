"""Weights from another machine: those that were asked for, right, once; and nothing but the model's tensors."""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec
import numpy as np
import pytest

from stageline.checkpoint.checkpoint import Checkpoint
from stageline.checkpoint.digest import model_digest
from stageline.checkpoint.open import open_checkpoint
from stageline.checkpoint.stage_tensors import stage_tensor_names
from stageline.cli.main import main
from stageline.cluster.weight_port import kept_copy
from stageline.errors import CheckpointError
from stageline.links.frames import MessageDecoder, encode_message
from stageline.links.keys import ClusterKey, LinkSecurity
from stageline.links.sockets import Links
from stageline.links.tcp_address import TcpAddress
from stageline.transfer import copy_files, fetching
from stageline.transfer import server as server_module
from stageline.transfer.client import ModelCopy
from stageline.transfer.copy_files import check_about, check_cache
from stageline.transfer.kept_models import kept_models, remove, to_remove
from stageline.transfer.messages import (
    MOST_DIGESTS,
    PIECE_BYTES,
    AboutModel,
    Answer,
    AskDigests,
    AskModel,
    AskPiece,
    NotGiven,
    Piece,
    Run,
    WeightSource,
)
from stageline.transfer.server import WeightServer
from stageline.transfer.table import table_of
from tests.hostile_frames import Enemy
from tests.unit.checkpoint_files import (
    HIDDEN,
    split_gguf,
    tensor_shapes,
    write_gguf_model,
    write_hf_directory,
    write_safetensors,
)

KEY = LinkSecurity(ClusterKey(bytes(32)))
PATIENCE_MS = 20_000
LONG_VOCABULARY = 9000  # its embedding is in three pieces


def _write_hf(directory: Path, seed: int = 0) -> Path:
    """Random bytes; two of the tensors are in several pieces."""
    write_hf_directory(directory, {"vocab_size": LONG_VOCABULARY})
    shapes = tensor_shapes() | dict.fromkeys(
        ("model.embed_tokens.weight", "lm_head.weight"), (LONG_VOCABULARY, HIDDEN)
    )
    path = write_safetensors(directory / "model.safetensors", shapes)
    begin = min(run.offset_bytes for run in table_of(open_checkpoint(str(directory))).tensors)
    with path.open("r+b") as file:
        file.seek(begin)
        file.write(np.random.default_rng(seed).bytes(path.stat().st_size - begin))
    return directory


@pytest.fixture(params=["hf", "gguf", "gguf of several files"])
def original(request: pytest.FixtureRequest, tmp_path: Path) -> Checkpoint:
    if request.param == "hf":
        return open_checkpoint(str(_write_hf(tmp_path / "its")))
    whole = write_gguf_model(tmp_path / "its.gguf")
    if request.param == "gguf":
        return open_checkpoint(str(whole))
    return open_checkpoint(str(split_gguf(whole, tmp_path / "parts", 12, is_first_without_tensors=True)[0]))


class Place:
    """Machines that have models, and one that copies them into `cache`."""

    def __init__(self, stack: ExitStack, cache: Path) -> None:
        self._stack = stack
        self.cache = cache

    def serve(self, checkpoint: Checkpoint, is_whole: bool = True) -> WeightServer:
        server = WeightServer(checkpoint, TcpAddress("127.0.0.1", 0), KEY, is_whole)
        self._stack.callback(server.close)
        return server

    def links(self) -> Links:
        links = Links(KEY)
        self._stack.callback(links.close)
        return links

    def copy(
        self, server: WeightServer, digest: str, givers: Sequence[str] = (), cache: Path | None = None
    ) -> ModelCopy:
        """As a process does that was just started."""
        source = WeightSource(str(server.address), digest, str(cache or self.cache), list(givers), "the model")
        copy = ModelCopy(source, KEY)
        self._stack.callback(copy.close)
        return copy


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with ExitStack() as stack:
        yield Place(stack, tmp_path / "cache")


def _bytes_of(checkpoint: Checkpoint, name: str) -> bytes:
    entry = checkpoint.tensors[name]
    with open(entry.file, "rb") as file:
        file.seek(entry.offset_bytes)
        return file.read(entry.num_bytes)


def _num_bytes(checkpoint: Checkpoint, names: list[str]) -> int:
    return sum(checkpoint.tensors[name].num_bytes for name in names)


def _last_stage(checkpoint: Checkpoint) -> list[str]:
    return stage_tensor_names(checkpoint, range(2, 3), is_first=False, is_last=True)


def test_a_stage_gets_its_own_tensors_and_holes_for_the_others(place: Place, original: Checkpoint) -> None:
    copy = place.copy(place.serve(original), model_digest(original))
    there = copy.open()
    front_bytes = copy.num_received_bytes
    names, seen = _last_stage(original), []
    copy.fetch(names, lambda *progress: seen.append(progress))
    assert there.spec == original.spec and model_digest(there) == model_digest(original)
    assert Path(there.path).is_relative_to(place.cache)
    for name in original.tensors:
        expected = _bytes_of(original, name)
        assert _bytes_of(there, name) == (expected if name in names else bytes(len(expected))), name
    wanted = _num_bytes(original, names)
    assert copy.num_received_bytes - front_bytes == wanted
    assert front_bytes == sum(run.num_bytes for run in table_of(original).fronts)
    assert seen[0] == (0, wanted) and seen[-1] == (wanted, wanted) and seen == sorted(seen)


class _Interrupted(Exception):
    pass


def test_after_an_interruption_only_what_is_missing_comes(place: Place, tmp_path: Path) -> None:
    original = open_checkpoint(str(_write_hf(tmp_path / "its")))
    server, digest, names = place.serve(original), model_digest(original), _last_stage(original)
    first = place.copy(server, digest)

    def stop_halfway(done: int, total: int) -> None:
        if done > total // 2:
            raise _Interrupted

    with pytest.raises(_Interrupted):
        first.fetch(names, stop_halfway)
    first.close()
    fronts = sum(run.num_bytes for run in table_of(original).fronts)
    second = place.copy(server, digest)
    second.fetch(names)
    assert second.num_received_bytes <= _num_bytes(original, names) // 2
    # Every byte of the fronts and tensors came once; of what was under way when it stopped, nothing was kept.
    assert first.num_received_bytes + second.num_received_bytes == fronts + _num_bytes(original, names)
    assert all(_bytes_of(second.open(), name) == _bytes_of(original, name) for name in names)


def test_what_was_damaged_on_this_disk_comes_again_and_nothing_else(place: Place, tmp_path: Path) -> None:
    original = open_checkpoint(str(_write_hf(tmp_path / "its")))
    server, digest, names = place.serve(original), model_digest(original), _last_stage(original)
    first = place.copy(server, digest)
    first.fetch(names)
    entry = first.open().tensors["lm_head.weight"]
    with open(entry.file, "r+b") as file:
        file.seek(entry.offset_bytes + PIECE_BYTES + 1)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    second = place.copy(server, digest)
    second.fetch(names)
    assert second.num_received_bytes == PIECE_BYTES
    assert _bytes_of(second.open(), "lm_head.weight") == _bytes_of(original, "lm_head.weight")


def test_two_models_of_one_shape_are_kept_apart(place: Place, tmp_path: Path) -> None:
    models = [open_checkpoint(str(_write_hf(tmp_path / f"seed{seed}", seed))) for seed in (1, 2)]
    digest = model_digest(models[0])
    assert digest == model_digest(models[1])
    opened = []
    for model in models:
        copy = place.copy(place.serve(model), digest)
        copy.fetch(["model.norm.weight"])
        opened.append(copy.open())
    for model, there in zip(models, opened, strict=True):
        assert _bytes_of(there, "model.norm.weight") == _bytes_of(model, "model.norm.weight")


def test_nothing_but_the_models_pieces_is_given(place: Place, original: Checkpoint) -> None:
    server = place.serve(original)
    caller = place.links().caller(server.address.url)
    decoder: MessageDecoder[Answer] = MessageDecoder(Answer)

    def ask(frame: bytes) -> tuple[Answer, list[bytes]]:
        caller.send(frame)
        assert caller.poll(PATIENCE_MS)
        first, *rest = caller.recv_multipart()
        return decoder.decode(first), rest

    num_runs = len(table_of(original).fronts) + len(table_of(original).tensors)
    refused = [AskPiece(num_runs, 0), AskPiece(-1, 0), AskPiece(0, -1), AskPiece(0, 2**40), AskPiece(2**60, 0)]
    refused += [AskDigests(0, -1, 1), AskDigests(0, 0, 0), AskDigests(0, 0, MOST_DIGESTS), AskDigests(0, 2**60, 2**60)]
    for frame in (*map(encode_message, refused), b"", b"/etc/passwd", encode_message(NotGiven("me"))):
        answer, rest = ask(frame)
        assert isinstance(answer, NotGiven) and rest == [], frame
    answer, rest = ask(encode_message(AskPiece(num_runs - 1, 0)))
    assert isinstance(answer, Piece) and len(rest) == 1 and rest[0]
    assert isinstance(ask(encode_message(AskModel()))[0], AboutModel)


def test_a_copy_goes_on_when_its_source_is_back(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "_ASK_AGAIN_S", 0.5)
    original = open_checkpoint(str(_write_hf(tmp_path / "its")))
    first, names = place.serve(original), _last_stage(original)
    others: list[WeightServer] = []

    def replace_halfway(done: int, total: int) -> None:
        if done > total // 2 and not others:
            first.close()
            others.append(WeightServer(original, first.address, KEY))

    copy = place.copy(first, model_digest(original))
    try:
        copy.fetch(names, replace_halfway)
    finally:
        for other in others:
            other.close()
    assert others and all(_bytes_of(copy.open(), name) == _bytes_of(original, name) for name in names)


def _came_from(address: TcpAddress, caplog: pytest.LogCaptureFixture) -> int:
    """Bytes, as the log of the last copy tells."""
    found = re.search(rf"([\d,]+) from {re.escape(str(address))}[,)]", caplog.messages[-1])
    return int(found[1].replace(",", "")) if found else 0


def test_who_has_a_piece_may_give_it_and_a_copy_with_holes_gives_what_it_has(
    place: Place, original: Checkpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    head, digest, names = place.serve(original), model_digest(original), list(original.tensors)
    half = place.copy(head, digest, cache=tmp_path / "half")
    half.fetch(_last_stage(original))
    kept = kept_copy(tmp_path / "half", digest)
    assert kept is not None and kept_copy(tmp_path / "half", "00" * 32) is None
    givers = [place.serve(kept, is_whole=False), place.serve(original)]
    copy = place.copy(head, digest, [str(giver.address) for giver in givers])
    copy.fetch(names)
    assert all(_bytes_of(copy.open(), name) == _bytes_of(original, name) for name in names)
    shares = [_came_from(one.address, caplog) for one in (head, *givers)]
    assert all(shares[1:]) and sum(shares) == _num_bytes(original, names)


@pytest.mark.parametrize("trouble", ["lost", "absent", "no address", "other weights", "another model"])
def test_a_giver_that_is_lost_or_has_something_else_costs_nothing(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    monkeypatch.setattr(fetching, "_ASK_AGAIN_S", 0.3)
    original = open_checkpoint(str(_write_hf(tmp_path / "its")))
    theirs = original
    if trouble == "other weights":
        theirs = open_checkpoint(str(_write_hf(tmp_path / "other", seed=3)))
    elif trouble == "another model":
        theirs = open_checkpoint(str(write_gguf_model(tmp_path / "other.gguf")))
    giver = place.serve(theirs)
    if trouble == "absent":
        giver.close()
    is_lost = False

    def lose(done: int, total: int) -> None:
        nonlocal is_lost
        if trouble == "lost" and done > 0 and not is_lost:
            is_lost = True
            giver.close()

    givers = ["nonsense", "0.0.0.0:1"] if trouble == "no address" else [str(giver.address)]
    copy = place.copy(place.serve(original), model_digest(original), givers)
    copy.fetch(list(original.tensors), lose)
    assert all(_bytes_of(copy.open(), name) == _bytes_of(original, name) for name in original.tensors)
    assert is_lost == (trouble == "lost")


def test_what_is_kept_is_told_and_goes_unless_it_is_in_use_the_longest_unused_first(
    place: Place, tmp_path: Path
) -> None:
    models = [open_checkpoint(str(_write_hf(tmp_path / f"seed{seed}", seed))) for seed in (1, 2, 3)]
    copies = [place.copy(place.serve(model), model_digest(model)) for model in models]
    for copy in copies:
        copy.fetch(["model.norm.weight", "lm_head.weight"])
    assert [one.is_in_use for one in kept_models(place.cache)] == [True] * 3
    assert to_remove(kept_models(place.cache), 0) == []
    for age_s, copy in enumerate(copies[:2]):
        folder = Path(copy.open().path)
        copy.close()
        os.utime(folder, (1000 + age_s, 1000 + age_s))
    kept = kept_models(place.cache)
    sizes = [one.num_bytes for one in kept]
    wanted = _num_bytes(models[0], ["lm_head.weight"])
    assert all(one.model == "the model" and wanted <= one.num_bytes < 2 * wanted for one in kept)
    assert [one.used_s for one in kept[1:]] == [1001, 1000] and [one.is_in_use for one in kept] == [True, False, False]
    assert to_remove(kept, sum(sizes)) == [] and to_remove(kept, sum(sizes) - 1) == kept[2:]
    assert to_remove(kept, sizes[0]) == [kept[2], kept[1]]
    assert not remove(kept[0]) and remove(kept[2]) and len(kept_models(place.cache)) == 2


def test_a_folder_that_is_just_being_removed_is_made_again(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = open_checkpoint(str(_write_hf(tmp_path / "its")))
    held, removed = copy_files.hold_folder, []

    def remove_first(folder: Path) -> int | None:
        """As if `stageline cache` had held it until now."""
        descriptor = held(folder)
        if not removed:
            removed.append(folder)
            shutil.rmtree(folder)
        return descriptor

    monkeypatch.setattr(copy_files, "hold_folder", remove_first)
    copy = place.copy(place.serve(original), model_digest(original))
    assert removed == [Path(copy.open().path)] and [one.is_in_use for one in kept_models(place.cache)] == [True]


def test_what_is_no_digest_finds_nothing_on_the_disk(tmp_path: Path) -> None:
    """The head tells it, and folders are looked for by it."""
    (tmp_path / "secret-model").mkdir()
    (tmp_path / "cache").mkdir()
    for digest in ("../secret", str(tmp_path / "secret"), "*", ""):
        assert copy_files.copy_folders(tmp_path / "cache", digest) == []
        assert kept_copy(tmp_path / "cache", digest) is None


def test_the_command_tells_what_is_kept_and_leaves_what_a_stage_has_open(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    assert main(["cache"]) == 0 and "0 B of 0 models" in capsys.readouterr().out
    original = open_checkpoint(str(_write_hf(tmp_path / "its")))
    copy = place.copy(place.serve(original), model_digest(original), cache=tmp_path / "home/stageline/models")
    copy.fetch(["model.norm.weight"])
    assert main(["cache", "--clear"]) == 0
    told = capsys.readouterr()
    assert "of 1 model\n" in told.out and "in use" in told.out and "the model" in told.out and "in use" in told.err
    copy.close()
    assert main(["cache", "--keep-bytes", "1GiB"]) == 0 and " used 2" in capsys.readouterr().out
    assert main(["cache", "--keep-bytes", "0"]) == 0 and "removed the model, " in capsys.readouterr().err
    assert main(["cache", "--keep-bytes", "9" * 400]) == 0
    assert main(["cache", "--keep-bytes", "some"]) == 2 and "50GiB" in capsys.readouterr().err
    assert kept_models(tmp_path / "home/stageline/models") == []


def test_on_a_disk_without_locks_copies_are_made_and_told_and_none_is_removed(
    place: Place,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    def without_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", without_locks)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    original = open_checkpoint(str(_write_hf(tmp_path / "its")))
    with caplog.at_level("INFO", "stageline"):
        copy = place.copy(place.serve(original), model_digest(original), cache=tmp_path / "home/stageline/models")
        copy.fetch(["model.norm.weight"])
    assert sum("knows no locks" in record.getMessage() for record in caplog.records) == 1
    copy.close()
    assert main(["cache"]) == 0
    told = capsys.readouterr()
    assert " used 2" in told.out and "it cannot be told what is in use" in told.err and "by hand" not in told.err
    assert main(["cache", "--clear"]) == 0
    told = capsys.readouterr()
    assert "of 1 model\n" in told.out and "remove what is left by hand" in told.err
    assert not remove(kept_models(tmp_path / "home/stageline/models")[0])


def test_nonsense_from_somebody_with_the_key_disturbs_nobody(place: Place, original: Checkpoint) -> None:
    server, enemy = place.serve(original), Enemy(seed=5)
    caller = place.links().caller(server.address.url)
    for _ in range(2000):
        caller.send(enemy.control_frame()[1])
    copy = place.copy(server, model_digest(original))
    copy.fetch(["model.norm.weight"])
    assert _bytes_of(copy.open(), "model.norm.weight") == _bytes_of(original, "model.norm.weight")


def test_who_has_another_key_gets_nothing(place: Place, original: Checkpoint) -> None:
    server = place.serve(original)
    stranger = Links(LinkSecurity(ClusterKey(bytes([1]) * 32)))
    try:
        caller = stranger.caller(server.address.url)
        caller.send(encode_message(AskModel()))
        # By the time that somebody with the key was answered, the stranger would have been.
        place.copy(server, model_digest(original)).open()
        assert not caller.poll(0)
    finally:
        stranger.close()


def test_a_model_that_was_not_agreed_on_is_refused_before_anything_is_kept(place: Place, original: Checkpoint) -> None:
    copy = place.copy(place.serve(original), "ab" * 32)
    with pytest.raises(CheckpointError, match=r"digest .*, but abababababababab was agreed on"):
        copy.open()
    assert not place.cache.exists()


def test_bytes_that_do_not_fit_their_digest_are_not_kept(
    place: Place, original: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "digest_of", lambda _data: b"\1" * 16)
    with pytest.raises(CheckpointError, match="came damaged 3 times"):
        place.copy(place.serve(original), model_digest(original)).open()
    assert not any(path.read_bytes().strip(b"\0") for path in place.cache.rglob("*") if path.is_file())


def test_a_cache_that_cannot_be_written_or_is_full_is_told_in_one_line(
    place: Place, original: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a file"
    file.touch()
    with pytest.raises(CheckpointError, match=r"a file/models.*Not a directory; .*XDG_CACHE_HOME$"):
        check_cache(file / "models")
    check_cache(place.cache)
    assert list(place.cache.iterdir()) == []

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    copy = place.copy(place.serve(original), model_digest(original))
    copy.open()
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(CheckpointError, match=r"another machine, is full \([\d,]+ bytes are free\); free space"):
        copy.fetch(_last_stage(original))


_ABOUT = AboutModel(
    model_digest="0f", fingerprint="aa", config=b"{}", generation_config=b"", file_bytes=[100],
    fronts=[Run(0, 0, 10)], num_tensors=1,
)  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"model_digest": "../../x"},
        {"fingerprint": ""},
        {"file_bytes": []},
        {"file_bytes": [2**60]},
        {"file_bytes": [10, 10], "config": None},
        {"fronts": [Run(0, 95, 10)]},
        {"fronts": [Run(1, 0, 10)]},
        {"fronts": [Run(0, -5, 10)]},
    ],
)
def test_what_no_model_can_be_is_refused(change: dict[str, object]) -> None:
    check_about(_ABOUT)
    with pytest.raises(CheckpointError, match="cannot be"):
        check_about(msgspec.structs.replace(_ABOUT, **change))
