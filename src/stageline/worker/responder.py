"""The thread of a stage's process that is never busy: answers pings, and leaves when the engine is gone."""

from __future__ import annotations

import os
import shutil
import sys
import threading

import zmq

from stageline.executor.messages import Pong
from stageline.links.frames import encode_message
from stageline.links.sockets import Links


def start_responder(links: Links, stage_index: int, ping_address: str, engine_address: str) -> None:
    """Start the thread. It needs no stopping: it ends with the process.

    Standard input ends when the engine does, however it does; nothing this process still computes is of use then.
    """
    pings = links.receiver(ping_address)
    answers = links.sender(engine_address)
    pong = encode_message(Pong(stage_index))
    folder = os.path.dirname(ping_address.removeprefix("ipc://"))

    def respond() -> None:
        poller = zmq.Poller()
        poller.register(pings, zmq.POLLIN)
        poller.register(sys.stdin.fileno(), zmq.POLLIN)
        while True:
            try:
                ready = dict(poller.poll())
                if pings in ready:
                    pings.recv()
                    answers.send(pong)
            except zmq.ZMQError:
                return  # the main thread closed the sockets: it is leaving in order
            if sys.stdin.fileno() in ready:
                shutil.rmtree(folder, ignore_errors=True)
                os._exit(1)

    threading.Thread(target=respond, name="responder", daemon=True).start()
