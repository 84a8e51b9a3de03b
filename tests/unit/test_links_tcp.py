"""Links over TCP: who has the key gets through, nobody else does, and either is told."""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest
import zmq

from stageline.config import environment
from stageline.errors import ConfigError
from stageline.links import guard, sockets
from stageline.links.keys import ClusterKey, LinkSecurity
from stageline.links.refusals import RefusalLog
from stageline.links.sockets import Links, bound_address
from stageline.links.tcp_address import TcpAddress, destination_of, host_and_port, tcp_url

LOOPBACK = "tcp://127.0.0.1:0"
KEY = LinkSecurity(ClusterKey(bytes(32)))
OTHER_KEY = LinkSecurity(ClusterKey(bytes([1]) * 32))
PATIENCE_MS = 20_000

NewLinks = Callable[..., Links]


@pytest.fixture
def new_links() -> Iterator[NewLinks]:
    made: list[Links] = []

    def make(*args, **options) -> Links:
        made.append(Links(*args, **options))
        return made[-1]

    yield make
    for links in made:
        links.close()


class Heard(logging.Handler):
    """Log lines, and a file descriptor that becomes readable with each."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.reader, self.writer = os.pipe()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        os.write(self.writer, b"\0")

    def wait_for(self, *words: str) -> str:
        deadline_s = time.monotonic() + PATIENCE_MS / 1000
        while True:
            for line in self.lines:
                if all(word in line for word in words):
                    return line
            left_s = deadline_s - time.monotonic()
            assert left_s > 0 and select.select([self.reader], [], [], left_s)[0], (words, self.lines)
            os.read(self.reader, 1)


@pytest.fixture
def heard() -> Iterator[Heard]:
    handler, logger = Heard(), logging.getLogger("stageline")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)
    os.close(handler.reader)
    os.close(handler.writer)


@pytest.mark.parametrize("security", [None, LinkSecurity(None), KEY], ids=["loopback", "insecure", "key"])
def test_equal_ends_understand_each_other(new_links: NewLinks, security: LinkSecurity | None) -> None:
    receiver = new_links(security).receiver(LOOPBACK)
    sender = new_links(security).sender(bound_address(receiver))
    sender.send_multipart([b"head", b"body"])
    assert receiver.poll(PATIENCE_MS) and receiver.recv_multipart() == [b"head", b"body"]


def test_a_listener_answers_the_caller_that_asked(new_links: NewLinks) -> None:
    listener = new_links(KEY).listener(LOOPBACK)
    callers = [new_links(KEY).caller(bound_address(listener)) for _ in range(2)]
    for number, caller in enumerate(callers):
        caller.send(b"%d" % number)
        assert listener.poll(PATIENCE_MS)
        identity, question = listener.recv_multipart()
        listener.send_multipart([identity, question * 2])
    assert [caller.poll(PATIENCE_MS) and caller.recv() for caller in callers] == [b"00", b"11"]


@pytest.mark.parametrize(
    ("at_receiver", "at_sender"),
    [(KEY, OTHER_KEY), (KEY, None), (None, KEY)],
    ids=["other key", "no key", "key for none"],
)
def test_ends_that_differ_exchange_nothing_and_both_say_so(
    new_links: NewLinks, heard: Heard, at_receiver: LinkSecurity | None, at_sender: LinkSecurity | None
) -> None:
    receiver = new_links(at_receiver).receiver(LOOPBACK)
    address = bound_address(receiver)
    links = new_links(at_sender)
    links.sender(address).send(b"secret")
    heard.wait_for(f"{address} refused ")
    heard.wait_for(f"no connection to {address}: ")
    trouble = links.trouble(address)
    assert trouble is not None and "key" in trouble
    assert not receiver.poll(0)


def test_who_knows_only_the_listening_ends_public_key_is_refused(heard: Heard, new_links: NewLinks) -> None:
    """The listening end's public key is all that a client needs for CURVE itself; its own key decides."""
    receiver = new_links(KEY).receiver(LOOPBACK)
    assert KEY.listening is not None
    public, secret = zmq.curve_keypair()
    with zmq.Context() as context, context.socket(zmq.PUSH) as intruder:
        intruder.linger = 0
        intruder.curve_serverkey = KEY.listening.public
        intruder.curve_publickey, intruder.curve_secretkey = public, secret
        intruder.connect(bound_address(receiver))
        intruder.send(b"hello")
        heard.wait_for("refused ", "its cluster key is not this one's")
        assert not receiver.poll(0)


def test_a_refusal_names_the_peer(heard: Heard, new_links: NewLinks, monkeypatch: pytest.MonkeyPatch) -> None:
    # Who is gone before the guard's thread has looked cannot be named.
    was_looked_at = threading.Event()

    def look(fd: int) -> str:
        peer = peer_of(fd)
        was_looked_at.set()
        return peer

    peer_of = guard._peer_of
    monkeypatch.setattr(guard, "_peer_of", look)
    address = TcpAddress.parse(bound_address(new_links(KEY).receiver(LOOPBACK)))
    with socket.create_connection((address.host, address.port)) as visitor:
        assert was_looked_at.wait(PATIENCE_MS / 1000)
        # A greeting of ZMTP 3 that offers no encryption.
        visitor.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48))
        heard.wait_for(f"refused 127.0.0.1 port {visitor.getsockname()[1]}")


def test_who_shouts_garbage_does_not_disturb_who_has_the_key(new_links: NewLinks) -> None:
    receiver = new_links(KEY).receiver(LOOPBACK)
    address = TcpAddress.parse(bound_address(receiver))
    sender = new_links(KEY).sender(address.url)
    for number in range(50):
        with socket.create_connection((address.host, address.port)) as visitor, suppress(OSError):
            visitor.sendall(os.urandom(number * 7))
        sender.send(b"%d" % number)
        assert receiver.poll(PATIENCE_MS) and receiver.recv() == b"%d" % number


def test_a_larger_message_than_allowed_cuts_its_sender_off(new_links: NewLinks) -> None:
    receiver = new_links(KEY).receiver(LOOPBACK, max_message_bytes=1000)
    broken = threading.Event()
    sender = new_links(KEY, on_broken=lambda _: broken.set()).sender(bound_address(receiver))
    sender.send(b"x" * 900)
    assert receiver.poll(PATIENCE_MS)
    sender.send(b"x" * 2000)
    assert broken.wait(PATIENCE_MS / 1000)
    assert receiver.recv() == b"x" * 900 and not receiver.poll(0)


def test_the_end_that_connects_hears_that_the_link_broke(new_links: NewLinks) -> None:
    there = Links(KEY)
    receiver = there.receiver(LOOPBACK)
    address, broken = bound_address(receiver), []
    bell = threading.Event()
    links = new_links(KEY, on_broken=lambda what: (broken.append(what), bell.set()))
    links.sender(address).send(b"x")
    assert receiver.poll(PATIENCE_MS) and links.trouble(address) is None
    there.close()
    assert bell.wait(PATIENCE_MS / 1000) and broken == [address]


def test_nothing_that_listens_is_told_as_such(new_links: NewLinks) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"tcp://127.0.0.1:{other.getsockname()[1]}"
    links = new_links(KEY)
    caller = links.caller(address)
    caller.send(b"x")
    poll_until(lambda: links.trouble(address), caller)
    assert "nothing listens there" in str(links.trouble(address))


def test_who_takes_a_connection_and_says_nothing_is_not_told_of_as_one_with_another_key(
    new_links: NewLinks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sockets._TCP_TIMES_S, zmq.HANDSHAKE_IVL, 0.5)
    monkeypatch.setattr(guard, "HANDSHAKE_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        links = new_links(KEY)
        caller = links.caller(address)
        poll_until(lambda: links.trouble(address), caller)
    assert links.trouble(address) == guard.MUTE


def poll_until(condition: Callable[[], object], socket: zmq.Socket) -> None:
    deadline_s = time.monotonic() + PATIENCE_MS / 1000
    while not condition():
        assert time.monotonic() < deadline_s
        socket.poll(20)


def test_every_tcp_connection_sends_at_once(new_links: NewLinks) -> None:
    """TCP_NODELAY is ZeroMQ's own doing, on both ends; without it small messages would wait for 40 ms."""
    receiver = new_links(KEY).receiver(LOOPBACK)
    new_links(KEY).sender(bound_address(receiver)).send(b"x")
    assert receiver.poll(PATIENCE_MS)
    port = TcpAddress.parse(bound_address(receiver)).port
    with own_connections(port) as connections:
        flags = [one.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for one in connections]
    assert len(flags) == 2 and all(flags)


def test_a_dead_link_is_told_by_what_does_not_arrive_however_long_a_message_takes(new_links: NewLinks) -> None:
    receiver = new_links(KEY).receiver(LOOPBACK)
    sender = new_links(KEY).sender(bound_address(receiver))
    sender.send(b"x")
    assert receiver.poll(PATIENCE_MS)
    for end in (receiver, sender):
        assert end.getsockopt(zmq.HEARTBEAT_IVL) > 0, "something has to be under way for a loss to be noticed"
        assert end.getsockopt(zmq.HEARTBEAT_TIMEOUT) == end.getsockopt(zmq.HEARTBEAT_TTL) == 0
    port = TcpAddress.parse(bound_address(receiver)).port
    with own_connections(port) as connections:
        allowed_ms = {one.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) for one in connections}
    assert allowed_ms == {8000}


@contextmanager
def own_connections(port: int) -> Iterator[list[socket.socket]]:
    """Both ends of this process's connections with this port."""
    found = []
    with ExitStack() as stack:
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                descriptor = os.dup(int(name))
                try:
                    one = stack.enter_context(socket.socket(fileno=descriptor))
                except OSError:
                    os.close(descriptor)
                    continue
                if one.family == socket.AF_INET and port in (one.getsockname()[1], one.getpeername()[1]):
                    found.append(one)
        yield found


def test_tcp_without_security_stays_on_loopback_and_no_wildcard_is_bound(new_links: NewLinks) -> None:
    for make in (new_links().receiver, new_links().sender, new_links().listener, new_links().caller):
        with pytest.raises(ConfigError, match=r"no cluster key; give --cluster-key-file .* --insecure"):
            make("tcp://192.0.2.1:5000")
    for wildcard in ("tcp://0.0.0.0:5000", "tcp://[::]:5000", "tcp://[::ffff:0.0.0.0]:5000"):
        with pytest.raises(ConfigError, match="every interface"):
            new_links(KEY).receiver(wildcard)
    with pytest.raises(ConfigError, match="no IP address"):
        new_links(KEY).receiver("tcp://*:5000")
    with pytest.raises(ConfigError, match="not an address of this machine"):
        new_links(KEY).receiver("tcp://203.0.113.77:5000")
    taken = bound_address(new_links(KEY).receiver(LOOPBACK))
    with pytest.raises(ConfigError, match="is in use"):
        new_links(KEY).receiver(taken)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("10.0.0.1:50", TcpAddress("10.0.0.1", 50)),
        ("tcp://10.0.0.1:0", TcpAddress("10.0.0.1", 0)),
        ("[fd00::1]:65535", TcpAddress("fd00::1", 65535)),
    ],
)
def test_addresses_survive_their_text_form(text: str, address: TcpAddress) -> None:
    assert TcpAddress.parse(text) == address == TcpAddress.parse(address.url) == TcpAddress.parse(str(address))
    source = "fd00::2" if address.is_ipv6() else "10.0.0.2"
    assert destination_of(tcp_url(address, source)) == address


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("10.0.0.1", "10.0.0.1", None),
        ("head.local:29500", "head.local", "29500"),
        ("fe80::1", "fe80::1", None),
        ("[fe80::1]", "fe80::1", None),
        ("[fe80::1]:29500", "fe80::1", "29500"),
        ("10.0.0.1:", "10.0.0.1", ""),
        ("[::1]:x", "::1", "x"),
    ],
)
def test_host_and_port_are_found_as_people_write_them(text: str, host: str, port: str | None) -> None:
    assert host_and_port(text) == (host, port)


@pytest.mark.parametrize(
    "text",
    ["", "10.0.0.1", "host:5", "10.0.0.1:65536", "10.0.0.1:-1", "10.0.0.1:5x", "10.1:5", f"10.0.0.1:{'1' * 5000}"],
    ids=range(8),
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        TcpAddress.parse(text)


def test_refusals_fill_no_disk_and_none_is_forgotten() -> None:
    log = RefusalLog()
    lines = [log.line(f"refusal {number}", number / 100) for number in range(1000)]
    assert [line for line in lines if line] == [f"refusal {number}" for number in range(5)]
    assert log.line("one more", 60.0) == "one more (995 more were refused since the line before)"


def test_whoever_tries_again_and_again_is_told_of_once_a_minute() -> None:
    log = RefusalLog()
    tries = [log.line(f"refused 10.0.0.2 port {number}", number, "10.0.0.2") for number in range(59)]
    assert [line for line in tries if line] == ["refused 10.0.0.2 port 0"]
    assert log.line("refused 10.0.0.3 port 1", 59.0, "10.0.0.3") == (
        "refused 10.0.0.3 port 1 (58 more were refused since the line before)"
    )
    assert log.line("refused 10.0.0.2 port 60", 60.0, "10.0.0.2") == "refused 10.0.0.2 port 60"
    assert log.line("and one", 60.1) == "and one"


def test_whether_a_link_is_up_is_known_when_it_is_and_within_its_time(new_links: NewLinks) -> None:
    receiver = new_links(KEY).receiver(LOOPBACK)
    links = new_links(KEY)
    links.sender(bound_address(receiver))
    assert links.wait_until_up(bound_address(receiver), PATIENCE_MS / 1000)
    stranger = new_links(OTHER_KEY)
    stranger.sender(bound_address(receiver))
    assert not stranger.wait_until_up(bound_address(receiver), 0.2)
    assert links.wait_until_up("ipc:///whatever", 0)


def test_a_visitor_that_left_before_it_was_looked_at_leaves_no_file_open() -> None:
    """Its number may be a pipe's by then, as here."""
    reader, writer = os.pipe()
    before = os.listdir("/proc/self/fd")
    assert guard._peer_of(reader) == "a peer that left at once"
    assert os.listdir("/proc/self/fd") == before
    os.close(reader)
    os.close(writer)


def test_what_children_inherit_holds_no_key() -> None:
    keys = {"STAGELINE_CLUSTER_KEY": "secret", "STAGELINE_API_KEY": "secret"}
    assert environment.for_children({**keys, "PATH": "/bin"}) == {"PATH": "/bin"}
