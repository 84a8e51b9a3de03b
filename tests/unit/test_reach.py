"""Why a head is not reached: what is in the way is told, giving up is for those that were never in."""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Iterator
from typing import Any, cast

import pytest

from stageline.cluster.handshake import HandshakeError
from stageline.cluster.reach import Reach
from stageline.links.guard import MUTE, NOBODY
from stageline.links.sockets import Links
from stageline.links.tcp_address import TcpAddress

REFUSED = "its cluster key is not this one's"


class FakeLinks:
    """Args: trouble: what it says of every address."""

    def __init__(self, trouble: str | None) -> None:
        self._trouble = trouble

    def trouble(self, address: str) -> str | None:
        return self._trouble


@pytest.fixture
def nobody() -> TcpAddress:
    """An address that nobody listens at."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return TcpAddress("127.0.0.1", int(found.getsockname()[1]))


@pytest.fixture
def listening() -> Iterator[TcpAddress]:
    """An address where connections are accepted, by the system at least."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield TcpAddress("127.0.0.1", int(server.getsockname()[1]))


def reach(head: TcpAddress, trouble: str | None, **options: Any) -> Reach:
    return Reach(head, cast(Links, FakeLinks(trouble)), **options)


def test_a_refused_key_ends_it_for_who_was_never_in_and_not_for_who_was(nobody: TcpAddress) -> None:
    new, old = reach(nobody, REFUSED), reach(nobody, REFUSED, is_patient=True)
    new.look(is_last_look=False)
    with pytest.raises(HandshakeError, match=f"step `key`.*{REFUSED}"):
        new.look(is_last_look=False)
    for _ in range(20):
        old.look(is_last_look=False)


def test_a_head_that_stands_still_is_no_matter_of_the_key(listening: TcpAddress) -> None:
    for trouble in (MUTE, None):
        still = reach(listening, trouble)
        for _ in range(5):
            still.look(is_last_look=False)
        with pytest.raises(HandshakeError, match=r"step `connection`: what listens at .* does not answer: a busy head"):
            still.look(is_last_look=True)


def test_another_program_that_listens_there_ends_it(listening: TcpAddress, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000.0
    monkeypatch.setattr("stageline.cluster.reach.time.monotonic", lambda: now_s)
    new, old = reach(listening, MUTE), reach(listening, MUTE, is_patient=True)
    for one in (new, old):
        one.look(is_last_look=False)
    now_s += 10.0
    with pytest.raises(HandshakeError, match=r"step `connection`.*another program"):
        new.look(is_last_look=False)
    old.look(is_last_look=False)


@pytest.mark.parametrize("trouble", [NOBODY, None], ids=["told", "not told yet"])
def test_what_is_waited_for_is_said_with_the_end_of_it_and_not_again_and_again(
    nobody: TcpAddress, trouble: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "stageline")
    waiting = reach(nobody, trouble)
    for _ in range(10):
        waiting.look(is_last_look=False, left_s=590.0)
    (line,) = caplog.messages
    assert "cannot be reached: the connection is refused" in line and "for 590 s (--join-timeout)" in line


def test_an_address_that_is_nobodys_ends_it_and_one_where_nobody_listens_yet_does_not(
    nobody: TcpAddress, monkeypatch: pytest.MonkeyPatch
) -> None:
    early = reach(nobody, NOBODY)
    for _ in range(20):
        early.look(is_last_look=False)

    def unreachable(address: tuple[str, int], timeout: float) -> socket.socket:
        raise OSError(errno.EHOSTUNREACH, "No route to host")

    monkeypatch.setattr("stageline.cluster.reach.socket.create_connection", unreachable)
    new, old = reach(nobody, NOBODY), reach(nobody, NOBODY, is_patient=True)
    new.look(is_last_look=False)  # once may be chance
    with pytest.raises(HandshakeError, match=r"step `connection`.*No route to host; is the address right"):
        new.look(is_last_look=False)
    for _ in range(20):
        old.look(is_last_look=False)
