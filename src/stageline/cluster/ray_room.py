"""What Ray has, what the stages need, and which stages go together: the arithmetic of a placement, without Ray.

One idea: whoever is refused is shown what Ray sees, node by node, for that is what has to be changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stageline.errors import ConfigError


@dataclass(frozen=True)
class Bundle:
    """What one stage reserves, as Ray counts it; Ray has it on one machine, or not at all.

    Args:
        num_ranks: how many processes share it.
    """

    num_cpus: int
    num_gpus: int
    num_ranks: int = 1

    def __str__(self) -> str:
        amount = _amount(self.num_cpus, self.num_gpus)
        return amount if self.num_ranks == 1 else f"{amount} on one machine (-tp {self.num_ranks})"

    @property
    def way_out(self) -> str:
        """What would need less room at one place, with what joins it to other ways."""
        return "" if self.num_ranks == 1 else ", or a smaller -tp"

    def resources(self) -> dict[str, float]:
        """As Ray names them; what is not needed is left out."""
        return {name: float(num) for name, num in (("CPU", self.num_cpus), ("GPU", self.num_gpus)) if num}


@dataclass(frozen=True)
class RayNode:
    """A machine as Ray sees it. `num_cpus` and `num_gpus` are all it has, whoever uses them."""

    node_id: str
    address: str
    num_cpus: float
    num_gpus: float

    def room_for(self, bundle: Bundle) -> int:
        """How many such bundles would fit if nothing else ran there."""
        rooms = []
        if bundle.num_cpus:
            rooms.append(self.num_cpus // bundle.num_cpus)
        if bundle.num_gpus:
            rooms.append(self.num_gpus // bundle.num_gpus)
        return int(min(rooms))


def describe(nodes: Sequence[RayNode], own_id: str, free: Mapping[str, float]) -> str:
    """Ray's view in one line. Args: free: of all nodes together, by Ray's names of resources."""
    words = [
        f"{node.address}{' (this machine)' if node.node_id == own_id else ''}: {_amount(node.num_cpus, node.num_gpus)}"
        for node in nodes
    ]
    now = _amount(free.get("CPU", 0.0), free.get("GPU", 0.0))
    return f"Ray has {len(nodes)} {'node' if len(nodes) == 1 else 'nodes'} ({'; '.join(words)}), free now: {now}"


def check_room(nodes: Sequence[RayNode], own_id: str, bundle: Bundle, num_stages: int, view: str) -> None:
    """Refuse what could not be placed even if nothing else ran.

    Args:
        view: Ray's, as `describe` tells it.
    Raises: ConfigError.
    """
    own = next((node for node in nodes if node.node_id == own_id), None)
    if own is None or not own.room_for(bundle):
        raise ConfigError(
            f"the first stage runs on this machine and needs {bundle}, and Ray has not as much here. {view}; run this "
            f"on a node of Ray's that has, or give `ray start` there a larger --num-cpus or --num-gpus{bundle.way_out}"
        )
    if (room := sum(node.room_for(bundle) for node in nodes)) < num_stages:
        raise ConfigError(
            f"--pipeline-parallel-size {num_stages} needs {num_stages} times {bundle}, and Ray has room for {room}. "
            f"{view}; add nodes with `ray start --address`, or give at most -pp {room}{bundle.way_out}"
        )


def no_room_words(bundle: Bundle, num_stages: int, waited_s: float, view: str) -> str:
    """When others use what would be enough."""
    return (
        f"Ray has had no room for {num_stages} times {bundle} for {waited_s:.0f} s. {view}; end what uses the rest "
        "(`ray status` and `ray list actors` show it), or wait longer with --join-timeout"
    )


def stages_by_node(bundle_nodes: Sequence[str], own_id: str) -> dict[str, list[int]]:
    """Bundles of each node, this machine's first: as the stages lie in a row, each node has neighbours.

    Args:
        bundle_nodes: the node's id of each bundle.
    """
    grouped: dict[str, list[int]] = {own_id: []}
    for bundle, node_id in enumerate(bundle_nodes):
        grouped.setdefault(node_id, []).append(bundle)
    return grouped


def _amount(num_cpus: float, num_gpus: float) -> str:
    cpus = f"{num_cpus:g} {'CPU' if num_cpus == 1 else 'CPUs'}"
    return f"{cpus}, {num_gpus:g} {'GPU' if num_gpus == 1 else 'GPUs'}" if num_gpus else cpus
