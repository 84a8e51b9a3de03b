"""What cannot work is refused before anything starts, in one line that gives the way out."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import trustme
import zmq

from stageline.cli.main import main
from stageline.config.serve_config import ServeConfig
from stageline.errors import ConfigError
from stageline.links.sockets import Links
from stageline.server import preflight
from stageline.server.listening_socket import bind, url_of
from stageline.server.preflight import check_open_files, make_ssl_context, with_all_api_keys
from tests.pipeline.failing import worker_pids


@pytest.fixture(autouse=True)
def no_keys_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STAGELINE_API_KEY", raising=False)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tls")
    for name in ("one", "two"):
        certificate = trustme.CA().issue_cert("localhost")
        certificate.cert_chain_pems[0].write_to_path(str(folder / f"{name}.pem"))
        certificate.private_key_pem.write_to_path(str(folder / f"{name}.key"))
    (folder / "no.pem").write_text("hello")
    return folder


def test_a_port_that_is_in_use_is_refused_by_the_command_before_the_model_is_looked_at(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = set(worker_pids())
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert main(["serve", "no-such-model", "--port", str(port)]) == 2
    words = f"port {port} of 127.0.0.1 is in use; stop what listens there, or give another --port (0 takes any)"
    assert capsys.readouterr().err == f"stageline: error: {words}\n"
    assert set(worker_pids()) <= before


def test_a_model_that_is_not_there_is_refused_and_the_port_is_free_again(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
    assert main(["serve", "./no-such-model.gguf", "--port", str(port)]) == 2
    assert capsys.readouterr().err.startswith("stageline: error: ")
    bind(ServeConfig(port=port)).close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "0", "::ffff:0.0.0.0"])
@pytest.mark.parametrize("more", [{"insecure": True}, {"api_key": ("k",)}], ids=["insecure", "with a key"])
def test_a_wildcard_address_is_never_listened_on(host: str, more: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="every interface of this machine; name the address"):
        bind(ServeConfig(host=host, port=0, **more))


REACHABLE = "192.0.2.1"
"""An address for documentation: no machine has it, but it is no loopback address."""


def test_an_address_that_others_can_reach_needs_a_key_or_the_word() -> None:
    with pytest.raises(ConfigError, match=r"no key is asked for; give --api-key-file .* or type --insecure"):
        bind(ServeConfig(host=REACHABLE, port=0))
    for more in ({"insecure": True}, {"api_key": ("k",)}):
        with pytest.raises(ConfigError, match="is not an address of this machine"):
            bind(ServeConfig(host=REACHABLE, port=0, **more))


def test_a_name_that_is_no_address_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"neither an address nor a name that this machine knows .*127\.0\.0\.1"):
        bind(ServeConfig(host="no such host", port=0))


def test_a_port_that_needs_privileges_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: socket.socket, address: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(ConfigError, match=r"--port 80 is below 1024 and needs privileges; give a higher port"):
        bind(ServeConfig(port=80))


def test_where_it_listens_is_told_as_a_url() -> None:
    with bind(ServeConfig(host="localhost", port=0)) as listening:
        assert url_of(listening, is_tls=True) == f"https://127.0.0.1:{listening.getsockname()[1]}"


def test_tls_files_are_checked(certificates: Path) -> None:
    def refusal(cert: str, key: str | None) -> str:
        with pytest.raises(ConfigError) as refused:
            make_ssl_context(
                ServeConfig(ssl_certfile=f"{certificates}/{cert}", ssl_keyfile=key and f"{certificates}/{key}")
            )
        return str(refused.value)

    assert refusal("none.pem", None).startswith(f"--ssl-certfile {certificates}/none.pem cannot be read: No such file")
    assert refusal("one.pem", "none.key").startswith(f"--ssl-keyfile {certificates}/none.key cannot be read: No such")
    assert "give files that belong together" in refusal("one.pem", "two.key")
    assert "both must be PEM files" in refusal("no.pem", "one.key")
    assert "both must be PEM files" in refusal("one.pem", None), "the certificate's file holds no key"
    assert make_ssl_context(ServeConfig()) is None


def test_a_key_with_a_password_is_refused_without_asking_for_it(certificates: Path, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization

    key = serialization.load_pem_private_key((certificates / "one.key").read_bytes(), None)
    locked = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )
    (tmp_path / "locked.key").write_bytes(locked)
    config = ServeConfig(ssl_certfile=str(certificates / "one.pem"), ssl_keyfile=str(tmp_path / "locked.key"))
    with pytest.raises(ConfigError, match="protected by a password"):
        make_ssl_context(config)


def test_keys_come_from_flags_the_environment_and_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keys").write_text("# ours\n\n  c \nb\n")
    os.chmod(tmp_path / "keys", 0o600)
    monkeypatch.setenv("STAGELINE_API_KEY", "b")
    config = with_all_api_keys(ServeConfig(api_key=("a",), api_key_file=str(tmp_path / "keys")))
    assert config.api_key == ("a", "b", "c")


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "cannot be read: No such file"), (b"# none\n", "holds no key; write one per line"), (b"\xff", "not UTF-8")],
    ids=["missing", "empty", "binary"],
)
def test_a_key_file_without_keys_is_refused(tmp_path: Path, content: bytes | None, words: str) -> None:
    if content is not None:
        (tmp_path / "keys").write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        with_all_api_keys(ServeConfig(api_key_file=str(tmp_path / "keys")))


def test_a_key_file_that_others_can_read_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "keys").write_text("sesame")
    os.chmod(tmp_path / "keys", 0o644)
    with_all_api_keys(ServeConfig(api_key_file=str(tmp_path / "keys")))
    assert "can be read by other users; chmod 600" in caplog.text
    assert "sesame" not in caplog.text


def test_keys_are_not_shown_where_a_configuration_is() -> None:
    assert "sesame" not in repr(ServeConfig(api_key=("sesame",)))


def test_too_few_open_files_are_refused_with_how_many_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(40, 40)]
    monkeypatch.setattr(preflight.resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(preflight.resource, "setrlimit", lambda _, wanted: limits.append(wanted))
    with pytest.raises(ConfigError, match=r"40 open files.*ulimit -n 64"):
        check_open_files(2)
    limits.append((40, 4096))
    check_open_files(2)
    assert limits[-1] == (64, 4096)


def test_a_socket_that_cannot_be_made_is_refused_with_the_way_out(tmp_path: Path) -> None:
    links = Links()
    try:
        with pytest.raises(ConfigError, match="TMPDIR") as caught:
            links.receiver(f"ipc://{tmp_path}/nowhere/socket")
        assert zmq.strerror(2) in str(caught.value)
    finally:
        links.close()
