"""The cluster key: one secret, kept from others, from which both ends of a link derive what they need."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import zmq

from stageline.cli.main import main
from stageline.errors import ConfigError
from stageline.links.key_file import given_key, given_security, read_key, write_new_key
from stageline.links.keys import ClusterKey, LinkSecurity


@pytest.fixture(autouse=True)
def no_key_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STAGELINE_CLUSTER_KEY", "STAGELINE_CLUSTER_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "cluster.key"
    write_new_key(str(path))
    return path


def test_a_key_survives_its_text_form() -> None:
    key = ClusterKey.new()
    assert ClusterKey.parse(f" {key.text()}\r\n", "x") == key
    assert ClusterKey.new() != key


def test_equal_keys_derive_equal_pairs_and_the_two_ends_differ() -> None:
    key = ClusterKey(bytes(range(32)))
    one, same, other = (LinkSecurity(k) for k in (key, ClusterKey(bytes(range(32))), ClusterKey.new()))
    assert one.listening == same.listening and one.connecting == same.connecting
    assert one.listening is not None and one.connecting is not None
    assert other.listening is not None and other.connecting is not None
    assert len({pair.secret for pair in (one.listening, one.connecting, other.listening, other.connecting)}) == 4
    assert zmq.curve_public(one.listening.secret) == one.listening.public


def test_derivation_is_hkdf_of_rfc_5869(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test case 1 of the RFC, with its salt and info."""
    from stageline.links import keys

    monkeypatch.setattr(keys, "_SALT", bytes.fromhex("000102030405060708090a0b0c"))
    info = bytes.fromhex("f0f1f2f3f4f5f6f7f8f9").decode("latin-1")
    assert keys._derive(b"\x0b" * 22, info).hex() == "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf"


def test_a_key_is_shown_nowhere_but_in_its_text_form() -> None:
    key = ClusterKey.new()
    security = LinkSecurity(key)
    assert security.listening is not None
    hidden = [repr(key.secret), key.secret.hex(), key.text().partition(":")[2], repr(security.listening.secret)]
    for shown in (repr(key), str(key), repr(security), repr(security.listening), key.fingerprint):
        assert not any(secret in shown for secret in hidden)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no cluster key"),
        ("sk-1234", "holds no cluster key"),
        ("stageline-cluster-key-1:AA", "damaged"),
        ("stageline-cluster-key-1:AAAA", "has 3 bytes; it must have 32"),
        ("stageline-cluster-key-1:" + "A" * 42 + "!=", "damaged"),
    ],
)
def test_what_is_no_key_is_refused_without_being_shown(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        ClusterKey.parse(text, "SOURCE")
    assert "SOURCE" in str(caught.value) and (not text or text not in str(caught.value))


def test_a_new_key_file_is_its_owners_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        key = write_new_key(str(tmp_path / "key"))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    assert read_key(str(tmp_path / "key"), "--x") == key


def test_a_key_file_is_never_overwritten(key_file: Path) -> None:
    before = key_file.read_bytes()
    with pytest.raises(ConfigError, match="exists, and a key is never overwritten"):
        write_new_key(str(key_file))
    assert key_file.read_bytes() == before


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o620, 0o666])
def test_a_key_that_others_can_use_is_refused_with_the_command_that_mends_it(key_file: Path, mode: int) -> None:
    key_file.chmod(mode)
    with pytest.raises(ConfigError, match=f"mode {mode:04o}.* type: chmod 600 {key_file}"):
        given_key(str(key_file))


def test_a_group_may_read_a_key_as_containers_secrets_are_mounted(key_file: Path) -> None:
    key_file.chmod(0o440)
    assert given_key(str(key_file)) is not None


def test_a_missing_key_file_is_refused_with_the_command_that_makes_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read: No such file.*stageline key new --out"):
        given_key(str(tmp_path / "no"))


def test_the_flag_wins_over_a_variable_and_two_variables_are_refused(
    key_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert given_key(None) is None
    in_file = read_key(str(key_file), "x")
    monkeypatch.setenv("STAGELINE_CLUSTER_KEY", ClusterKey.new().text())
    assert given_key(str(key_file)) == in_file != given_key(None)
    monkeypatch.setenv("STAGELINE_CLUSTER_KEY_FILE", str(key_file))
    with pytest.raises(ConfigError, match="STAGELINE_CLUSTER_KEY and STAGELINE_CLUSTER_KEY_FILE are both set"):
        given_key(None)
    monkeypatch.delenv("STAGELINE_CLUSTER_KEY")
    assert given_key(None) == in_file


def test_without_key_and_word_links_have_no_security(key_file: Path) -> None:
    assert given_security(None, is_insecure=False) is None
    assert given_security(None, is_insecure=True) == LinkSecurity(None)
    security = given_security(str(key_file), is_insecure=True)
    assert security is not None and security.key is not None, "a key that is there is used"


def test_key_new_prints_a_key_or_writes_it_and_then_prints_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["key", "new"]) == 0
    ClusterKey.parse(capsys.readouterr().out, "stdout")
    assert main(["key", "new", "--out", str(tmp_path / "k")]) == 0
    out, err = capsys.readouterr()
    key = read_key(str(tmp_path / "k"), "x")
    assert key.fingerprint in err and key.text() not in out + err
    assert main(["key", "new", "--out", str(tmp_path / "k")]) == 2
