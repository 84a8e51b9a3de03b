"""HTTP/1.1 on one connection, with bounds on what a client may make it hold and how long it may keep it waiting.

One idea: uvicorn parses and answers; here is what it leaves to a proxy in front. A request has to arrive in time, its
head has to be short, and a client that stops taking its answer is cut off.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import formatdate
from typing import Any

import httptools
import msgspec
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from stageline.server.errors import ApiError
from stageline.server.limits import MAX_HEADERS
from stageline.server.protocol import ErrorBody

_LINGER_S = 5.0
"""How long a client that is still sending has to read why it was refused, before its connection is closed."""


@dataclass(frozen=True)
class ConnectionLimits:
    """Args:
    read_timeout_s: from a request's first byte to its last; also until a new connection says anything.
    write_timeout_s: how long a client may take nothing of its answer.
    max_header_bytes: request line and headers together.
    max_discarded_bytes: of a body that goes on after its request was answered.
    """

    read_timeout_s: float
    write_timeout_s: float
    max_header_bytes: int
    max_discarded_bytes: int


class Answering(ServerState):
    """What all connections share. `default_headers` go into every answer."""

    def __init__(self) -> None:
        self._date_s = 0
        self._date: list[tuple[bytes, bytes]] = []
        super().__init__()

    @property
    def default_headers(self) -> list[tuple[bytes, bytes]]:
        now_s = int(time.time())
        if now_s != self._date_s:
            self._date_s, self._date = now_s, [(b"date", formatdate(now_s, usegmt=True).encode())]
        return self._date

    @default_headers.setter
    def default_headers(self, _: list[tuple[bytes, bytes]]) -> None:
        """Nobody else adds any."""


class BoundedProtocol(HttpToolsProtocol):
    """One connection.

    Args:
        on_lost: called once, when it is over.
    """

    def __init__(
        self, config: Config, shared: Answering, limits: ConnectionLimits, on_lost: Callable[[], None]
    ) -> None:
        super().__init__(config, shared, {})
        self._limits = limits
        self._on_lost = on_lost
        self._read_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._linger_timer: asyncio.TimerHandle | None = None
        self.waits_since_s = self.loop.time()
        self._is_in_head = True
        self._is_reading = False
        self._is_ending = False
        self._num_head_bytes = 0
        self._num_parsed_bytes = 0
        self._num_discarded_bytes = 0
        self._refusal: ApiError | None = None

    # ---- the connection ----

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_read_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._read_timer, self._write_timer, self._linger_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)
        self._on_lost()

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None or self.transport.is_closing():
            return  # what still comes of a request that was refused
        if not self._is_reading:
            self._start_read_timer()
        if self._is_in_head:
            self._num_head_bytes += len(data)
        elif self.cycle is not None and self.cycle.response_complete and not self._may_discard(len(data)):
            self.transport.close()
            return
        self._parse(data)
        # A piece may end the head and go on with the body: only what is still head counts.
        if self._is_in_head and self._num_head_bytes > self._limits.max_header_bytes and self._refusal is None:
            self._refuse(self._head_too_long())

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(self._limits.write_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def shutdown(self) -> None:
        """Take no further request: close now, or once the request that is there or on its way is answered."""
        self._is_ending = True
        if self._is_reading and (self.cycle is None or self.cycle.response_complete):
            return
        super().shutdown()

    def give_way(self, patience_s: float) -> bool:
        """Close if for so long no whole request came, after the last answer if there was one; for when there are too
        many connections. Returns: whether.
        """
        if self.transport is None or self.transport.is_closing() or not self._waits_for_client():
            return False
        if self.loop.time() - self.waits_since_s < patience_s:
            return False
        if self.scheme == "https":
            self.transport.abort()  # its close would wait for the client
            return True
        if self._refusal is None and not self._is_idle:
            error = ApiError(503, "too many connections; send requests at once, or later", headers={"Retry-After": "1"})
            self.transport.write(_whole_answer(error, self.server_state.default_headers))
        self.transport.close()
        return True

    def _waits_for_client(self) -> bool:
        """Whether nothing is owed: no whole request is here that has no whole answer."""
        if self._linger_timer is not None or self.cycle is None or self.cycle.response_complete:
            return True
        return self.cycle.more_body and not self.cycle.response_started and not self.pipeline

    @property
    def _is_idle(self) -> bool:
        """Whether it was answered, and asks nothing further yet."""
        return self.cycle is not None and self.cycle.response_complete and not self._is_reading

    @property
    def is_answering(self) -> bool:
        """Whether a request's head is here, and not all of its answer has left."""
        return self.cycle is not None and not self.cycle.response_complete

    # ---- the parser ----

    def _parse(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        while not self.transport.is_closing():
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                # The parser takes all that follows for another protocol. A server may go on with HTTP (RFC 9110, 7.8):
                # the head is read again as if nothing else had been offered.
                if self.parser.get_method() == b"CONNECT":
                    self._refuse(ApiError(405, "this server is no proxy: CONNECT is not answered"))
                    return
                data = self._head_without_upgrade() + data[upgrade.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            except httptools.HttpParserError:
                self.send_400_response("")
                return

    def _head_without_upgrade(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s\r\n" % (self.parser.get_method(), self.url, version)]
        lines += [b"%s: %s\r\n" % header for header in self.headers if header[0] != b"upgrade"]
        return b"".join([*lines, b"\r\n"])

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.waits_since_s = self.loop.time()
        self._is_in_head = True
        self._is_reading = True
        self._start_read_timer()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._check_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._check_head(len(name) + len(value) + len(b": \r\n"))

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # it comes again, without
        self._check_framing()
        self._is_in_head = False
        self._num_discarded_bytes = 0
        super().on_headers_complete()
        self.cycle.transport = _AnswerTransport(self.transport, self._close_after_answer)  # type: ignore[assignment]
        if self.scope["http_version"] == "1.0":
            _end_by_closing(self.cycle)
        if self._is_ending:
            self.cycle.keep_alive = False

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        self._is_in_head, self._num_head_bytes = True, 0
        self._is_reading = False
        if self._read_timer is not None:
            self._read_timer.cancel()

    def on_response_complete(self) -> None:
        self.waits_since_s = self.loop.time()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Called for whatever the parser or a callback refused."""
        self._refuse(self._refusal or ApiError(400, "this is not a valid HTTP/1.1 request", code="invalid_http"))

    # ---- bounds ----

    def _check_head(self, num_bytes: int) -> None:
        self._num_parsed_bytes = num_bytes + (self._num_parsed_bytes if self.headers else 0)
        if self._num_parsed_bytes > self._limits.max_header_bytes:
            self._refusal = self._head_too_long()
        elif len(self.headers) > MAX_HEADERS:
            self._refusal = ApiError(431, f"the request has more than {MAX_HEADERS} headers; send at most as many")
        if self._refusal is not None:
            raise ValueError("the head is refused")  # ends the parsing

    def _check_framing(self) -> None:
        """What a proxy in front could understand otherwise than this server."""
        is_1_0 = self.parser.get_http_version() == "1.0"
        num_hosts = sum(name == b"host" for name, _ in self.headers)
        codings = [value.strip().lower() for name, value in self.headers if name == b"transfer-encoding"]
        if num_hosts > 1 or (num_hosts == 0 and not is_1_0):
            words = f"the request has {num_hosts} Host headers; send one"
            self._refusal = ApiError(400, words, code="invalid_http")
        elif codings and is_1_0:
            self._refusal = ApiError(400, "HTTP/1.0 has no Transfer-Encoding; send Content-Length", code="invalid_http")
        elif codings not in ([], [b"chunked"]):
            words = "the only Transfer-Encoding that is understood is chunked"
            self._refusal = ApiError(501, words, code="invalid_http")
        if self._refusal is not None:
            raise ValueError("the head is refused")  # ends the parsing

    def _head_too_long(self) -> ApiError:
        return ApiError(
            431,
            f"the request line and the headers have more than {self._limits.max_header_bytes} bytes; send fewer "
            "(--max-header-bytes)",
        )

    def _may_discard(self, num_bytes: int) -> bool:
        """A client that was answered early may not read before it has sent everything."""
        self._num_discarded_bytes += num_bytes
        return self._num_discarded_bytes <= self._limits.max_discarded_bytes

    def _start_read_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
        self._read_timer = self.loop.call_later(self._limits.read_timeout_s, self._on_read_timeout)

    def _on_read_timeout(self) -> None:
        if self.transport.is_closing():
            return
        if self.flow.read_paused:
            self._start_read_timer()  # it is this side that does not read
            return
        if self._owes_an_answer():
            self._answer_and_close()
            return
        is_answering = self.cycle is not None and self.cycle.response_started
        if not self._is_reading and self._num_head_bytes == 0:
            self.transport.close()
        elif is_answering and not self.cycle.response_complete:
            self.transport.abort()
        elif is_answering and not self._is_in_head:
            self.transport.close()
        else:
            words = f"the request was not complete after {self._limits.read_timeout_s:g} seconds (--read-timeout-s)"
            self._refuse(ApiError(408, words, code="timeout"))

    def _refuse(self, error: ApiError) -> None:
        """Answer without asking the application, and close once the client has had time to read it."""
        self._refusal = error
        if self.transport.is_closing():
            return
        if self._owes_an_answer():
            self._answer_and_close()
            return
        if self.cycle is not None and not self.cycle.response_complete:
            # The application may still read or answer: it learns that the client is gone.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            if self.cycle.response_started:
                self.transport.abort()
                return
        self.transport.write(_whole_answer(error, self.server_state.default_headers))
        self._linger()

    def _owes_an_answer(self) -> bool:
        """To a request that is all here: whatever is wrong is a further one."""
        return self.is_answering and not self.cycle.more_body

    def _answer_and_close(self) -> None:
        self._refusal = self._refusal or ApiError(400, "nothing further is read")
        self.cycle.keep_alive = False
        if self._read_timer is not None:
            self._read_timer.cancel()

    def _close_after_answer(self) -> None:
        """Closing with something unread would take the answer from a client that has yet to read it."""
        if self._is_reading and not self.transport.is_closing():
            self._linger()
        else:
            self.transport.close()

    def _linger(self) -> None:
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._linger_timer = self.loop.call_later(_LINGER_S, self.transport.close)


class _AnswerTransport:
    """The part of a transport that an answer uses, with a close that waits for the client to read."""

    def __init__(self, transport: asyncio.Transport, close: Callable[[], None]) -> None:
        self.write = transport.write
        self.is_closing = transport.is_closing
        self.close = close


def _end_by_closing(cycle: RequestResponseCycle) -> None:
    """An answer of unknown length to a client that knows no chunks ends where its connection does."""
    send = cycle.send
    is_of_unknown_length = False

    async def send_unchunked(message: Any) -> None:
        nonlocal is_of_unknown_length
        if message["type"] == "http.response.start":
            is_of_unknown_length = all(name.lower() != b"content-length" for name, _ in message.get("headers", []))
            if is_of_unknown_length:
                cycle.chunked_encoding = False
        elif is_of_unknown_length:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = send_unchunked  # type: ignore[method-assign]


def _whole_answer(error: ApiError, headers: list[tuple[bytes, bytes]]) -> bytes:
    body = msgspec.json.encode(ErrorBody(error.detail))
    lines = [STATUS_LINE[error.status], *(b"%s: %s\r\n" % header for header in headers)]
    lines += [f"{name}: {value}\r\n".encode() for name, value in error.headers.items()]
    lines.append(b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body))
    return b"".join([*lines, body])


def make_uvicorn_config(app: Any, keep_alive_timeout_s: float, root_path: str) -> Config:
    """What uvicorn's protocol reads: no logging of its own, no lifespan, no trust in a proxy's headers."""
    config = Config(
        app,
        loop="asyncio",
        http=HttpToolsProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        root_path=root_path,
        timeout_keep_alive=keep_alive_timeout_s,  # type: ignore[arg-type]
    )
    config.load()
    return config
