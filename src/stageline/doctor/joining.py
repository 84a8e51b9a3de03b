"""Whether the machines that were asked could join: the head's own membership, played through with what they said.

One idea: nothing is judged here. The state that a head keeps of its nodes hears their hellos, and what it refuses is
what it would refuse.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from stageline.cluster.handshake import HandshakeError
from stageline.cluster.membership import Membership, Wanted
from stageline.cluster.messages import AreYouThere, Declined, Hello, Here, Offer, Ready, Refused
from stageline.doctor.finding import Finding, failed, ok


@dataclass(frozen=True)
class Guest:
    """A machine that would join.

    Args:
        name: as the operator named it.
        ask_model: what it answers to an offer; None if it says nothing.
    """

    name: str
    hello: Hello
    ask_model: Callable[[Offer], Ready | Declined | None]


@dataclass
class Joining:
    """Attributes:
    ranks: of those who could, by name.
    shares: by rank, how many stages each machine would run; empty if they are not all there.
    """

    findings: list[Finding] = field(default_factory=list)
    ranks: dict[str, int] = field(default_factory=dict)
    shares: Mapping[int, int] = field(default_factory=dict)


def play_joining(wanted: Wanted, guests: Sequence[Guest]) -> Joining:
    """Let all of them join, one after the other."""
    now_s = time.monotonic()
    membership = Membership(wanted, time.time() - now_s)
    refused: dict[str, str] = {}
    by_name = {guest.name: guest for guest in guests}
    try:
        for guest in guests:
            _let_in(membership, guest, by_name, refused, now_s)
        result = Joining([], {}, membership.shares() if membership.is_complete() else {})
    except HandshakeError as error:
        return Joining([failed(error.step, error.reason)])
    for member in membership.members.values():
        if member.is_ready:
            result.ranks[member.identity.decode()] = member.rank
    for guest in guests:
        if (why := refused.get(guest.name)) is not None:
            result.findings.append(failed("join", why, guest.name))
        elif guest.name in result.ranks:
            software = guest.hello.software
            line = f"would be node {result.ranks[guest.name]}; stageline {software.stageline}, torch {software.torch}"
            result.findings.append(ok("join", line, guest.name))
    result.findings.append(_who_is_there(membership, wanted, result))
    return result


def _let_in(
    membership: Membership, guest: Guest, by_name: Mapping[str, Guest], refused: dict[str, str], now_s: float
) -> None:
    answers = membership.take(guest.name.encode(), guest.hello, now_s)
    while answers:
        (identity, message), *answers = answers
        name = identity.decode()
        match message:
            case AreYouThere():
                answers += membership.take(identity, Here(message.question, time.time()), now_s)
            case Offer():
                answer = by_name[name].ask_model(message)
                if isinstance(answer, Declined):
                    refused[name] = f"step `{answer.step}`: {answer.reason}"
                if answer is not None:
                    answers += membership.take(identity, answer, now_s)
            case Refused():
                refused[name] = f"step `{message.step}`: {message.reason}"


def _who_is_there(membership: Membership, wanted: Wanted, result: Joining) -> Finding:
    num_here = len(result.ranks) + 1
    if membership.is_complete():
        stages = ", ".join(f"node {rank}: {count}" for rank, count in sorted(result.shares.items()))
        return ok("machines", f"{num_here} machines, with stages on {stages}")
    of = "" if wanted.num_nodes is None else f" of --nnodes {wanted.num_nodes}"
    ranks = membership.missing_ranks()
    missing = f"rank {', '.join(map(str, ranks))} missing" if ranks else f"not yet {wanted.num_stages} stages"
    return failed(
        "machines", f"{num_here}{of} machines could take part, {missing}; name the others with --peers, give --stages "
        "on some of them, or change --nnodes",
    )  # fmt: skip
