"""The thread of a stage's process that is never busy: answers pings, tells counters, spans, leaves with the engine."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from contextlib import suppress

import psutil
import zmq

from stageline.clock import MonotonicClock
from stageline.errors import FrameError
from stageline.executor.messages import (
    CollectCounters,
    CollectSpans,
    Failed,
    InputClock,
    Ping,
    Pong,
    Spans,
    ToResponder,
    WorkerConfig,
)
from stageline.links.frames import MessageDecoder, encode_message
from stageline.links.sockets import Links, Socket
from stageline.timeline.recorder import Recorder
from stageline.timeline.stage_counters import StageAccount, StageCounters
from stageline.worker.broken_links import BrokenLinks

_LAST_WORDS_S = 0.5


def start_responder(
    config: WorkerConfig,
    account: StageAccount,
    recorder: Recorder,
    broken: BrokenLinks,
) -> None:
    """Start the thread. It needs no stopping: it ends with the process.

    Standard input ends when the engine does, however it does; nothing this process still computes is of use then.
    """
    # Its own sockets, never closed: the main thread may not close sockets that this thread waits on.
    links = Links(config.access.security())
    pings, answers = _open(links, config)
    stage_index = config.stage_index
    clock = MonotonicClock()
    decoder: MessageDecoder[ToResponder] = MessageDecoder(ToResponder)
    signs_of_the_end = _signs_of_the_end()

    def respond() -> None:
        poller = zmq.Poller()
        for source in (pings, broken.fd, *signs_of_the_end):
            poller.register(source, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if not ready.keys().isdisjoint(signs_of_the_end):
                shutil.rmtree(config.socket_folder, ignore_errors=True)
                if config.caller_name:
                    gone = "`stageline`, which started it, has ended"
                    answers.send(encode_message(Failed(stage_index, gone, "", False, config.rank)))
                    links.close(linger_s=_LAST_WORDS_S)
                os._exit(1)
            if broken.fd in ready and (news := broken.take()) is not None:
                answers.send(encode_message(news))
            if pings not in ready:
                continue
            try:
                asked = decoder.decode(pings.recv())
            except FrameError:
                continue  # not of this engine; a question that is not understood is not answered
            match asked:
                case CollectCounters():
                    answers.send(encode_message(_counters(account)))
                case CollectSpans():
                    answers.send(encode_message(Spans(stage_index, recorder.spans(asked.since_s, asked.most))))
                case InputClock():
                    account.input_ahead_s = asked.ahead_s
                case Ping():
                    answers.send(encode_message(Pong(stage_index, asked.asked_s, clock.now_s(), config.rank)))

    threading.Thread(target=respond, name="responder", daemon=True).start()


def _open(links: Links, config: WorkerConfig) -> tuple[Socket, Socket]:
    """Where questions come from, and where answers go."""
    if config.caller_name:
        both = links.caller(config.engine_address, identity=f"{config.caller_name}.ping".encode())
        return both, both
    return links.receiver(config.ping_address), links.sender(config.engine_address)


def _counters(account: StageAccount) -> StageCounters:
    return account.snapshot(MonotonicClock().now_s(), psutil.Process().memory_info().rss)


def _signs_of_the_end() -> list[int]:
    """File descriptors that become readable when the engine is gone.

    A process forked off the engine keeps standard input open; where the system can watch the engine itself, that is no
    obstacle.
    """
    signs = [sys.stdin.fileno()]
    if hasattr(os, "pidfd_open"):
        # If the engine is gone already, or the system forbids it, standard input tells.
        with suppress(OSError):
            signs.append(os.pidfd_open(os.getppid()))
    return signs
