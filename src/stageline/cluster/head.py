"""The head's side of a pipeline over several machines: one listening port, who joined, and the stages they run.

One idea: everything that other machines say arrives at one socket, which the engine's thread alone reads. What a stage
says is handed to the executor; what a node says changes the membership. So no thread waits for another.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import msgspec
import zmq

from stageline.checkpoint.checkpoint import Checkpoint
from stageline.checkpoint.digest import model_digest
from stageline.clock import Clock
from stageline.cluster.handshake import HandshakeError, settings_of, this_software
from stageline.cluster.membership import HEAD, SILENCE_S, Answers, Member, Membership, Wanted
from stageline.cluster.messages import (
    AreYouThere,
    EndStages,
    FindWay,
    FromNode,
    GiveWeights,
    Giving,
    Hello,
    Leaving,
    Refused,
    StageEnded,
    StartStages,
    ToNode,
    WayFound,
)
from stageline.cluster.ports import HeldPort, resolve
from stageline.cluster.ways import find_way, leads_to, own_hosts, step_bytes
from stageline.cluster.weight_port import WeightPort
from stageline.config.cluster_config import ClusterConfig
from stageline.config.engine_config import EngineConfig
from stageline.errors import ConfigError, FrameError, WorkerLost
from stageline.executor.messages import LinkAccess, WorkerConfig
from stageline.executor.remote_stages import Channel
from stageline.links.frames import MessageDecoder, encode_message
from stageline.links.sockets import Links
from stageline.links.tcp_address import TcpAddress
from stageline.pipeline.rank_layout import StageRank

logger = logging.getLogger(__name__)

_IDENTITY_BYTES = 12
_NOTICE_S, _RARELY_S = 10.0, 60.0
"""When who waits for machines says so for the first time, twice as much later again, and so on up to the second."""

_SOON_S = 0.5

_LAST_WORDS_S = 0.3

_NEXT_WAYS_S = 3.0
"""Ways that were lost are looked for again after this time."""

_WAY_S = 30.0
"""A node may take this long to measure the ways to the next one: three seconds, and one or two for each of many."""

_GIVERS_S = 5.0
"""And this long to look for weights that it could give; without them the head gives all."""


class Fleet(Protocol):
    """Who starts the nodes, if that is not a person."""

    @property
    def fd(self) -> int:
        """Readable when there is something to `check`."""
        ...

    def start_nodes(self) -> None:
        """Called once, when the head listens."""
        ...

    def check(self) -> None:
        """Raises: ConfigError if a node cannot be started."""
        ...


class Head:
    """Listens until `close`. Also what the executor sees of other machines' stages (`RemoteStages`).

    Args:
        access: how links are protected.
        fleet: starts the nodes; None leaves that to people.
    Raises: ConfigError if the port cannot be listened on.
    """

    def __init__(
        self,
        config: EngineConfig,
        cluster: ClusterConfig,
        checkpoint: Checkpoint,
        access: LinkAccess,
        clock: Clock,
        fleet: Fleet | None = None,
    ) -> None:
        assert cluster.master_addr is not None
        self._fleet = fleet
        self.access = access
        self._clock = clock
        self._cluster = cluster
        self._num_stages = config.pipeline_parallel_size
        self._address = TcpAddress(resolve(cluster.master_addr, "--master-addr"), cluster.master_port)
        self._links = Links(access.security())
        self.socket = self._links.listener(self._address.url)
        self._step_bytes = step_bytes(checkpoint.spec.hidden_size)
        own_address = resolve(cluster.node_address, "--node-address") if cluster.node_address else self._address.host
        self._port = HeldPort(own_address, cluster.ports)
        self.own_input = self._port.address.url
        wanted = Wanted(
            software=this_software(),
            settings=settings_of(config, cluster),
            model=config.model,
            model_digest=model_digest(checkpoint),
            num_stages=self._num_stages,
            num_nodes=cluster.nnodes,
            own_stages=cluster.stages,
        )
        self._membership = Membership(wanted, time.time() - clock.now_s())
        is_only = cluster.node_address is not None
        self._hosts = own_hosts(own_address, cluster.interface, is_only)
        self._ways: dict[int, str] = {}
        self._awaited_way: tuple[bytes, int] | None = None
        self._way: WayFound | None = None
        self._decoder: MessageDecoder[FromNode] = MessageDecoder(FromNode)
        self._pipeline = 0
        self._shares: dict[int, int] = {}
        self._stages: dict[bytes, int] = {}
        self._identities: dict[StageRank, str] = {}
        self._running: dict[int, Member] = {}
        self._leaving: set[bytes] = set()
        self._loss_due: tuple[float, WorkerLost] | None = None
        self._is_first = True
        self._checkpoint = checkpoint
        self._weights = WeightPort(self._port, cluster.ports, access)
        self._givers: dict[bytes, str] = {}
        self._no_way = ""
        self._next_ways_s = 0.0

    # ---- who takes part ----

    def gather(self) -> None:
        """Wait until every stage has a node. At the first time no longer than `--join-timeout`; later, for ever.

        Raises: ConfigError if nodes are missing by then, or bring other stages than the pipeline has.
        """
        began_s = self._clock.now_s()
        deadline_s = began_s + self._cluster.join_timeout_s if self._is_first else math.inf
        self._say_how_to_join()
        self._membership.is_settled = False
        self._answer(self._membership.ask_all(began_s))
        poller = zmq.Poller()
        poller.register(self.socket, zmq.POLLIN)
        if self._fleet is not None:
            poller.register(self._fleet.fd, zmq.POLLIN)
        patience_s = _NOTICE_S
        # When all were there once, who is missing is known as soon as those that are there have said so.
        notice_s = began_s + (_NOTICE_S if self._is_first else SILENCE_S + _SOON_S)
        while not (
            self._membership.is_complete() and self._are_ways_due() and self._find_ways() and self._find_givers()
        ):
            now_s = self._clock.now_s()
            if now_s >= deadline_s:
                raise ConfigError(self._who_is_missing(now_s - began_s))
            if now_s >= notice_s:
                logger.info("%s", self._who_is_missing(now_s - began_s))
                patience_s = min(2 * patience_s, _RARELY_S)
                notice_s = now_s + patience_s
            until_s = min(deadline_s, notice_s, self._membership.next_deadline_s() or math.inf)
            if self._membership.is_complete():
                until_s = min(until_s, self._next_ways_s)
            ready = dict(poller.poll(math.ceil(max(0.0, until_s - now_s) * 1000)))
            if self._fleet is not None and self._fleet.fd in ready:
                self._fleet.check()
            while self.receive() is not None:
                pass  # a stage of an earlier pipeline
        self._membership.is_settled = True
        self._is_first = False
        places = ", ".join(f"node {rank}: {count}" for rank, count in sorted(self._shares.items()))
        logger.info("all machines are there; stages on %s", places)

    def _say_how_to_join(self) -> None:
        if not self._is_first:
            return
        if self._fleet is not None:
            self._fleet.start_nodes()
            return
        patience = f"for {self._cluster.join_timeout_s:.0f} s (--join-timeout)"
        logger.info("waiting %s for other machines; type on each of them:  %s", patience, self._join_line)

    @property
    def _join_line(self) -> str:
        key = "" if self.access.key is None else " --cluster-key-file FILE"
        key = " --insecure" if self.access.is_insecure else key
        return f"stageline join {self._address}{key}"

    def _who_is_missing(self, waited_s: float) -> str:
        if self._no_way and self._membership.is_complete():
            return f"all machines are there, but not the ways between them, after {waited_s:.0f} s: {self._no_way}"
        num_here = self._membership.num_here + 1
        ranks = self._membership.missing_ranks()
        of = f" of {self._cluster.nnodes}" if self._cluster.nnodes else ""
        missing = f"missing: rank {', '.join(map(str, ranks))}" if ranks else f"not yet {self._num_stages} stages"
        longer = ", or wait longer with --join-timeout" if self._is_first else ""
        return (
            f"{num_here}{of} machines are there after {waited_s:.0f} s, {missing}; type `{self._join_line}` there, and "
            f"see that it reaches this port{longer}"
        )

    # ---- the stages of this pipeline ----

    @property
    def num_local(self) -> int:
        return self._shares[HEAD]

    def _node_of(self, stage_index: int) -> int:
        """The rank of its node: stages lie on the nodes in their order."""
        end = 0
        for rank, count in sorted(self._shares.items()):
            end += count
            if stage_index < end:
                return rank
        raise AssertionError(f"stage {stage_index} of {end}")

    def input_of(self, stage_index: int) -> str:
        return self._ways[self._node_of(stage_index)]

    def _are_ways_due(self) -> bool:
        return self._clock.now_s() >= self._next_ways_s

    def _find_ways(self) -> bool:
        """From each node to the next. Returns: whether all are still there, and have one.

        Raises: HandshakeError if there is none, when the pipeline starts for the first time.
        """
        self._shares = self._membership.shares()
        members = dict(self._membership.members)
        told: list[str] = []
        for sender, receiver in pairwise(sorted(self._shares)):
            hello = members[receiver].hello
            asked = FindWay(receiver, hello.addresses or [hello.address], self._step_bytes)
            found = self._measure(None if sender == HEAD else members[sender].identity, asked)
            if self._membership.members != members:
                return False
            is_known = leads_to(found, (hello.address, *hello.addresses))
            if is_known:
                told.append(f"activations from node {sender} to node {receiver}: {found.words}")
            elif self._is_first:
                error = HandshakeError("links", f"node {sender} cannot reach node {receiver}: {found.words}")
                for joined in self._membership.members.values():
                    self._send(joined.identity, Refused(error.step, error.reason))
                raise error
            else:
                self._look_again_later(f"node {sender} cannot reach node {receiver}: {found.words}")
                return False
            self._ways[receiver] = str(found.url)
        self._no_way = ""
        for line in told:
            logger.info("%s", line)
        return True

    def _look_again_later(self, why: str) -> None:
        now_s = self._clock.now_s()
        if why != self._no_way:
            logger.warning("%s; it is tried again", why)
        self._no_way, self._next_ways_s = why, now_s + _NEXT_WAYS_S
        self._answer(self._membership.ask_all(now_s))

    def _measure(self, identity: bytes | None, asked: FindWay) -> WayFound:
        """Args: identity: of the node that measures; None is this one."""
        if identity is None:
            return find_way(self._hosts, asked, self.access.security())
        self._way = None
        self._awaited_way = (identity, asked.number)
        self._send(identity, asked)
        deadline_s = self._clock.now_s() + _WAY_S
        while self._way is None and (left_s := deadline_s - self._clock.now_s()) > 0:
            if not self._membership.has(identity):
                break
            self.socket.poll(math.ceil(left_s * 1000))
            while self.receive() is not None:
                pass  # a stage of an earlier pipeline
        self._awaited_way = None
        return self._way or WayFound(asked.number, None, f"no answer within {_WAY_S:g} s")

    def machine_of(self, stage_index: int) -> str:
        rank = self._node_of(stage_index)
        return "" if rank == HEAD else f"node {rank}"

    def describe_machine(self, stage_index: int) -> str:
        rank = self._node_of(stage_index)
        first = self._first_stage_of(rank)
        last = first + self._shares[rank] - 1
        stages = f"stage {first}" if first == last else f"stages {first} to {last}"
        if rank == HEAD:
            return f"the head ({self._address}; {stages})"
        member = self._running.get(rank) or self._membership.members.get(rank)
        where = f"{member.hello.host_name}, {member.hello.address}; " if member is not None else ""
        return f"node {rank} ({where}{stages})"

    def is_machine_connected(self, stage_index: int) -> bool:
        member = self._running.get(self._node_of(stage_index))
        # A question of nobody's, whose answer changes nothing; ZeroMQ knows at once if there is nobody to take it.
        return member is None or self._send(member.identity, AreYouThere(0))

    def due_s(self) -> float | None:
        times_s = (None if self._loss_due is None else self._loss_due[0], self._membership.next_deadline_s())
        return min((time_s for time_s in times_s if time_s is not None), default=None)

    def start(self, configs: Sequence[WorkerConfig]) -> None:
        self._pipeline += 1
        self._stages.clear()
        self._running = dict(self._membership.members)
        self._leaving.clear()
        by_node: dict[int, list[WorkerConfig]] = {}
        for config in configs:
            name = secrets.token_hex(_IDENTITY_BYTES)
            self._identities[StageRank(config.stage_index, config.rank)] = name
            for thread in ("control", "ping"):
                self._stages[f"{name}.{thread}".encode()] = config.stage_index
            by_node.setdefault(self._node_of(config.stage_index), []).append(
                msgspec.structs.replace(config, caller_name=name)
            )
        for rank, its_configs in by_node.items():
            identity = self._running[rank].identity
            self._send(identity, StartStages(self._pipeline, its_configs, self._givers_for(identity)))

    def control(self, place: StageRank) -> Channel:
        return _RankChannel(self, place, "control")

    def responder(self, place: StageRank) -> Channel:
        return _RankChannel(self, place, "ping")

    def send_to_rank(self, place: StageRank, thread: str, frame: bytes) -> None:
        self._send_frame(f"{self._identities[place]}.{thread}".encode(), frame)

    def receive(self) -> bytes | None:
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                # Only now: who was slow may be this machine, and the answers lay there.
                self._answer(self._membership.forget_silent(self._clock.now_s()))
                self._check_members()
                self._raise_if_due()
                return None
            if len(frames) != 2:
                logger.warning("a message in %d parts was dropped", len(frames))
                continue
            identity, frame = frames
            if identity in self._stages:
                return frame
            self._hear(identity, frame)

    def _raise_if_due(self) -> None:
        if self._loss_due is not None and self._clock.now_s() >= self._loss_due[0]:
            loss, self._loss_due = self._loss_due[1], None
            raise loss

    def _hear(self, identity: bytes, frame: bytes) -> None:
        """Raises: WorkerLost if a stage of this pipeline ended, or its node is another one now."""
        try:
            message = self._decoder.decode(frame)
        except FrameError as error:
            logger.debug("dropped: %s", error)
            return
        if isinstance(message, Hello) and message.wants_weights:
            self._serve_weights()
        now_s = self._clock.now_s()
        self._membership.wall_s = time.time() - now_s
        self._answer(self._membership.take(identity, message, now_s))
        if isinstance(message, WayFound) and (identity, message.number) == self._awaited_way:
            self._way = message
        if isinstance(message, Giving):
            self._givers[identity] = message.address
        if isinstance(message, Leaving):
            self._leaving.add(identity)
        is_ours = any(member.identity == identity for member in self._running.values())
        if isinstance(message, StageEnded) and is_ours and message.pipeline == self._pipeline:
            loss = WorkerLost(message.stage_index, f"{self.describe_machine(message.stage_index)}: {message.how}")
            # Its own last words, which say more, come by another connection.
            self._loss_due = self._loss_due or (self._clock.now_s() + _LAST_WORDS_S, loss)
        self._check_members()

    def _check_members(self) -> None:
        """Raises: WorkerLost if a node of this pipeline is gone, or is another one now."""
        for rank, known in self._running.items():
            member = self._membership.members.get(rank)
            if member is not None and member.identity == known.identity:
                continue
            stage_index = self._first_stage_of(rank)
            how = self._what_became_of(known, member)
            raise WorkerLost(stage_index, f"{self.describe_machine(stage_index)}: {how}")

    def _what_became_of(self, known: Member, now: Member | None) -> str:
        """Args: now: whoever has its rank; None if nobody has."""
        if known.identity in self._leaving:
            return "it was stopped"
        if now is None:
            return f"it did not say within {SILENCE_S:g} s that it is there"
        if now.hello.node_id == known.hello.node_id:
            return "it lost its connection and is back"
        return f"it did not say within {SILENCE_S:g} s that it is there, and {now} took its place"

    def _serve_weights(self) -> None:
        """For nodes that have none; from a port of its own, as soon as the first one asks."""
        if self._membership.weights_address:
            return
        try:
            server = self._weights.serve(self._checkpoint)
        except ConfigError as error:
            logger.warning("weights cannot be sent to nodes: %s", error)
            return
        self._membership.weights_address = str(server.address)
        logger.info("nodes without the model get their stages' weights from %s", server.address)

    def _find_givers(self) -> bool:
        """Which nodes have weights for those that have none, besides this one. Returns: whether all are still there."""
        self._givers = {}
        members = dict(self._membership.members)
        wanting = [member for member in members.values() if member.hello.wants_weights]
        asked = [one for one in members.values() if any(other is not one for other in wanting)]
        for member in asked:
            self._send(member.identity, GiveWeights())
        deadline_s = self._clock.now_s() + _GIVERS_S
        while len(self._givers) < len(asked) and (left_s := deadline_s - self._clock.now_s()) > 0:
            self.socket.poll(math.ceil(left_s * 1000))
            while self.receive() is not None:
                pass  # a stage of an earlier pipeline
        giving = [str(member) for member in asked if self._givers.get(member.identity)]
        if giving:
            logger.info("weights are also given by %s", ", ".join(giving))
        return self._membership.members == members

    def _givers_for(self, identity: bytes) -> list[str]:
        return [address for giver, address in self._givers.items() if address and giver != identity]

    def _first_stage_of(self, rank: int) -> int:
        return sum(count for other, count in self._shares.items() if other < rank)

    def end(self, patience_s: float) -> None:
        running, self._running = self._running, {}
        self._loss_due = None
        self._stages.clear()
        for member in running.values():
            self._send(member.identity, EndStages(patience_s))

    def close(self) -> None:
        self.end(0.0)
        self._links.close(linger_s=0.5)
        self._port.close()
        self._weights.close()

    # ---- what goes out ----

    def _answer(self, answers: Answers) -> None:
        for identity, message in answers:
            self._send(identity, message)

    def _send(self, identity: bytes, message: ToNode) -> bool:
        return self._send_frame(identity, encode_message(message))

    def _send_frame(self, identity: bytes, frame: bytes) -> bool:
        """Returns: whether there is somebody of that name. If not, it is missed by what does not come back."""
        try:
            self.socket.send_multipart([identity, frame], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            return error.errno != zmq.EHOSTUNREACH
        return True


class _RankChannel:
    """See `stageline.executor.remote_stages.Channel`."""

    def __init__(self, head: Head, place: StageRank, thread: str) -> None:
        self._head = head
        self._place = place
        self._thread = thread

    def send(self, frame: bytes, /) -> None:
        self._head.send_to_rank(self._place, self._thread, frame)
