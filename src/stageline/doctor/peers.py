"""Checks of other machines: reached or not, fit or not, how good the links are, and the whole ring of them.

One idea: a machine is asked over the very link that activations would take, and asked itself to go to its neighbours
and back here: so what a firewall stops in one direction only is found, too.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace

from stageline.checkpoint.digest import model_digest
from stageline.cluster.handshake import settings_of, this_software
from stageline.cluster.membership import HEAD, Wanted
from stageline.cluster.messages import FindWay, Offer, Ready
from stageline.cluster.ports import HeldPort, resolve
from stageline.cluster.probe import NoWay, measure
from stageline.cluster.probe_listener import ProbeListener
from stageline.doctor.devices import describe
from stageline.doctor.finding import Finding, failed, ok, skipped
from stageline.doctor.joining import Guest, Joining, play_joining
from stageline.doctor.links import Need, judge_link
from stageline.doctor.patient import Asked, Model
from stageline.doctor.peer import FACTS, OFFER, REACH, Facts, ModelAnswer, Reached
from stageline.doctor.peer_findings import (
    Peer,
    address_of_peer,
    judge_clock,
    judge_mtu,
    judge_python,
    judge_software,
    own_mtu,
    why_not_reached,
)
from stageline.engine.startup_table import format_bytes
from stageline.errors import ConfigError, FrameError
from stageline.links.frames import MessageDecoder, encode_message
from stageline.links.keys import LinkSecurity
from stageline.links.sockets import Links
from stageline.links.tcp_address import TcpAddress
from stageline.pipeline.host_devices import HostDevices

_PATIENCE_S = 10.0
_REACH_S = 30.0

_FACTS: MessageDecoder[Facts] = MessageDecoder(Facts)
_MODEL_ANSWERS: MessageDecoder[ModelAnswer] = MessageDecoder(ModelAnswer)
_REACHED: MessageDecoder[Reached] = MessageDecoder(Reached)


@dataclass
class PeersReport:
    """Attributes:
    shares, devices: by rank, of the machines that could take part; empty if they are not all there.
    """

    findings: list[Finding]
    shares: Mapping[int, int]
    devices: dict[int, HostDevices]


class PeerCheck:
    """Args: need: what the model asks of a link."""

    def __init__(self, asked: Asked, model: Model | None, need: Need, security: LinkSecurity | None) -> None:
        self._asked = asked
        self._model = model
        self._need = need
        self._security = security
        self._findings: list[Finding] = []

    def run(self, names: Sequence[str]) -> PeersReport:
        """Ask all of them. Args: names: HOST or HOST:PORT."""
        peers = [self._ask_facts(peer) for peer in self._reach(names)]
        for peer in peers:
            self._judge_peer(peer)
        known = [peer for peer in peers if peer.facts is not None]
        joining = self._join(known)
        self._findings += [*joining.findings, *self._judge_caches(known, joining)]
        self._go_round(known, joining)
        devices = {
            rank: peer.facts.devices
            for peer in known
            if peer.facts is not None and peer.facts.devices is not None
            and (rank := joining.ranks.get(peer.name)) is not None
        }  # fmt: skip
        return PeersReport(self._findings, joining.shares, devices)

    # ---- one machine ----

    def _reach(self, names: Sequence[str]) -> list[Peer]:
        addresses: dict[str, TcpAddress] = {}
        for name in names:
            try:
                addresses[name] = address_of_peer(name, self._asked.cluster.ports.start)
            except ConfigError as error:
                self._findings.append(failed("peer", str(error)))
        try:
            found = measure([(None, address) for address in addresses.values()], self._security)
        except ConfigError as error:
            self._findings.append(failed("peer", str(error)))
            return []
        peers = []
        for (name, address), way in zip(addresses.items(), found, strict=True):
            if isinstance(way, NoWay):
                self._findings.append(failed("peer", why_not_reached(address, way.reason), name))
            else:
                peers.append(Peer(name, address, way))
        return peers

    def _ask_facts(self, peer: Peer) -> Peer:
        asked_s = time.time()
        answer = self._ask(peer.address, FACTS, b"", _PATIENCE_S)
        answered_s = time.time()
        with suppress(FrameError):
            if answer is not None:
                facts = _FACTS.decode(answer)
                offset_s = facts.wall_s - (asked_s + answered_s) / 2
                return replace(peer, facts=facts, clock_s=offset_s, uncertain_s=(answered_s - asked_s) / 2)
        return peer

    def _ask(self, address: TcpAddress, kind: bytes, body: bytes, patience_s: float) -> bytes | None:
        links = Links(self._security)
        try:
            caller = links.caller(address.url)
            caller.send_multipart([kind, body])
            if not caller.poll(int(patience_s * 1000)):
                return None
            frames = caller.recv_multipart()
            return frames[1] if len(frames) == 2 and frames[0] == kind else None
        finally:
            links.close()

    def _judge_peer(self, peer: Peer) -> None:
        way = peer.way
        self._findings.append(judge_link(str(way), way.round_trip_s, way.bytes_per_s, self._need, peer.name))
        facts = peer.facts
        if facts is None:
            self._findings.append(
                skipped("peer", "it answers probes and nothing else; type there: stageline doctor --listen ADDRESS of "
                                "the same version", peer.name)
            )  # fmt: skip
            return
        self._findings += [judge_python(facts, peer.name), judge_clock(peer), judge_mtu(own_mtu(peer), peer)]
        if facts.devices is None:
            self._findings.append(failed("devices", facts.trouble, peer.name))
        else:
            free = sum(facts.devices.free_bytes) / 2**30
            self._findings.append(ok("devices", f"{describe(facts.devices)}, {free:.1f} GiB free", peer.name))

    # ---- all of them together ----

    def _join(self, peers: Sequence[Peer]) -> Joining:
        config, cluster = self._asked.engine, self._asked.cluster
        if not (self._asked.is_head and cluster.is_spread):
            return Joining([judge_software(peer.facts, peer.name) for peer in peers if peer.facts is not None])
        wanted = Wanted(
            software=this_software(),
            settings=settings_of(config, cluster),
            model=config.model,
            model_digest="" if self._model is None else model_digest(self._model.checkpoint),
            num_stages=config.pipeline_parallel_size,
            num_nodes=cluster.nnodes,
            own_stages=cluster.stages,
        )
        return play_joining(wanted, [self._guest(peer) for peer in peers])

    def _guest(self, peer: Peer) -> Guest:
        assert peer.facts is not None

        def ask_model(offer: Offer) -> ModelAnswer | None:
            if self._model is None:
                return Ready(offer.model_digest)
            answer = self._ask(peer.address, OFFER, encode_message(offer), _PATIENCE_S)
            try:
                return None if answer is None else _MODEL_ANSWERS.decode(answer)
            except FrameError:
                return None

        return Guest(peer.name, peer.facts.hello, ask_model)

    def _judge_caches(self, peers: Sequence[Peer], joining: Joining) -> list[Finding]:
        """Whether there is room for the weights that the head would send."""
        findings = []
        for peer in peers:
            facts, rank = peer.facts, joining.ranks.get(peer.name)
            if self._model is None or facts is None or not facts.hello.wants_weights:
                continue
            if rank is None or rank not in joining.shares:
                continue
            first = sum(count for other, count in joining.shares.items() if other < rank)
            needed = self._model.file_bytes(range(first, first + joining.shares[rank]))
            line = f"its weights take {format_bytes(needed)}; its cache has {format_bytes(facts.cache_bytes)} free"
            if needed > facts.cache_bytes:
                way_out = "make room there, or set XDG_CACHE_HOME to another disk"
                findings.append(failed("disk", f"{line}; {way_out}", peer.name))
            else:
                findings.append(ok("disk", line, peer.name))
        return findings

    def _go_round(self, peers: Sequence[Peer], joining: Joining) -> None:
        """Back to the head from each of them, and from each to the next: the way of a request's first token."""
        cluster = self._asked.cluster
        if not self._asked.is_head or cluster.master_addr is None or not peers:
            return
        try:
            head = TcpAddress(resolve(cluster.master_addr, "--master-addr"), cluster.master_port)
            own = resolve(cluster.node_address, "--node-address") if cluster.node_address else head.host
            held = HeldPort(own, cluster.ports)
        except ConfigError:
            return  # told where this machine's ports are looked at
        try:
            listener = ProbeListener([head, held.address], self._security)
        except ConfigError as error:
            self._findings.append(skipped("way back", f"not tried: {error}"))
            held.close()
            return
        try:
            for peer in peers:
                self._findings.append(self._way_back(peer, head))
            self._weights_way([one for one in peers if one.facts is not None and one.facts.hello.wants_weights], own)
            self._ring(sorted((joining.ranks[one.name], one) for one in peers if one.name in joining.ranks), held)
        finally:
            listener.close()
            held.close()

    def _way_back(self, peer: Peer, head: TcpAddress) -> Finding:
        found = self._ask_way(peer, head)
        if found.round_trip_s is None:
            return failed(
                "way back", f"it cannot reach the head's port: {found.words}; let TCP port {head.port} through here, "
                "or give the --master-addr that it reaches", peer.name,
            )  # fmt: skip
        return ok("way back", f"it reaches {head}", peer.name)

    def _weights_way(self, peers: Sequence[Peer], own: str) -> None:
        """To the port that the head would send weights from, for those who want them."""
        if not peers:
            return
        with ExitStack() as stack:
            try:
                held = HeldPort(own, self._asked.cluster.ports)
                stack.callback(held.close)
                stack.callback(ProbeListener([held.address], self._security).close)
            except ConfigError as error:
                self._findings.append(failed("weights port", str(error)))
                return
            for peer in peers:
                found = self._ask_way(peer, held.address)
                if found.round_trip_s is None:
                    way_out = f"let TCP port {held.address.port} through here; --port-range chooses which"
                    line = f"it cannot reach the port that its weights come from: {found.words}; {way_out}"
                    self._findings.append(failed("weights port", line, peer.name))
                else:
                    self._findings.append(ok("weights port", f"its weights come by {found.words}", peer.name))

    def _ring(self, ranked: Sequence[tuple[int, Peer]], held: HeldPort) -> None:
        for place, (rank, peer) in enumerate(ranked):
            is_last = place == len(ranked) - 1
            if is_last and not self._asked.engine.look_ahead:
                return
            next_rank, address = HEAD, held.address
            if not is_last:
                next_rank, address = ranked[place + 1][0], ranked[place + 1][1].address
            found = self._ask_way(peer, address)
            ways = f"node {rank} to node {next_rank}"
            if found.round_trip_s is None or found.bytes_per_s is None:
                what = "sampled tokens go" if is_last else "activations go"
                self._findings.append(
                    failed("first request", f"it would hang: {what} from {ways} at {address}, and that is not reached: "
                                            f"{found.words}; let TCP port {address.port} through there", peer.name)
                )  # fmt: skip
            elif is_last:
                self._findings.append(ok("first request", f"its tokens come back from {ways}: {found.words}"))
            else:
                words = f"{ways}: {found.words}"
                self._findings.append(judge_link(words, found.round_trip_s, found.bytes_per_s, self._need, peer.name))

    def _ask_way(self, peer: Peer, to: TcpAddress) -> Reached:
        question = FindWay(0, [str(to)], self._need.num_bytes)
        answer = self._ask(peer.address, REACH, encode_message(question), _REACH_S)
        try:
            return Reached("it does not say") if answer is None else _REACHED.decode(answer)
        except FrameError:
            return Reached("it says nothing that makes sense")


def parse_peers(given: Sequence[str]) -> list[str]:
    """Names as typed, apart by spaces or commas, each once."""
    return list(dict.fromkeys(name for text in given for name in text.split(",") if name))


