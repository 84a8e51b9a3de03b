"""The process that talks to Ray: `python -m stageline.cluster.ray_process FD`, started by the engine's process.

One idea: it is the only one that knows Ray. It reserves a bundle for every stage, says where they are, starts a node's
agent on each other machine, and starts it again when it is lost. It waits in one place, a queue, for its owner's words
and for the ends of agents alike. Whatever Ray placed is gone when this process is.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from stageline.cluster.ray_agent import Agent, room
from stageline.cluster.ray_messages import (
    FromRay,
    NodeEnd,
    NodeFailed,
    NodeOrder,
    Placed,
    PlacedNode,
    PlaceStages,
    RayFailed,
    Reached,
    StartNodes,
)
from stageline.cluster.ray_room import Bundle, RayNode, check_room, describe, no_room_words, stages_by_node
from stageline.config import environment
from stageline.errors import ConfigError
from stageline.links.child_process import read_message, write_message
from stageline.log import open_standard_streams, set_up_logging

logger = logging.getLogger("stageline.cluster.ray_process")

_NOTICE_S = 10.0
_GOODBYE_S = 4.0
"""Ray may be in no state to say goodbye."""

_SOON_S = 5.0
"""An agent that ended sooner than this is not started again at once."""

_CONNECT_S = 3.0
_WAY_OUT = (
    "Start one with `ray start --head`, join this machine to one with `ray start --address`, or set RAY_ADDRESS"
)

_NODE_LABEL = "ray.io/node-id"


@dataclass(frozen=True)
class _Ended:
    """An agent's end: what it said, or that Ray lost its actor."""

    rank: int
    end: NodeEnd


_Event = StartNodes | _Ended | None
"""None: the owner is gone."""


def main() -> int:
    """Place, start, watch until the owner is gone. Returns: the exit status."""
    owner_fd, body = int(sys.argv[1]), read_message(sys.stdin.fileno())
    if body is None:
        sys.exit("the process that talks to Ray is started by the engine, not by hand")
    asked = msgspec.msgpack.decode(body, type=PlaceStages)
    set_up_logging(asked.log_level)
    events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(events,), name="owner", daemon=True).start()
    driver = _Driver(asked, events, owner_fd)
    try:
        driver.place()
        driver.watch()
        return 0
    except ConfigError as error:
        driver.tell(RayFailed(str(error)))
        return 2
    finally:
        driver.close()


def _listen(events: queue.SimpleQueue[_Event]) -> None:
    """The owner's words. When it is gone, this process goes, however long Ray takes for what it is doing."""
    while (body := read_message(sys.stdin.fileno())) is not None:
        events.put(msgspec.msgpack.decode(body, type=StartNodes))
    events.put(None)
    timer = threading.Timer(_GOODBYE_S, os._exit, [1])
    timer.daemon = True
    timer.start()


class _Driver:
    """Args: owner_fd: where its owner reads."""

    def __init__(self, asked: PlaceStages, events: queue.SimpleQueue[_Event], owner_fd: int) -> None:
        self._asked = asked
        self._events = events
        self._owner_fd = owner_fd
        self._places: list[str] = []
        self._by_node: dict[str, list[int]] = {}
        self._group: Any = None
        self._actors: dict[int, Any] = {}
        self._orders: dict[int, NodeOrder] = {}
        self._started_s: dict[int, float] = {}

    def tell(self, message: FromRay) -> None:
        write_message(self._owner_fd, msgspec.msgpack.encode(message))

    # ---- placing ----

    def place(self) -> None:
        """Reserve a bundle per stage, and tell where they are. Raises: ConfigError."""
        _reach()
        self.tell(Reached())
        import ray
        from ray.util.placement_group import placement_group

        own_id = ray.get_runtime_context().get_node_id()
        nodes = _nodes()
        is_gpu_there = any(node.num_gpus for node in nodes)
        without = self._asked.is_gpu_optional and not is_gpu_there
        num_gpus = 0 if without else self._asked.num_gpus
        self._bundle = Bundle(self._asked.num_cpus, num_gpus, self._asked.num_ranks)
        num_stages = self._asked.num_stages
        check_room(nodes, own_id, self._bundle, num_stages, _view(own_id))
        # The first stage is where the engine is; of the others as many as can be are beside it.
        here: list[dict[str, str]] = [{_NODE_LABEL: own_id}, *({} for _ in range(num_stages - 1))]
        self._group = placement_group(
            [self._bundle.resources()] * num_stages, strategy="PACK", bundle_label_selector=here
        )
        self._wait_for_room(own_id)
        self._note_places(own_id)
        addresses = {node.node_id: node.address for node in _nodes()}
        placed = Placed(
            own_address=addresses[own_id],
            own_stages=len(self._by_node[own_id]),
            own_gpus=self._gpus_of(self._by_node[own_id]),
            nodes=[PlacedNode(addresses.get(place, place), len(self._by_node[place])) for place in self._places],
        )
        self.tell(placed)

    def _wait_for_room(self, own_id: str) -> None:
        """Raises: ConfigError."""
        began_s = time.monotonic()
        while (left_s := began_s + self._asked.patience_s - time.monotonic()) > 0:
            if self._group.wait(min(_NOTICE_S, left_s)):
                return
            logger.info("%s", self._no_room_words(time.monotonic() - began_s, own_id))
        raise ConfigError(self._no_room_words(time.monotonic() - began_s, own_id))

    def _no_room_words(self, waited_s: float, own_id: str) -> str:
        return no_room_words(self._bundle, self._asked.num_stages, waited_s, _view(own_id))

    def _note_places(self, own_id: str) -> None:
        """Which machine each bundle is on."""
        from ray.util.placement_group import placement_group_table

        found: dict[int, str] = placement_group_table(self._group)["bundles_to_node_id"]
        self._by_node = stages_by_node([found[bundle] for bundle in sorted(found)], own_id)
        self._places = [node_id for node_id in self._by_node if node_id != own_id]

    def _gpus_of(self, bundles: Sequence[int]) -> list[str]:
        """Which GPUs of their machine Ray keeps for them."""
        import ray

        if not self._bundle.num_gpus:
            return []
        rooms: list[list[str]] = ray.get([self._in_bundle(room, bundle).remote() for bundle in bundles])
        return [gpu for _, *gpus in rooms for gpu in gpus]

    def _in_bundle(self, what: Any, bundle: int, **options: Any) -> Any:
        """A function or class that Ray runs in a bundle, with all its resources."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)
        cpus, gpus = self._bundle.num_cpus, self._bundle.num_gpus
        return ray.remote(what).options(num_cpus=cpus, num_gpus=gpus, scheduling_strategy=strategy, **options)

    # ---- watching ----

    def watch(self) -> None:
        """Start nodes, and lost ones again, until the owner is gone."""
        due: dict[int, float] = {}
        while True:
            try:
                event = self._events.get(timeout=max(0.0, min(due.values()) - time.monotonic()) if due else None)
            except queue.Empty:
                for rank in [rank for rank, at_s in due.items() if at_s <= time.monotonic()]:
                    del due[rank]
                    self._start(rank)
                continue
            match event:
                case None:
                    return
                case StartNodes():
                    self._orders = {order.rank: order for order in event.orders}
                    for rank in self._orders:
                        self._start(rank)
                case _Ended():
                    if self._goes_on(event):
                        due[event.rank] = max(time.monotonic(), self._started_s[event.rank] + _SOON_S)

    def _goes_on(self, ended: _Ended) -> bool:
        """Whether a node is to be started again."""
        place = f"node {ended.rank}, which Ray placed"
        if ended.end.refusal:
            self.tell(NodeFailed(ended.rank, ended.end.refusal))
            logger.error("%s, cannot take part: %s", place, ended.end.refusal)
            return False
        logger.warning("%s, is gone: %s; it is started again where Ray has room", place, ended.end.how)
        return True

    def _start(self, rank: int) -> None:
        """In the first of its node's bundles. If that is lost with its machine, Ray finds another place for it."""
        first, *others = self._by_node[self._places[rank - 1]]
        order = msgspec.msgpack.encode(self._orders[rank])
        self._started_s[rank] = time.monotonic()
        actor = self._in_bundle(Agent, first, max_restarts=0).remote()
        self._actors[rank] = actor
        answer = actor.run.remote(order, *(self._in_bundle(room, bundle).remote() for bundle in others)).future()
        answer.add_done_callback(lambda done: self._events.put(_Ended(rank, _end_of(done))))

    def close(self) -> None:
        """Ray ends what this process placed when it leaves; said before, it ends sooner."""
        if "ray" not in sys.modules:
            return
        import ray

        if ray.is_initialized():
            for actor in self._actors.values():
                ray.kill(actor)
            ray.shutdown()


def _end_of(done: Any) -> NodeEnd:
    error = done.exception()
    if error is None:
        return msgspec.msgpack.decode(done.result(), type=NodeEnd)
    from ray.exceptions import RayActorError, RayTaskError

    words = str(error).strip().splitlines()
    if isinstance(error, RayTaskError):
        return NodeEnd("", f"its actor raised, {words[-1]}; install the same Stageline and Ray on every node of Ray's")
    kind = "Ray lost its actor or its node" if isinstance(error, RayActorError) else type(error).__name__
    return NodeEnd(f"{kind} ({words[0] if words else 'without a word'})")


def _reach() -> None:
    """Connect to the cluster that RAY_ADDRESS names, or that runs here. Raises: ConfigError."""
    _check_address(environment.ray_address())
    try:
        import ray

        ray.init(address="auto", log_to_driver=False, logging_level=logging.ERROR)
    except ImportError as error:
        raise ConfigError(f"Ray cannot be imported: {error}; in Stageline's folder: pip install '.[ray]'") from None
    except (ConnectionError, OSError, RuntimeError, ValueError) as error:
        why = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise ConfigError(f"no Ray cluster can be reached from this machine: {why}. {_WAY_OUT}") from None


def _check_address(address: str | None) -> None:
    """Ray tries for two minutes whatever it is told; a connection tells more, sooner. Raises: ConfigError."""
    host, _, port = (address or "").rpartition(":")
    if not host or not port.isdecimal():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except OSError as error:
        why = error.strerror or str(error)
        raise ConfigError(f"no Ray cluster can be reached: RAY_ADDRESS is {address}: {why}. {_WAY_OUT}") from None


def _nodes() -> list[RayNode]:
    """Those that are alive."""
    from ray import nodes

    found: Sequence[dict[str, Any]] = [node for node in nodes() if node["Alive"]]
    return [
        RayNode(
            node_id=node["NodeID"],
            address=node["NodeManagerAddress"],
            num_cpus=node["Resources"].get("CPU", 0.0),
            num_gpus=node["Resources"].get("GPU", 0.0),
        )
        for node in found
    ]


def _view(own_id: str) -> str:
    from ray import available_resources

    return describe(_nodes(), own_id, available_resources())


if __name__ == "__main__":
    open_standard_streams()
    status = main()
    sys.stderr.flush()
    # Without the interpreter's farewell: Ray's threads may not take part in it.
    os._exit(status)
