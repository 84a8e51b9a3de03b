"""What the engine's process, the process that talks to Ray, and the nodes that this one starts say to each other.

One idea: Ray carries bytes that are ours. Orders and ends are encoded here, as on any socket of this project, so
nothing of ours depends on how Ray writes objects.
"""

from __future__ import annotations

import msgspec

from stageline.executor.messages import LinkAccess

# ---- from the engine's process to the one that talks to Ray ----


class PlaceStages(msgspec.Struct, frozen=True, kw_only=True, tag="place_stages"):
    """The first message, its configuration.

    Args:
        num_ranks: how many processes share a stage, at most; they are on one machine.
        num_cpus: CPUs of all ranks of a stage, as Ray counts them.
        num_gpus: GPUs of all ranks of a stage.
        is_gpu_optional: do without where no node of the cluster has any.
        patience_s: how long to wait for room that others use.
    """

    num_stages: int
    num_ranks: int = 1
    num_cpus: int
    num_gpus: int
    is_gpu_optional: bool
    patience_s: float
    log_level: str


class NodeOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What a node shall be: see `stageline.cluster.node.NodeSettings`.

    Args:
        first_port, last_port: those that activations may arrive at.
    """

    head: str
    port: int
    first_port: int
    last_port: int
    access: LinkAccess
    join_timeout_s: float
    rank: int
    num_stages: int
    model_source: str
    interface: str | None
    binds_cores: bool
    log_level: str


class StartNodes(msgspec.Struct, frozen=True, tag="start_nodes"):
    """Start these where they were placed: one order per node of `Placed`, in order."""

    orders: list[NodeOrder]


# ---- from the process that talks to Ray ----


class Reached(msgspec.Struct, frozen=True, tag="reached"):
    """Ray answers."""


class PlacedNode(msgspec.Struct, frozen=True):
    """Another machine of Ray's, by its address there."""

    address: str
    num_stages: int


class Placed(msgspec.Struct, frozen=True, tag="placed"):
    """Every stage has its room.

    Args:
        own_address: of this machine, as Ray knows it.
        own_stages: how many of the first stages run here.
        own_gpus: which of this machine's GPUs Ray keeps for them; empty if none.
        nodes: the others, in the order of the stages.
    """

    own_address: str
    own_stages: int
    own_gpus: list[str]
    nodes: list[PlacedNode]


class NodeFailed(msgspec.Struct, frozen=True, tag="node_failed"):
    """A node cannot take part, and is not started again."""

    rank: int
    reason: str


class RayFailed(msgspec.Struct, frozen=True, tag="ray_failed"):
    """There is no placement: Ray is not reached, or has no room. The last message."""

    reason: str


FromRay = Reached | Placed | NodeFailed | RayFailed

# ---- from a node that Ray started ----


class NodeEnd(msgspec.Struct, frozen=True):
    """How a node's process ended.

    Args:
        refusal: why it cannot take part; empty if it ended in another way.
    """

    how: str
    refusal: str = ""
