"""A node's agent: joins the head, starts the stages it is told to, ends them when the head is gone, and joins again.

One idea: it waits in one place, for the head, a signal, a broken connection and the end of a stage alike. It decides
nothing and sees no token: its stages talk to the head and to their neighbours themselves.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import signal
import socket as sockets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq

from stageline.checkpoint.checkpoint import Checkpoint
from stageline.checkpoint.open import open_checkpoint
from stageline.cluster.handshake import HandshakeError, check_model, this_software
from stageline.cluster.local_stages import LocalStages
from stageline.cluster.messages import (
    AreYouThere,
    Declined,
    EndStages,
    FindWay,
    FromNode,
    GiveWeights,
    Giving,
    Hello,
    Here,
    Leaving,
    Offer,
    Ready,
    Refused,
    SayHello,
    StageEnded,
    StartStages,
    ToNode,
    Welcome,
)
from stageline.cluster.places import Places
from stageline.cluster.ports import HeldPort
from stageline.cluster.probe_listener import ProbeListener
from stageline.cluster.reach import Reach
from stageline.cluster.ways import WaySearch, listen
from stageline.cluster.weight_port import WeightPort, kept_copy
from stageline.config import environment
from stageline.errors import ConfigError, FrameError, StageUnfit
from stageline.executor.messages import LinkAccess
from stageline.links.frames import MessageDecoder, encode_message
from stageline.links.ipc_folder import IpcFolder
from stageline.links.sockets import Links
from stageline.links.tcp_address import TcpAddress
from stageline.links.wakeup import Wakeup
from stageline.transfer.copy_files import check_cache
from stageline.transfer.messages import WeightSource

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_LOOK_S = 1.0
"""A head that has not answered for this long is looked for."""

_GOODBYE_S = 2.0


@dataclass(frozen=True, kw_only=True)
class NodeSettings:
    """What was asked for on this node.

    Args:
        head: name or address, and port.
        model: where the model is here; None looks where the head has it.
        model_source: local, or peer to get its weights from the head.
        settings: flags that have to be the head's.
    """

    head: str
    port: int
    ports: range
    access: LinkAccess
    join_timeout_s: float
    model: str | None = None
    model_source: str = "local"
    rank: int | None = None
    num_stages: int | None = None
    address: str | None = None
    interface: str | None = None
    settings: Mapping[str, str]
    binds_cores: bool = True


def run_node(asked: NodeSettings) -> None:
    """Take part until a signal says to stop.

    Raises: ConfigError, most of them HandshakeError with the step that failed, if this node cannot take part.
    """
    if asked.model_source == "peer":
        check_cache(_weight_cache())
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    wakeup_before = signal.set_wakeup_fd(writer)
    try:
        node = _Node(asked, reader)
        try:
            for number in _SIGNALS:
                signal.signal(number, node.stop)
            with suppress(_ToldToStop):
                node.run()
        finally:
            node.close()
    finally:
        signal.set_wakeup_fd(wakeup_before)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reader)
        os.close(writer)


class _ToldToStop(BaseException):
    """By a signal, while something is done that hears none; see `_Node._broken_off_by_signals`."""


class _Node:
    def __init__(self, asked: NodeSettings, signal_fd: int) -> None:
        self._asked = asked
        self._signal_fd = signal_fd
        self._is_told_to_stop = False
        self._is_away = False
        self._is_broken = False
        self._bell = Wakeup()
        self._node_id = secrets.token_hex(12)
        self._places = Places(asked.head, asked.port, asked.address, asked.interface)
        self._port = HeldPort(self._places.own, asked.ports)
        # Made last: what is refused before leaves no folder.
        self._folder = IpcFolder("s9999.r999.input999")
        self._stages = LocalStages(self._folder.path, asked.access, asked.binds_cores)
        self._weights = WeightPort(self._port, asked.ports, asked.access)
        self._probes: ProbeListener | None = None
        self._search: WaySearch | None = None
        self._unread: list[ToNode] = []
        self._decoder: MessageDecoder[ToNode] = MessageDecoder(ToNode)
        self._links: Links | None = None
        self._checkpoint: Checkpoint | None = None
        self._model: str | WeightSource = ""
        self._model_digest = ""
        self._has_been_in = False

    def run(self) -> None:
        deadline_s = time.monotonic() + self._asked.join_timeout_s
        while not self._is_told_to_stop:
            self._connect()
            # Whoever was in once is patient: the head may be started again.
            if self._join(math.inf if self._has_been_in else deadline_s):
                self._serve()
            if self._is_told_to_stop:
                # First, so that the head knows why the stages end.
                self._send(Leaving())
            self._stages.end(0.0)
            self._disconnect()

    def stop(self, number: int, _frame: object) -> None:
        """Handles a signal."""
        self._is_told_to_stop = True
        if self._is_away:
            raise _ToldToStop

    @contextmanager
    def _broken_off_by_signals(self) -> Iterator[None]:
        """For what may take long elsewhere: a model that is downloaded first, a host that does not answer."""
        try:
            self._is_away = True
            yield
        except _ToldToStop:
            pass
        finally:
            self._is_away = False

    def close(self) -> None:
        self._stages.end(0.0)
        self._answer_probes(False)
        self._disconnect()
        self._bell.close()
        self._port.close()
        self._folder.close()

    # ---- the connection ----

    def _connect(self) -> None:
        self._is_broken = False
        self._unread = []
        self._settle()
        self._answer_probes(True)
        self._links = Links(self._asked.access.security(), on_broken=self._on_broken)
        self._socket = self._links.caller(self._places.head.url, identity=f"node.{secrets.token_hex(12)}".encode())
        self._reach = Reach(self._places.head, self._links, is_patient=self._has_been_in)

    def _settle(self) -> None:
        """Where this machine and its head are now."""
        self._places.take()
        if (own := self._places.own) != self._port.address.host:
            logger.info("this machine is reached at %s now, no longer at %s", own, self._port.address.host)
            self._answer_probes(False)
            left, self._port = self._port, HeldPort(own, self._asked.ports)
            left.close()
            self._weights = WeightPort(self._port, self._asked.ports, self._asked.access)

    def _disconnect(self) -> None:
        self._end_search()
        if self._links is not None:
            self._links.close(linger_s=_GOODBYE_S if self._is_told_to_stop and not self._is_broken else 0.0)
            self._links = None
        self._weights.close()

    def _answer_probes(self, wanted: bool) -> None:
        """Whoever may send to this node's first stage measures the ways to it as long as that is not started."""
        if wanted and self._probes is None:
            self._probes = listen(self._places.hosts, self._port.address.port, self._asked.access.security())
        elif not wanted and self._probes is not None:
            self._probes.close()
            self._probes = None

    def _end_search(self) -> None:
        if self._search is not None:
            self._search.end()
            self._search = None

    def _on_broken(self, _address: str) -> None:
        self._is_broken = True
        self._bell.ring()

    def _send(self, message: FromNode) -> None:
        with suppress(zmq.ZMQError):
            self._socket.send(encode_message(message), zmq.NOBLOCK)

    # ---- the one place that waits ----

    def _wait(self, patience_s: float) -> list[ToNode]:
        """What the head said meanwhile; nothing if something else happened, or the time is over."""
        if self._unread:
            unread, self._unread = self._unread, []
            return unread
        poller = zmq.Poller()
        for source in (self._socket, self._bell.fd, self._signal_fd, *self._stages.exit_fds()):
            poller.register(source, zmq.POLLIN)
        ready = dict(poller.poll(None if math.isinf(patience_s) else math.ceil(max(0.0, patience_s) * 1000)))
        if self._bell.fd in ready:
            self._bell.heard()
        for stage_index, how in self._stages.take_ended(set(ready)):
            logger.warning("s%d ended: %s", stage_index, how)
            self._send(StageEnded(self._stages.pipeline, stage_index, how))
        messages: list[ToNode] = []
        while True:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            try:
                messages.append(self._decoder.decode(frame))
            except FrameError as error:
                logger.warning("a message of the head was dropped: %s", error)

    # ---- joining ----

    def _join(self, deadline_s: float) -> bool:
        """Returns: false if it has to connect again, or there is a signal. Raises: ConfigError."""
        began_s = time.monotonic()
        self._send(self._hello())
        while not (self._is_told_to_stop or self._is_broken):
            messages = self._wait(min(_LOOK_S, deadline_s - time.monotonic()))
            for place, message in enumerate(messages):
                match message:
                    case Offer():
                        with self._broken_off_by_signals():
                            self._take_offer(message)
                    case Refused():
                        raise HandshakeError(message.step, message.reason)
                    case AreYouThere():
                        self._send(Here(message.question, time.time()))
                    case Welcome():
                        self._has_been_in = True
                        self._unread = messages[place + 1 :]
                        logger.info("joined %s as node %d", self._places.head, message.rank)
                        return True
            now_s = time.monotonic()
            if not messages and now_s - began_s >= _LOOK_S:
                if self._places.look():
                    return False
                with self._broken_off_by_signals():
                    self._reach.look(now_s >= deadline_s, deadline_s - now_s)
        return False

    def _hello(self) -> Hello:
        asked = self._asked
        return Hello(
            software=this_software(),
            node_id=self._node_id,
            host_name=sockets.gethostname(),
            rank=asked.rank,
            num_stages=asked.num_stages,
            address=str(self._port.address),
            settings=dict(asked.settings),
            addresses=[] if self._probes is None else [str(address) for address in self._probes.addresses],
            wants_weights=asked.model_source == "peer",
        )

    def _take_offer(self, offer: Offer) -> None:
        self._reach.is_heard = True
        try:
            if self._asked.model_source == "peer":
                self._model, digest = _weight_source(offer), offer.model_digest
            else:
                # Each time anew: a head that was started again may have another model, at the same place too.
                self._checkpoint = self._open(offer)
                self._model, digest = self._checkpoint.path, check_model(self._checkpoint, offer)
        except HandshakeError as error:
            self._send(Declined(error.step, error.reason))
            raise
        self._model_digest = digest
        self._send(Ready(digest))

    def _open(self, offer: Offer) -> Checkpoint:
        model = self._asked.model or offer.model
        try:
            return open_checkpoint(model)
        except ConfigError as error:
            way_out = "copy the files here and tell where they are with --model, or give --model-source peer"
            reason = f"the head has {offer.model}, and this node cannot open {model}: {error}; {way_out}"
            raise HandshakeError("model", reason) from None

    # ---- taking part ----

    def _serve(self) -> None:
        """Returns when the head is gone, or a signal says to stop. Raises: HandshakeError if the head wants no more."""
        while not (self._is_told_to_stop or self._is_broken):
            messages = self._wait(math.inf)
            if self._search is not None and (found := self._search.take()) is not None:
                self._send(found)
                self._end_search()
            for message in messages:
                match message:
                    case AreYouThere():
                        self._send(Here(message.question, time.time()))
                    case StartStages():
                        self._answer_probes(False)
                        self._start_stages(message)
                    case EndStages():
                        self._stages.end(message.patience_s)
                        self._answer_probes(True)
                    case GiveWeights():
                        with self._broken_off_by_signals():
                            self._send(Giving(self._give_weights()))
                    case FindWay():
                        self._end_search()
                        self._search = WaySearch(self._places.hosts, message, self._asked.access.security(), self._bell)
                    case Refused():
                        raise HandshakeError(message.step, message.reason)
                    case SayHello():
                        logger.warning("the head took this node for gone: the stages here end, and it joins again")
                        return
                    case Welcome():
                        logger.info("this is node %d now", message.rank)
                    case Offer():
                        logger.warning("the head made an offer that nobody asked for")
        if self._is_broken and not self._is_told_to_stop:
            logger.warning("the head is gone: the stages here end, and this node waits for it at %s", self._places.head)

    def _start_stages(self, wanted: StartStages) -> None:
        own = [TcpAddress(host.host, self._port.address.port) for host in self._places.hosts]
        try:
            self._stages.start(wanted, self._model_from(wanted.weight_givers), self._places.head.url, own)
        except StageUnfit as error:
            logger.error("%s", error)
            self._stages.end(0.0)
            self._send(StageEnded(wanted.pipeline, error.stage_index, error.reason))

    def _model_from(self, givers: list[str]) -> str | WeightSource:
        if isinstance(self._model, str):
            return self._model
        return msgspec.structs.replace(self._model, givers=givers)

    def _give_weights(self) -> str:
        """To other nodes, from here. Returns: the address; empty if nothing of them is here, or no port is left."""
        try:
            if self._checkpoint is not None:
                return str(self._weights.serve(self._checkpoint).address)
            copy = kept_copy(_weight_cache(), self._model_digest)
            return "" if copy is None else str(self._weights.serve(copy, is_whole=False).address)
        except (ConfigError, OSError) as error:
            logger.info("other nodes get no weights from here: %s", error)
            return ""


def _weight_cache() -> Path:
    return environment.cache_directory() / "models"


def _weight_source(offer: Offer) -> WeightSource:
    """Each stage copies from there what it needs, and finds out whether that is the model of this digest.

    Raises: HandshakeError if the head sends none.
    """
    if not offer.weights_address:
        raise HandshakeError("model", "the head has no port left to send weights from; give it a longer --port-range")
    return WeightSource(offer.weights_address, offer.model_digest, str(_weight_cache()), model=offer.model)
