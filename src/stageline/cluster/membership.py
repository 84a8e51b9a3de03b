"""Who takes part in the head's pipeline: nodes that ask to, their ranks and shares of the stages, who is gone again.

One idea: a state that messages change and that answers with messages; it knows no socket and no process, only the time
it is told. A rank belongs to one node. Whoever claims it meanwhile waits until that one was asked whether it is there:
if it is, the claim is refused, and if it is not, the newcomer takes its place.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from stageline.cluster.handshake import HandshakeError, check_settings, check_software, share_stages
from stageline.cluster.messages import (
    AreYouThere,
    Declined,
    FromNode,
    Hello,
    Here,
    Leaving,
    Offer,
    Ready,
    Refused,
    SayHello,
    Software,
    StageEnded,
    ToNode,
    Welcome,
)
from stageline.errors import ConfigError
from stageline.links.tcp_address import TcpAddress

logger = logging.getLogger(__name__)

SILENCE_S = 3.0
"""A node that was asked whether it is there has this long to say so."""

_MOST_NODES = 1024
_CLOCK_NOTICE_S = 1.0
_MOST_OF_A_NAME = 64

HEAD = 0
"""The head's own rank."""


@dataclass(frozen=True)
class Wanted:
    """What the pipeline is, for those who want to take part.

    Args:
        num_nodes: None takes as many as bring all stages, one each unless they say otherwise.
        own_stages: the head's own; None is an equal share.
    """

    software: Software
    settings: Mapping[str, str]
    model: str
    model_digest: str
    num_stages: int
    num_nodes: int | None
    own_stages: int | None


@dataclass(frozen=True)
class ClockReading:
    """Args:
    offset_s: how far a node's time of day is ahead of the head's.
    round_trip_s: within which that was measured; it is wrong by at most half of it.
    """

    offset_s: float
    round_trip_s: float


@dataclass
class Member:
    """A node that was let in, or that is just being asked about its model.

    Attributes:
        asked_s: since when it owes an answer to `AreYouThere`; None if it owes none.
        clock: the best reading of its clock.
    """

    identity: bytes
    hello: Hello
    rank: int
    is_ready: bool = False
    asked_s: float | None = None
    clock: ClockReading | None = None

    def __str__(self) -> str:
        return f"node {self.rank} ({self.hello.host_name}, {self.hello.address})"


Answers = list[tuple[bytes, ToNode]]
"""Messages, and whom each goes to."""


class Membership:
    """Args:
    wanted: what every node has to fit.
    wall_s: the time of day, in seconds since 1970, at the time 0 of all other times given here; to be kept right, for
        the time of day may be set.
    """

    def __init__(self, wanted: Wanted, wall_s: float) -> None:
        self._wanted = wanted
        self.wall_s = wall_s
        self._members: dict[int, Member] = {}
        self._claims: list[tuple[bytes, Hello]] = []
        self._next_question = 0
        self.weights_address = ""
        """Where nodes without weights get them; see `Offer`."""
        self.is_settled = False
        """Stages run on the nodes, so every one keeps its rank."""

    # ---- what there is ----

    @property
    def members(self) -> dict[int, Member]:
        """By rank; the head is not among them."""
        return self._members

    def has(self, identity: bytes) -> bool:
        """Whether this connection is a member's."""
        return self._of(identity) is not None

    def missing_ranks(self) -> list[int]:
        """Of nodes that have not joined, as far as their number is known."""
        num_nodes = self._wanted.num_nodes or 1
        return [rank for rank in range(1, num_nodes) if not self._is_here(rank)]

    @property
    def num_here(self) -> int:
        """Of nodes that are ready, and owe no answer."""
        return sum(self._is_here(rank) for rank in self._members)

    def is_complete(self) -> bool:
        """Every stage has a node that is ready, and none owes an answer."""
        if any(not self._is_here(rank) for rank in self._members):
            return False
        if self._wanted.num_nodes is not None:
            return len(self._members) == self._wanted.num_nodes - 1
        return sum(count or 1 for count in self._counts().values()) == self._wanted.num_stages

    def shares(self) -> dict[int, int]:
        """How many stages each node runs, by rank, the head's included. Raises: HandshakeError if that cannot be."""
        return share_stages(self._counts(), self._wanted.num_stages)

    def _is_here(self, rank: int) -> bool:
        member = self._members.get(rank)
        return member is not None and member.is_ready and member.asked_s is None

    def _counts(self) -> dict[int, int | None]:
        asked = {HEAD: self._wanted.own_stages}
        asked |= {rank: member.hello.num_stages for rank, member in self._members.items()}
        if self._wanted.num_nodes is None:
            return {rank: count or 1 for rank, count in asked.items()}
        return asked

    # ---- what happens ----

    def take(self, identity: bytes, message: FromNode, now_s: float) -> Answers:
        """What it changes, and what is to be answered."""
        match message:
            case Hello():
                return self._hello(identity, _in_one_line(message), now_s)
            case Ready():
                return self._ready(identity, message)
            case Declined():
                if (member := self._of(identity)) is not None:
                    logger.warning("%s cannot take part, step `%s`: %s", member, message.step, message.reason)
                    return self._drop(member, now_s)
            case Leaving():
                if (member := self._of(identity)) is not None:
                    logger.info("%s leaves", member)
                    return self._drop(member, now_s)
            case Here():
                return self._is_there(identity, message, now_s)
            case StageEnded():
                return [] if self._of(identity) is not None else [(identity, SayHello())]
        return []

    def ask_all(self, now_s: float) -> Answers:
        """Ask every member whether it is there; until it says so, or is taken for gone, nothing is complete."""
        return [self._ask(member, now_s) for member in self._members.values() if member.is_ready]

    def next_deadline_s(self) -> float | None:
        """When `forget_silent` is due."""
        asked = [member.asked_s for member in self._members.values() if member.asked_s is not None]
        return min(asked) + SILENCE_S if asked else None

    def forget_silent(self, now_s: float) -> Answers:
        """Take those for gone that did not say in time that they are there; claims to their ranks are heard then."""
        gone = [one for one in self._members.values() if one.asked_s is not None and now_s - one.asked_s >= SILENCE_S]
        answers: Answers = []
        for member in gone:
            logger.warning("%s is gone: it does not answer", member)
            answers += self._drop(member, now_s)
        return answers

    def _drop(self, member: Member, now_s: float) -> Answers:
        """Its rank is free: who claimed it meanwhile is heard."""
        del self._members[member.rank]
        claims = [*self._take_claims(member.rank), *self._take_claims(None)]
        return [answer for claim in claims for answer in self._hello(*claim, now_s)]

    def _take_claims(self, rank: int | None) -> list[tuple[bytes, Hello]]:
        """Those to this rank; None for those to any."""
        taken = [claim for claim in self._claims if claim[1].rank == rank]
        self._claims = [claim for claim in self._claims if claim[1].rank != rank]
        return taken

    def _hello(self, identity: bytes, hello: Hello, now_s: float) -> Answers:
        try:
            _check_address(hello)
            check_software(hello.software, self._wanted.software)
            check_settings(hello.settings, self._wanted.settings)
            rank = self._rank_for(hello)
            if rank is None:
                # All are taken, but perhaps by somebody who is gone.
                self._claims.append((identity, hello))
                return [self._ask(member, now_s) for member in self._members.values()]
            holder = self._members.get(rank)
            moved: Answers = []
            if holder is not None and holder.hello.node_id != hello.node_id:
                if not self._can_move(holder):
                    self._claims.append((identity, hello))
                    return [self._ask(holder, now_s)]
                moved = self._move(holder)
            self._check_stages(rank, hello)
        except HandshakeError as error:
            return [self._refusal(identity, f"{hello.host_name} ({hello.address})", error)]
        self._members[rank] = Member(identity, hello, rank)
        offer = Offer(
            model=self._wanted.model,
            model_digest=self._wanted.model_digest,
            weights_address=self.weights_address if hello.wants_weights else "",
        )
        # The question first: it is answered at once, the offer when the node has looked at its model.
        return [*moved, self._ask(self._members[rank], now_s), (identity, offer)]

    def _can_move(self, holder: Member) -> bool:
        """It did not ask for the rank it has, nothing runs on it, and there is another one."""
        return holder.hello.rank is None and not self.is_settled and bool(self._free_ranks())

    def _move(self, holder: Member) -> Answers:
        del self._members[holder.rank]
        holder.rank = self._free_ranks(but=holder.rank)[0]
        self._members[holder.rank] = holder
        return [(holder.identity, Welcome(holder.rank))] if holder.is_ready else []

    def _free_ranks(self, but: int = HEAD) -> list[int]:
        num_nodes = self._wanted.num_nodes or _MOST_NODES
        return [rank for rank in range(1, num_nodes) if rank not in self._members and rank != but]

    def _rank_for(self, hello: Hello) -> int | None:
        """None if it may have any, and all are taken. Raises: HandshakeError if it asks for one that there is not."""
        num_nodes = self._wanted.num_nodes or _MOST_NODES
        for rank, member in self._members.items():
            if member.hello.node_id == hello.node_id:
                return rank
        if hello.rank is None:
            return next(iter(self._free_ranks()), None)
        if not 0 < hello.rank < num_nodes:
            raise HandshakeError(
                "rank", f"--node-rank is {hello.rank} on the node, and the head has --nnodes {num_nodes}: ranks of "
                f"other nodes are 1 to {num_nodes - 1}",
            )  # fmt: skip
        return hello.rank

    def _check_stages(self, rank: int, hello: Hello) -> None:
        """Nodes that are still to come bring at least one stage each. Raises: HandshakeError."""
        if hello.num_stages is not None and hello.num_stages < 1:
            raise HandshakeError("stages", f"--stages is {hello.num_stages} on the node; it must be at least 1")
        counts = self._counts() | {rank: hello.num_stages}
        if self._wanted.num_nodes is not None:
            share_stages({rank: counts.get(rank) for rank in range(self._wanted.num_nodes)}, self._wanted.num_stages)
        elif sum(count or 1 for count in counts.values()) > self._wanted.num_stages:
            share_stages({rank: count or 1 for rank, count in counts.items()}, self._wanted.num_stages)

    def _ready(self, identity: bytes, message: Ready) -> Answers:
        member = self._of(identity)
        if member is None:
            return []
        if message.model_digest != self._wanted.model_digest:
            error = HandshakeError("model", "the node's model is not the head's")
            del self._members[member.rank]
            return [self._refusal(identity, str(member), error)]
        member.is_ready = True
        self._log_joined(member)
        return [(identity, Welcome(member.rank))]

    def _log_joined(self, member: Member) -> None:
        clock = member.clock
        if clock is None:
            logger.info("%s joined", member)
            return
        trip_ms = clock.round_trip_s * 1000
        logger.info("%s joined; round trip %.1f ms, clock %+.3f s from the head's", member, trip_ms, clock.offset_s)
        if abs(clock.offset_s) > _CLOCK_NOTICE_S + clock.round_trip_s:
            logger.warning("the clock of %s is wrong, or the head's is: their logs will not fit together", member)

    def _is_there(self, identity: bytes, message: Here, now_s: float) -> Answers:
        member = self._of(identity)
        if member is None:
            return [(identity, SayHello())]
        if member.asked_s is None:
            return []
        round_trip_s = now_s - member.asked_s
        reading = ClockReading(message.wall_s - (self.wall_s + now_s - round_trip_s / 2), round_trip_s)
        if member.clock is None or reading.round_trip_s < member.clock.round_trip_s:
            member.clock = reading
        member.asked_s = None
        taken = f"--node-rank {member.rank} is taken by {member}; give every node its own"
        answers = [self._refuse_claim(claim, taken) for claim in self._take_claims(member.rank)]
        if all(one.asked_s is None for one in self._members.values()):
            full = f"all of --nnodes {self._wanted.num_nodes} are there; start the head with a larger one"
            answers += [self._refuse_claim(claim, full) for claim in self._take_claims(None)]
        return answers

    def _refuse_claim(self, claim: tuple[bytes, Hello], reason: str) -> tuple[bytes, ToNode]:
        identity, hello = claim
        return self._refusal(identity, f"{hello.host_name} ({hello.address})", HandshakeError("rank", reason))

    def _ask(self, member: Member, now_s: float) -> tuple[bytes, ToNode]:
        if member.asked_s is None:
            member.asked_s = now_s
        self._next_question += 1
        return member.identity, AreYouThere(self._next_question)

    def _refusal(self, identity: bytes, who: str, error: HandshakeError) -> tuple[bytes, ToNode]:
        logger.warning("%s was refused at the step `%s`: %s", who, error.step, error.reason)
        return identity, Refused(error.step, error.reason)

    def _of(self, identity: bytes) -> Member | None:
        return next((member for member in self._members.values() if member.identity == identity), None)


def _in_one_line(hello: Hello) -> Hello:
    """Its name goes into the log, whatever it calls itself."""
    name = "".join(letter if letter.isprintable() else "?" for letter in hello.host_name[:_MOST_OF_A_NAME])
    return replace(hello, host_name=name)


def _check_address(hello: Hello) -> None:
    """Raises: HandshakeError."""
    try:
        TcpAddress.parse(hello.address)
    except ConfigError as error:
        raise HandshakeError("connection", f"the node does not say where it is reached: {error}") from None
