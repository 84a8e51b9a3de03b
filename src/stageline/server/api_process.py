"""A process that answers HTTP, from its first to its last words: `python -m stageline.server.api_process FD`.

One idea: it belongs to its supervisor. It listens at once, so that who asks learns that the model is loading; it leaves
when it is told to, after what it is answering, and at once when its supervisor is gone.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import logging
import os
import resource
import shutil
import signal
import socket
import sys
import traceback

import msgspec

from stageline.engine.async_llm import AsyncLLM
from stageline.engine.messages import ErrorReport
from stageline.errors import NotReady, StagelineError
from stageline.links.child_process import read_message, write_message
from stageline.log import open_standard_streams, set_up_logging
from stageline.server.access_log import AccessLog
from stageline.server.api_messages import (
    ApiFailed,
    ApiLeft,
    ApiProcessConfig,
    ApiReady,
    DrainApi,
    FromApi,
    ReplaceEngine,
    ToApi,
)
from stageline.server.app import create_app
from stageline.server.http_protocol import BoundedProtocol, ConnectionLimits, make_uvicorn_config
from stageline.server.listener import Listener
from stageline.server.preflight import make_ssl_context

logger = logging.getLogger(__name__)

_RESERVED_FILES = 128
"""Open files that are not connections."""

_MAX_DISCARDED_BYTES = 64 * 2**20


def main() -> int:
    """Serve until told to stop. Returns: the exit status."""
    faulthandler.enable()
    # Its process group is its own, but a signal may be sent to it alone: what ends the server is the supervisor's part.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    body = read_message(sys.stdin.fileno())
    if body is None or len(sys.argv) != 2:
        sys.exit("an API process is started by the server's supervisor, not by hand")
    config = msgspec.msgpack.decode(body, type=ApiProcessConfig)
    supervisor_fd = int(sys.argv[1])
    set_up_logging(config.log_level)
    # What it would say is said, in words or in the access log, by this package.
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    try:
        asyncio.run(_ApiProcess(config, supervisor_fd).run())
        return 0
    except BaseException as error:
        if not isinstance(error, StagelineError):
            traceback.print_exception(error)
        write_message(supervisor_fd, msgspec.msgpack.encode(ApiFailed(ErrorReport.of(error))))
        return 1


class _ApiProcess:
    def __init__(self, config: ApiProcessConfig, supervisor_fd: int) -> None:
        self._config = config
        self._supervisor_fd = supervisor_fd
        self._links = list(config.links)
        self._llm: AsyncLLM | None = None

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        orders: asyncio.Queue[DrainApi] = asyncio.Queue()
        loop.add_reader(sys.stdin.fileno(), self._take_order, orders)
        self._llm = llm = await AsyncLLM.attach(self._config.engine, *self._links)
        try:
            listener = self._listen(llm)
            becoming_ready = asyncio.create_task(self._tell_when_ready(llm))
            order = await orders.get()
            hurrying = asyncio.create_task(self._hurry(orders, listener))
            stopping = NotReady("the server is stopping, and broke the request off", retry_after_s=5.0)
            num_cut_off = await listener.drain(order.patience_s, lambda: llm.break_off(stopping))
            hurrying.cancel()
            becoming_ready.cancel()
            self._tell(ApiLeft(num_cut_off))
        finally:
            await llm.close()

    async def _hurry(self, orders: asyncio.Queue[DrainApi], listener: Listener) -> None:
        await orders.get()
        listener.hurry()

    def _listen(self, llm: AsyncLLM) -> Listener:
        serve = self._config.serve
        app = create_app(llm, serve, writes_advice=self._links[0].client_index == 0)
        config = make_uvicorn_config(
            app if serve.disable_log_requests else AccessLog(app), serve.keep_alive_timeout_s, serve.root_path
        )
        limits = ConnectionLimits(
            read_timeout_s=serve.read_timeout_s,
            write_timeout_s=serve.write_timeout_s,
            max_header_bytes=serve.max_header_bytes,
            max_discarded_bytes=max(_MAX_DISCARDED_BYTES, serve.max_body_bytes),
        )
        return Listener(
            socket.socket(fileno=self._config.listening_fd),
            make_ssl_context(serve),
            _affordable_connections(serve.max_connections),
            lambda shared, on_lost: BoundedProtocol(config, shared, limits, on_lost),
        )

    async def _tell_when_ready(self, llm: AsyncLLM) -> None:
        try:
            await llm.wait_until_ready()
        except StagelineError:
            return  # the supervisor knows more of it, and will say what is to be done
        # What starting left behind is for ever: the collector need not look at it again and again.
        gc.collect()
        gc.freeze()
        self._tell(ApiReady())

    def _take_order(self, orders: asyncio.Queue[DrainApi]) -> None:
        body = read_message(sys.stdin.fileno())
        if body is None:
            for link in self._links:
                shutil.rmtree(link.folder, ignore_errors=True)
            os._exit(1)
        order = msgspec.msgpack.decode(body, type=ToApi)
        if isinstance(order, DrainApi):
            orders.put_nowait(order)
        else:
            self._replace(order)

    def _replace(self, order: ReplaceEngine) -> None:
        self._links[order.replica] = order.link
        if self._llm is not None:
            self._llm.replace_replica(order.replica, order.link)

    def _tell(self, message: FromApi) -> None:
        write_message(self._supervisor_fd, msgspec.msgpack.encode(message))


def _affordable_connections(wanted: int) -> int:
    """As many as wanted, or as the system lets this process have open files for."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + _RESERVED_FILES
    allowed = needed if most == resource.RLIM_INFINITY else min(needed, most)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(allowed, resource.getrlimit(resource.RLIMIT_NOFILE)[0]), most))
    if allowed < needed:
        logger.warning(
            "at most %d connections at once: this process may have %d open files; ulimit -n %d allows for "
            "--max-connections %d", max(1, allowed - _RESERVED_FILES), allowed, needed, wanted,
        )  # fmt: skip
    return max(1, allowed - _RESERVED_FILES)


if __name__ == "__main__":
    open_standard_streams()
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
