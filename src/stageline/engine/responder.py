"""The thread of the engine's process that is never busy: shows signs of life, takes orders, leaves with its owner."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections import deque
from contextlib import suppress
from typing import NoReturn

import zmq

from stageline.clock import Clock
from stageline.engine.core import EngineCore
from stageline.engine.messages import Beat, EngineProcessConfig, FromOwner, Stop, client_address
from stageline.links.child_process import read_message
from stageline.links.frames import MessageDecoder, encode_message
from stageline.links.sockets import Links

BEATS_PER_TIMEOUT = 4


class Responder:
    """Needs no stopping: it ends with the process.

    Args:
        orders: where the owner's orders go.
    """

    def __init__(self, config: EngineProcessConfig, clock: Clock, orders: deque[FromOwner]) -> None:
        self._folder = config.folder
        self._beat_s = config.engine.heartbeat_timeout_s / BEATS_PER_TIMEOUT
        self._clock = clock
        self._orders = orders
        self._core: EngineCore | None = None
        self._has_new_order = threading.Event()
        self._decoder: MessageDecoder[FromOwner] = MessageDecoder(FromOwner)
        # Its own sockets, never closed: the main thread may not close sockets that this thread uses.
        links = Links()
        self._clients = [links.sender(client_address(config.folder, index)) for index in range(config.num_clients)]

    def start(self) -> None:
        threading.Thread(target=self._run, name="responder", daemon=True).start()

    def watch(self, core: EngineCore) -> None:
        """From now on beats tell of this core, and orders wake it."""
        self._core = core
        if self._orders:
            core.wake()

    def forget_core(self) -> None:
        """There is none: until the next one, nothing stands still, and a word to stop is obeyed at once."""
        self._core = None
        self._has_new_order.clear()
        if any(isinstance(order, Stop) for order in self._orders):
            self._leave(0)

    def wait_for_order(self, most_s: float) -> None:
        """Return when an order has come since there is no core, or after so long."""
        self._has_new_order.wait(most_s)

    def _run(self) -> None:
        stdin = sys.stdin.fileno()
        poller = zmq.Poller()
        poller.register(stdin, zmq.POLLIN)
        # A process forked off the owner keeps standard input open; where the system can watch the owner itself, that
        # is no obstacle. If the owner is gone already, or the system forbids it, standard input tells.
        owner = None
        with suppress(OSError, AttributeError):
            owner = os.pidfd_open(os.getppid())
            poller.register(owner, zmq.POLLIN)
        while True:
            ready = dict(poller.poll(int(self._beat_s * 1000)))
            if owner is not None and owner in ready:
                self._leave(1)
            if stdin in ready:
                self._take_order(stdin)
            if not ready:
                self._beat()

    def _take_order(self, stdin: int) -> None:
        body = read_message(stdin)
        if body is None:
            self._leave(1)
        order = self._decoder.decode(body)
        self._orders.append(order)
        self._has_new_order.set()
        if self._core is not None:
            self._core.wake()
        elif isinstance(order, Stop):
            self._leave(0)

    def _leave(self, status: int) -> NoReturn:
        """The stages notice the end of this process, and leave, too."""
        shutil.rmtree(self._folder, ignore_errors=True)
        os._exit(status)

    def _beat(self) -> None:
        core = self._core
        beat = Beat(0.0) if core is None else Beat(core.stalled_s(self._clock.now_s()), core.num_requests)
        frame = encode_message(beat)
        for client in self._clients:
            client.send(frame)
