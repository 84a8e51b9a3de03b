"""What the head and a node's agent say to each other over the head's one port. Plain data: no code, no path.

One idea: a node that is let in does as it is told. It says what it has, the head says what is wanted, and who finds
that it does not fit says which step failed, with both values.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from stageline.executor.messages import WorkerConfig

MOST_PATIENCE_S = 10.0

PROTOCOL = 6
"""Grows when these messages, those of stages, or the frames of activations change."""


class Software(msgspec.Struct, frozen=True, array_like=True):
    """What has to be the same on every machine."""

    protocol: int
    stageline: str
    torch: str


# ---- from a node ----


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """The first word of a node, each time it connects.

    Args:
        node_id: of this run of the agent: the same when a connection comes back.
        rank: as asked for; None takes the next that is free.
        num_stages: as asked for; None takes an equal share.
        address: where the stage before reaches this node's first stage: host and port.
        addresses: where else that would be possible; it answers probes there until its stages start.
        settings: flags that were given on the node and must be the head's, with their values.
        wants_weights: it has no model, and gets what it needs from the head.
    """

    software: Software
    node_id: str
    host_name: str
    rank: int | None
    num_stages: int | None
    address: str
    settings: dict[str, str]
    addresses: list[str] = []
    wants_weights: bool = False


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The node has the model that was offered."""

    model_digest: str


class Declined(msgspec.Struct, frozen=True, tag="declined"):
    """The node cannot take part, and leaves."""

    step: str
    reason: str


class StageEnded(msgspec.Struct, frozen=True, tag="stage_ended"):
    """A stage's process, one of its ranks, ended unasked. `pipeline` is that of its `StartStages`."""

    pipeline: int
    stage_index: int
    how: str


class Here(msgspec.Struct, frozen=True, tag="here"):
    """The answer to `AreYouThere`, at once.

    Args:
        wall_s: the node's time of day, in seconds since 1970.
    """

    question: int
    wall_s: float


class Leaving(msgspec.Struct, frozen=True, tag="leaving"):
    """The node was told to stop, and ends its stages."""


class WayFound(msgspec.Struct, frozen=True, tag="way_found"):
    """The answer to `FindWay`.

    Args:
        url: where its last stage shall send, as `stageline.links.tcp_address.tcp_url` writes it; None if there is none.
        words: how good it is, or why there is none.
    """

    number: int
    url: str | None
    words: str


class Giving(msgspec.Struct, frozen=True, tag="giving"):
    """The answer to `GiveWeights`.

    Args:
        address: where; empty if it gives none.
    """

    address: str


FromNode = Hello | Ready | Declined | StageEnded | Here | Leaving | WayFound | Giving

# ---- to a node ----


class Offer(msgspec.Struct, frozen=True, kw_only=True, tag="offer"):
    """What the pipeline runs. The answer is `Ready` or `Declined`.

    Args:
        model: as typed on the head; the node may have it elsewhere.
        weights_address: where a node that asked for it gets the weights; empty if there is no such place.
    """

    model: str
    model_digest: str
    weights_address: str = ""


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The node cannot take part."""

    step: str
    reason: str


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The node takes part, with this rank."""

    rank: int


class StartStages(msgspec.Struct, frozen=True, tag="start_stages"):
    """Start these stages, which follow one another, each with all its ranks; an earlier pipeline's have been ended.

    Args:
        pipeline: counts up with every start.
        configs: without what only the node knows: the model's path, cores, addresses on this node, the head's address.
        weight_givers: for a node without the model: which other ones have some of its weights.
    """

    pipeline: int
    configs: list[WorkerConfig]
    weight_givers: list[str] = []


class FindWay(msgspec.Struct, frozen=True, tag="find_way"):
    """Measure the ways to the next node.

    Args:
        number: of this question.
        addresses: where that one answers probes.
        step_bytes: what a typical step sends.
    """

    number: int
    addresses: list[str]
    step_bytes: int


class GiveWeights(msgspec.Struct, frozen=True, tag="give_weights"):
    """Give other nodes what is here of the model; the answer is `Giving`. Whether it is right, they find out."""


class EndStages(msgspec.Struct, frozen=True, tag="end_stages"):
    """End the stages' processes, those at once that have not left after `patience_s`.

    Args:
        patience_s: the node hears nothing meanwhile.
    """

    patience_s: Annotated[float, msgspec.Meta(ge=0, le=MOST_PATIENCE_S)]


class AreYouThere(msgspec.Struct, frozen=True, tag="are_you_there"):
    question: int


class SayHello(msgspec.Struct, frozen=True, tag="say_hello"):
    """The head does not know the node any more: it was silent for too long. Its stages are to be ended."""


ToNode = Offer | Refused | Welcome | FindWay | GiveWeights | StartStages | EndStages | AreYouThere | SayHello
