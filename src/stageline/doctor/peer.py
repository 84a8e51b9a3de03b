"""The other machine's side of `stageline doctor --peers`: answers what a doctor asks, at the port of its links.

One idea: it listens where activations would arrive, so whoever reaches it has shown that a firewall lets them through;
and it answers with the very messages of a node that joins, so what is judged is what a start would judge.
"""

from __future__ import annotations

import platform
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import psutil

from stageline.checkpoint.hub import is_hub_id
from stageline.checkpoint.open import open_checkpoint
from stageline.cluster.addresses import OwnAddress, candidate_pairs
from stageline.cluster.handshake import HandshakeError, check_model, settings_of, this_software
from stageline.cluster.messages import Declined, FindWay, Hello, Offer, Ready
from stageline.cluster.probe import Stopped, choose_address
from stageline.cluster.probe_listener import ProbeListener
from stageline.cluster.ways import own_hosts
from stageline.config import environment
from stageline.doctor.machine import free_disk_bytes
from stageline.doctor.patient import Asked
from stageline.errors import ConfigError, FrameError
from stageline.links.frames import MessageDecoder, encode_message
from stageline.links.keys import LinkSecurity
from stageline.links.tcp_address import TcpAddress
from stageline.links.wakeup import Wakeup
from stageline.pipeline.host_devices import HostDevices

FACTS, OFFER, REACH = b"facts", b"offer", b"reach"
"""Kinds of questions: who are you (`Facts`); do you have this model (`Ready` or `Declined` to `Offer`); how good is
your way there (`Reached` to `FindWay`)."""

_LARGEST_MTU = 65536


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Args:
    hello: what it would say to a head.
    wall_s: its time of day, in seconds since 1970.
    mtu_bytes: of the interface it listens at.
    cache_bytes: free where it would keep weights that the head sends.
    devices: None if none could be found; then `trouble` says why.
    """

    hello: Hello
    python: str
    wall_s: float
    mtu_bytes: int
    cache_bytes: int
    devices: HostDevices | None
    trouble: str = ""


class Reached(msgspec.Struct, frozen=True):
    """Args:
    words: how good the way is, or why there is none.
    round_trip_s, bytes_per_s: None if there is none.
    """

    words: str
    round_trip_s: float | None = None
    bytes_per_s: float | None = None


ModelAnswer = Ready | Declined


class Peer:
    """Answers until `close`.

    Args:
        devices: of this machine, or why none were found.
    Raises: ConfigError if the address cannot be listened on.
    """

    def __init__(
        self, address: TcpAddress, asked: Asked, security: LinkSecurity | None, devices: HostDevices | str
    ) -> None:
        self._asked = asked
        self._security = security
        self._devices = devices
        self._hosts = own_hosts(address.host, asked.cluster.interface, asked.cluster.node_address is not None)
        self._node_id = secrets.token_hex(12)
        self._stop = Wakeup()
        answers: dict[bytes, Callable[[bytes], bytes | None]] = {
            FACTS: self._facts, OFFER: self._model, REACH: self._reach,
        }  # fmt: skip
        self._listener = ProbeListener([address], security, answers=answers)
        self.address = self._listener.addresses[0]

    def close(self) -> None:
        self._stop.ring()
        self._listener.close()
        self._stop.close()

    def _facts(self, _body: bytes) -> bytes:
        asked = self._asked
        hello = Hello(
            software=this_software(),
            node_id=self._node_id,
            host_name=socket.gethostname(),
            rank=asked.cluster.node_rank or None,
            num_stages=asked.cluster.stages,
            address=str(self.address),
            settings=settings_of(asked.engine, asked.cluster) if asked.cluster.headless else {},
            wants_weights=asked.cluster.model_source == "peer",
        )
        has_devices = not isinstance(self._devices, str)
        facts = Facts(
            hello=hello,
            python=platform.python_version(),
            wall_s=time.time(),
            mtu_bytes=mtu_of(self.address.host),
            cache_bytes=free_disk_bytes(environment.cache_directory()),
            devices=self._devices if isinstance(self._devices, HostDevices) else None,
            trouble="" if has_devices else str(self._devices),
        )
        return msgspec.msgpack.encode(facts)

    def _model(self, body: bytes) -> bytes | None:
        try:
            offer = _OFFERS.decode(body)
        except FrameError:
            return None
        if self._asked.cluster.model_source == "peer":
            return encode_message(Ready(offer.model_digest))
        try:
            return encode_message(Ready(check_model(open_checkpoint(self._place_of(offer.model)), offer)))
        except HandshakeError as error:
            return encode_message(Declined(error.step, error.reason))
        except ConfigError as error:
            way_out = "copy the files here and name them (stageline doctor MODEL --listen), or give --model-source peer"
            return encode_message(Declined("model", f"the head has {offer.model}, and here: {error}; {way_out}"))

    def _place_of(self, model: str) -> str:
        """Raises: HandshakeError for what would have to be fetched first."""
        if self._asked.has_model:
            return self._asked.engine.model
        if is_hub_id(model) and not Path(model).exists():
            raise HandshakeError("model", f"{model} is a name on the hub; say where it is here: stageline doctor MODEL "
                                          "--listen")  # fmt: skip
        return model

    def _reach(self, body: bytes) -> bytes | None:
        try:
            question = _QUESTIONS.decode(body)
        except FrameError:
            return None
        try:
            return msgspec.msgpack.encode(reach(self._hosts, question, self._security, self._stop))
        except Stopped:
            return None


_OFFERS: MessageDecoder[Offer] = MessageDecoder(Offer)
_QUESTIONS: MessageDecoder[FindWay] = MessageDecoder(FindWay)


def reach(
    hosts: Sequence[OwnAddress], question: FindWay, security: LinkSecurity | None, stop: Wakeup | None = None
) -> Reached:
    """Measure the best way to another machine; takes a few seconds. Raises: Stopped, when `stop` is rung."""
    try:
        pairs = candidate_pairs(hosts, [TcpAddress.parse(address) for address in question.addresses])
        way, _ = choose_address(pairs, security, question.step_bytes, stop)
    except ConfigError as error:
        return Reached(str(error))
    return Reached(str(way), way.round_trip_s, way.bytes_per_s)


def mtu_of(host: str) -> int:
    """Bytes of the largest packet on the interface that has this address; 0 if there is none."""
    states = psutil.net_if_stats()
    for interface, addresses in psutil.net_if_addrs().items():
        if interface in states and any(address.address == host for address in addresses):
            return min(int(states[interface].mtu), _LARGEST_MTU)
    return 0
