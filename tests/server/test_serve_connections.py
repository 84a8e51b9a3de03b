"""What a connection may cost: bounded heads, bodies that arrive in time, answers that are taken, an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import trustme

from stageline.server import listener
from stageline.server.http_protocol import BoundedProtocol, ConnectionLimits, make_uvicorn_config
from stageline.server.listener import Listener

pytestmark = pytest.mark.timeout(60)

DEADLINE_S = 20.0
SHORT_S = 0.2
LIMITS = ConnectionLimits(
    read_timeout_s=DEADLINE_S, write_timeout_s=DEADLINE_S, max_header_bytes=4096, max_discarded_bytes=2**20
)


class App:
    """Answers /early without reading, /stream in pieces until told to end, /flood without end, and echoes the rest."""

    def __init__(self) -> None:
        self.streaming = asyncio.Event()
        self.may_end = asyncio.Event()
        self.gone = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def answer(body: bytes, more_body: bool = False) -> None:
            await send({"type": "http.response.body", "body": body, "more_body": more_body})

        headers = [(b"connection", b"close")] if scope["path"] == "/early" else []
        if scope["path"] in ("/early", "/stream", "/flood"):
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        if scope["path"] == "/early":
            await answer(b"enough")
        elif scope["path"] == "/stream":
            await answer(b"first", more_body=True)
            self.streaming.set()
            await self.may_end.wait()
            await answer(b"last")
        elif scope["path"] == "/flood":
            await receive()
            disconnected = asyncio.ensure_future(receive())
            while not disconnected.done():
                await answer(bytes(65536), more_body=True)
                await asyncio.sleep(0)
            self.gone.set()
        else:
            body, more = b"", True
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    self.gone.set()
                    return
                body, more = body + message["body"], message["more_body"]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await answer(body)


class Serving:
    def __init__(self, limits: ConnectionLimits, max_connections: int, tls: ssl.SSLContext | None = None) -> None:
        self.app = App()
        listening = socket.create_server(("127.0.0.1", 0))
        self.address = listening.getsockname()
        config = make_uvicorn_config(self.app, keep_alive_timeout_s=DEADLINE_S, root_path="")
        self.listener = Listener(
            listening, tls, max_connections, lambda shared, lost: BoundedProtocol(config, shared, limits, lost)
        )

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(*self.address)

    async def ask(self, request: bytes, tls: ssl.SSLContext | None = None) -> bytes:
        """Send, and read until the server closes."""
        reader, writer = await asyncio.open_connection(*self.address, ssl=tls)
        writer.write(request)
        answer = await reader.read()
        writer.close()
        return answer


@contextlib.asynccontextmanager
async def serving(
    max_connections: int = 100, tls: ssl.SSLContext | None = None, **limits: float
) -> AsyncIterator[Serving]:
    asked = {**{name: getattr(LIMITS, name) for name in LIMITS.__dataclass_fields__}, **limits}
    server = Serving(ConnectionLimits(**asked), max_connections, tls)
    try:
        yield server
    finally:
        await server.listener.drain(0.0)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(DEADLINE_S * 2):
            await test()

    asyncio.run(bounded())


def _error_of(answer: bytes) -> tuple[int, dict[str, Any]]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head
    return int(head.split()[1]), json.loads(body)["error"]


def post(body: bytes, path: str = "/echo", headers: bytes = b"") -> bytes:
    return b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n%s\r\n%s" % (path.encode(), len(body), headers, body)


HEADS = {
    "one long header": b"GET / HTTP/1.1\r\na: " + b"x" * 5000 + b"\r\n\r\n",
    "a header without end": b"GET / HTTP/1.1\r\na: " + b"x" * 5000,
    "a long path": b"GET /" + b"x" * 5000 + b" HTTP/1.1\r\n\r\n",
    "many headers": b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 10_000 + b"\r\n",
    "many bytes": b"GET / HTTP/1.1\r\n" + b"".join(b"h%d: %s\r\n" % (i, b"x" * 90) for i in range(60)) + b"\r\n",
}


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS.keys())
def test_a_head_beyond_the_limit_is_refused_in_openais_words(head: bytes) -> None:
    async def test() -> None:
        async with serving() as server:
            status, error = _error_of(await server.ask(head))
            assert status == 431
            assert "4096" in error["message"] or "200" in error["message"]
            assert error["type"] == "invalid_request_error"

    run(test)


def test_what_is_not_http_is_refused_in_openais_words() -> None:
    async def test() -> None:
        async with serving() as server:
            status, error = _error_of(await server.ask(b"\x16\x03\x01 hello\r\n\r\n"))
            assert (status, error["code"]) == (400, "invalid_http")

    run(test)


HALVES = {
    "half a head": b"POST /echo HTTP/1.1\r\nhost: x\r\ncontent-",
    "half a body": post(b"x" * 100)[:-50],
    "half of a second request": post(b"") + b"POST /echo HTT",
}


@pytest.mark.parametrize("half", HALVES.values(), ids=HALVES.keys())
def test_half_a_request_and_then_silence_is_answered_and_closed(half: bytes) -> None:
    async def test() -> None:
        async with serving(read_timeout_s=SHORT_S) as server:
            answer = await server.ask(half)
            status, error = _error_of(answer[answer.rindex(b"HTTP/1.1") :])
            assert status == 408
            assert "--read-timeout-s" in error["message"]

    run(test)


def test_dripping_bytes_do_not_extend_the_time_for_a_request() -> None:
    async def test() -> None:
        async with serving(read_timeout_s=SHORT_S) as server:
            reader, writer = await server.connect()
            writer.write(b"POST /echo HTTP/1.1\r\n")
            answer = asyncio.ensure_future(reader.read())
            while not answer.done():
                writer.write(b"a: b\r\n")
                await asyncio.wait([answer], timeout=SHORT_S / 10)
            assert _error_of(answer.result())[0] == 408
            writer.close()

    run(test)


def test_the_application_learns_that_half_a_body_is_all() -> None:
    async def test() -> None:
        async with serving(read_timeout_s=SHORT_S) as server:
            await server.ask(HALVES["half a body"])
            await server.app.gone.wait()

    run(test)


def test_a_connection_that_never_says_anything_is_closed() -> None:
    async def test() -> None:
        async with serving(read_timeout_s=SHORT_S) as server:
            assert await server.ask(b"") == b""

    run(test)


def test_the_time_to_read_a_request_does_not_limit_the_answer() -> None:
    async def test() -> None:
        async with serving(read_timeout_s=SHORT_S) as server:
            reader, writer = await server.connect()
            writer.write(post(b"", "/stream", b"connection: close\r\n"))
            await server.app.streaming.wait()
            await asyncio.wait([asyncio.ensure_future(reader.readuntil(b"first"))], timeout=DEADLINE_S)
            asyncio.get_running_loop().call_later(SHORT_S * 2, server.app.may_end.set)
            assert b"last" in await reader.read()
            writer.close()

    run(test)


def test_a_client_that_takes_nothing_is_cut_off() -> None:
    async def test() -> None:
        async with serving(write_timeout_s=SHORT_S) as server:
            _, writer = await server.connect()
            writer.transport.pause_reading()
            writer.write(post(b"", "/flood"))
            await server.app.gone.wait()
            writer.transport.abort()

    run(test)


def test_an_early_answer_reaches_a_client_that_sends_everything_before_it_reads() -> None:
    async def test() -> None:
        async with serving(max_discarded_bytes=64 * 2**20) as server:
            reader, writer = await server.connect()
            writer.write(post(b"", "/early").replace(b"content-length: 0", b"content-length: 20000000"))
            for _ in range(200):
                writer.write(bytes(100_000))
                await writer.drain()
            assert b"enough" in await reader.read()
            writer.close()

    run(test)


def test_no_more_connections_are_taken_than_allowed_and_the_rest_wait() -> None:
    async def test() -> None:
        async with serving(max_connections=2) as server:
            kept = [await server.connect() for _ in range(2)]
            for reader, writer in kept:
                writer.write(post(b"hello"))
                await reader.readuntil(b"hello")
            third = asyncio.ensure_future(server.ask(post(b"waited", headers=b"connection: close\r\n")))
            kept[0][1].write(post(b"again"))
            await kept[0][0].readuntil(b"again")
            assert not third.done()
            kept[0][1].close()
            assert b"waited" in await third
            kept[1][1].close()

    run(test)


def test_draining_closes_idle_connections_and_finishes_answers() -> None:
    async def test() -> None:
        async with serving() as server:
            idle_reader, idle_writer = await server.connect()
            idle_writer.write(post(b"hello"))
            await idle_reader.readuntil(b"0\r\n\r\n")
            reader, writer = await server.connect()
            writer.write(post(b"", "/stream"))
            await reader.readuntil(b"first")
            drained = asyncio.ensure_future(server.listener.drain(DEADLINE_S))
            assert await idle_reader.read() == b""
            with pytest.raises(ConnectionRefusedError):
                await server.connect()
            assert not drained.done()
            server.app.may_end.set()
            assert b"last" in await reader.read()
            assert await drained == 0
            idle_writer.close()
            writer.close()

    run(test)


def test_what_takes_longer_than_the_drain_is_cut_off_and_counted() -> None:
    async def test() -> None:
        async with serving() as server:
            reader, writer = await server.connect()
            writer.write(post(b"", "/stream"))
            await reader.readuntil(b"first")
            assert await server.listener.drain(SHORT_S) == 1
            with contextlib.suppress(ConnectionResetError):
                assert b"last" not in await reader.read()
            writer.close()
            server.app.may_end.set()

    run(test)


UPGRADES = {
    "h2c": b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\n",
    "websocket": b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n",
}


@pytest.mark.parametrize("upgrade", UPGRADES.values(), ids=UPGRADES.keys())
def test_another_protocol_is_not_taken_up_and_the_body_stays_a_body(upgrade: bytes) -> None:
    async def test() -> None:
        smuggled = b"GET /early HTTP/1.1\r\nhost: x\r\n\r\n"
        request = post(b"body:" + smuggled, headers=upgrade)
        async with serving() as server:
            reader, writer = await server.connect()
            # In one piece, cut after the head, and twice in a row.
            writer.write(request)
            assert (await reader.readuntil(b"0\r\n\r\n")).count(b"body:" + smuggled) == 1
            head, body = request[: -len(smuggled) - 5], request[-len(smuggled) - 5 :]
            writer.write(head)
            await asyncio.sleep(0)
            writer.write(body + request + post(b"last", headers=b"connection: close\r\n"))
            answer = await reader.read()
            assert answer.count(b"HTTP/1.1 200 OK") == answer.count(b"HTTP/1.1") - 2 == 3
            assert answer.count(b"body:" + smuggled) == 2 and b"enough" not in answer and b"last" in answer
            writer.close()

    run(test)


FRAMINGS = {
    "no host": (b"GET / HTTP/1.1\r\n\r\n", 400),
    "two hosts": (b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", 400),
    "another coding": (b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
    "chunks in 1.0": (b"POST / HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "a tunnel": (b"CONNECT a:80 HTTP/1.1\r\nhost: a:80\r\n\r\n", 405),
}


@pytest.mark.parametrize(("request_", "status"), FRAMINGS.values(), ids=FRAMINGS.keys())
def test_what_a_proxy_could_understand_otherwise_is_refused(request_: bytes, status: int) -> None:
    async def test() -> None:
        async with serving() as server:
            assert _error_of(await server.ask(request_))[0] == status

    run(test)


def test_a_stream_for_http_1_0_ends_with_its_connection_and_has_no_chunks() -> None:
    async def test() -> None:
        async with serving() as server:
            server.app.may_end.set()
            answer = await server.ask(b"GET /stream HTTP/1.0\r\n\r\n")
            head, _, body = answer.partition(b"\r\n\r\n")
            assert b"transfer-encoding" not in head and b"connection: close" in head
            assert body == b"firstlast"

    run(test)


def test_what_is_wrong_after_a_request_does_not_take_its_answer() -> None:
    async def test() -> None:
        async with serving() as server:
            answer = await server.ask(post(b"valid") + b"\x16\x03\x01 hello\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200") and b"valid" in answer
            reader, writer = await server.connect()
            writer.write(post(b"", "/stream"))
            await reader.readuntil(b"first")
            writer.write(b"\x16\x03\x01 hello\r\n\r\n")
            asyncio.get_running_loop().call_later(SHORT_S, server.app.may_end.set)
            assert (await reader.read()).endswith(b"last\r\n0\r\n\r\n")
            writer.close()

    run(test)


def test_half_requests_give_way_when_all_places_are_taken_and_answers_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "_FRESH_S", 0.05)

    async def test() -> None:
        async with serving(max_connections=4) as server:
            reader, writer = await server.connect()
            writer.write(post(b"", "/stream"))
            await reader.readuntil(b"first")
            halves = [await server.connect() for _ in range(20)]
            for _, half in halves:
                half.write(b"GET /health HTTP/1.1\r\nhost:")
            assert b"through" in await server.ask(post(b"through", headers=b"connection: close\r\n"))
            server.app.may_end.set()
            assert b"last" in await reader.readuntil(b"0\r\n\r\n")
            assert b"503" in await halves[0][0].readline()
            for _, half in [*halves, (reader, writer)]:
                half.close()

    run(test)


def test_answered_connections_give_way_when_all_places_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "_FRESH_S", 0.05)

    async def test() -> None:
        async with serving(max_connections=2) as server:
            answered = [await server.connect() for _ in range(2)]
            for reader, writer in answered:
                writer.write(post(b"hello"))
                await reader.readuntil(b"hello\r\n0\r\n\r\n")
            async with asyncio.timeout(DEADLINE_S / 2):  # sooner than as idle connections of any server
                assert b"through" in await server.ask(post(b"through", headers=b"connection: close\r\n"))
            assert await answered[0][0].read() == b"", "the oldest was closed without a word"
            for _, writer in answered:
                writer.close()

    run(test)


def test_handshakes_that_stand_still_give_way_when_all_places_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "_FRESH_S", 0.05)
    authority = trustme.CA()
    tls, trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    authority.issue_cert("127.0.0.1").configure_cert(tls)
    authority.configure_trust(trusting)

    async def test() -> None:
        async with serving(max_connections=4, tls=tls) as server:
            silent = [await server.connect() for _ in range(20)]
            async with asyncio.timeout(DEADLINE_S):
                answer = await server.ask(post(b"through", headers=b"connection: close\r\n"), trusting)
            assert b"through" in answer
            for _, writer in silent:
                writer.close()

    run(test)


def test_a_process_that_is_out_of_files_tries_again_without_spinning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "_FRESH_S", SHORT_S)
    num_failures = 0

    class Exhausted(socket.socket):
        def accept(self) -> Any:
            nonlocal num_failures
            if num_failures < 2:
                num_failures += 1
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    async def test() -> None:
        async with serving() as server:
            plain = server.listener._listening
            server.listener._listening = Exhausted(fileno=plain.detach())
            server.listener._listening.setblocking(False)
            begin_s = asyncio.get_running_loop().time()
            assert b"hello" in await server.ask(post(b"hello", headers=b"connection: close\r\n"))
            assert asyncio.get_running_loop().time() - begin_s >= 2 * SHORT_S

    run(test)
