"""Nodes that Ray places, as the engine's process sees them: where the stages are, and who cannot take part.

One idea: Ray is asked where, and nothing else. From then on the pipeline is one over several machines like any other:
its head listens, and the nodes that Ray started join it.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import math
import select
import time

import msgspec

from stageline.cluster.ray_messages import (
    FromRay,
    NodeFailed,
    NodeOrder,
    Placed,
    PlaceStages,
    RayFailed,
    Reached,
    StartNodes,
)
from stageline.config import environment
from stageline.config.cluster_config import ClusterConfig
from stageline.config.engine_config import EngineConfig
from stageline.errors import ConfigError, InternalError
from stageline.executor.messages import LinkAccess
from stageline.links.child_process import ChildProcess, wait_for_ends
from stageline.links.key_file import given_security
from stageline.links.keys import ClusterKey

logger = logging.getLogger(__name__)

BACKEND = "ray"
_REACH_S = 18.0
"""Ray may take this long to answer."""

_GOODBYE_S = 5.0


def check_ray(engine: EngineConfig, cluster: ClusterConfig) -> None:
    """Refuse what cannot work whatever Ray has. Raises: ConfigError."""
    flag = f"--distributed-executor-backend {BACKEND}"
    if cluster.headless:
        raise _headless_error()
    if importlib.util.find_spec("ray") is None:
        raise ConfigError(f"{flag} needs Ray, which is not installed; in Stageline's folder type: pip install '.[ray]'")
    for name in ("nnodes", "node_rank", "stages", "node_address"):
        if getattr(cluster, name) != getattr(ClusterConfig, name):
            raise ConfigError(f"{flag} lets Ray choose the machines; leave --{name.replace('_', '-')} out")
    address = environment.ray_address()
    if address is not None and address.startswith("ray://"):
        raise ConfigError(
            f"RAY_ADDRESS is {address}, which is Ray's client; run this on a node of the cluster, with RAY_ADDRESS=auto"
        )


def refuse_headless(engine: EngineConfig) -> None:
    """Raises: ConfigError if Ray starts the other machines' stages."""
    if engine.distributed_executor_backend == BACKEND:
        raise _headless_error()


def _headless_error() -> ConfigError:
    return ConfigError(
        f"--distributed-executor-backend {BACKEND} starts the stages on other machines itself; leave --headless out, "
        "and run this on one machine only"
    )


def ray_access(cluster: ClusterConfig, is_insecure: bool) -> LinkAccess:
    """As the flags and variables say; without a key, one that only this pipeline has. Raises: ConfigError."""
    security = given_security(cluster.cluster_key_file, is_insecure)
    if security is None:
        return LinkAccess(ClusterKey.new().text())
    return LinkAccess(None if security.key is None else security.key.text(), is_insecure=security.key is None)


class RayFleet:
    """A placement, once it is made, and the nodes on it until `close`.

    Attributes:
        cluster: the machines as flags would have named them; not spread if Ray has room for all stages here.
        own_gpus: those of this machine's GPUs that Ray keeps for its stages.
    Raises: ConfigError if Ray is not reached, or has no room in time.
    """

    def __init__(self, engine: EngineConfig, cluster: ClusterConfig, access: LinkAccess) -> None:
        self._engine = engine
        self._access = access
        # Stages are dealt to bundles once Ray has placed them, so every bundle has room for any stage.
        num_ranks = max(engine.ranks_per_stage)
        asked = PlaceStages(
            num_stages=engine.pipeline_parallel_size,
            num_ranks=num_ranks,
            num_cpus=engine.threads_per_stage * num_ranks,
            num_gpus=0 if engine.device == "cpu" else num_ranks,
            is_gpu_optional=engine.device == "auto",
            patience_s=cluster.join_timeout_s,
            log_level=environment.log_level(),
        )
        self._child = ChildProcess("stageline.cluster.ray_process", msgspec.msgpack.encode(asked))
        self._decoder = msgspec.msgpack.Decoder(FromRay)
        try:
            placed = self._wait_for_placement()
        except BaseException:
            self.close()
            raise
        self._nodes = placed.nodes
        self.own_gpus = placed.own_gpus
        self.cluster = cluster_of(placed, cluster)
        where = [f"{placed.own_stages} here", *(f"{node.num_stages} on {node.address}" for node in placed.nodes)]
        logger.info("Ray has room for the stages: %s", ", ".join(where))

    def _wait_for_placement(self) -> Placed:
        deadline_s = time.monotonic() + _REACH_S
        while True:
            left_s = deadline_s - time.monotonic()
            if not _is_readable(self.fd, left_s):
                raise ConfigError(
                    f"Ray does not answer within {_REACH_S:g} s; does `ray status` work here? Start it with `ray start`"
                )
            for message in self._read():
                match message:
                    case Reached():
                        # From now on the other process knows how long to wait.
                        deadline_s = math.inf
                    case Placed():
                        return message

    @property
    def fd(self) -> int:
        """Readable when there is something to `check`."""
        return self._child.exit_fd

    def check(self) -> None:
        """Hear what is new; waits if nothing is. Raises: ConfigError if a node cannot take part."""
        self._read()

    def _read(self) -> list[FromRay]:
        bodies = self._child.read_messages()
        if bodies is None:
            raise InternalError(f"the process that talks to Ray was lost: {self._child.describe_exit()}")
        messages = [self._decoder.decode(body) for body in bodies]
        for message in messages:
            if isinstance(message, RayFailed):
                raise ConfigError(message.reason)
            if isinstance(message, NodeFailed):
                raise ConfigError(f"node {message.rank}, which Ray placed, cannot take part: {message.reason}")
        return messages

    def start_nodes(self) -> None:
        """Let Ray start them; they join the head, which has to listen by then."""
        if self._nodes:
            self._child.send(msgspec.msgpack.encode(StartNodes(self._orders())))

    def _orders(self) -> list[NodeOrder]:
        cluster = self.cluster
        assert cluster.master_addr is not None
        return [
            NodeOrder(
                head=cluster.master_addr,
                port=cluster.master_port,
                first_port=cluster.ports.start,
                last_port=cluster.ports.stop - 1,
                access=self._access,
                join_timeout_s=cluster.join_timeout_s,
                rank=rank,
                num_stages=node.num_stages,
                model_source=cluster.model_source,
                interface=cluster.interface,
                binds_cores=self._engine.bind_cores,
                log_level=environment.log_level(),
            )
            for rank, node in enumerate(self._nodes, start=1)
        ]

    def close(self) -> None:
        """Give back what Ray keeps; its nodes leave."""
        self._child.let_go()
        wait_for_ends([self._child], _GOODBYE_S)
        self._child.kill()
        self._child.reap()


def cluster_of(placed: Placed, asked: ClusterConfig) -> ClusterConfig:
    """The machines of a placement, as flags would have named them."""
    if not placed.nodes:
        return dataclasses.replace(asked, master_addr=None, nnodes=None, stages=None)
    return dataclasses.replace(
        asked,
        master_addr=asked.master_addr or placed.own_address,
        nnodes=1 + len(placed.nodes),
        stages=placed.own_stages,
    )


def _is_readable(fd: int, patience_s: float) -> bool:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    timeout_ms = None if math.isinf(patience_s) else math.ceil(max(0.0, patience_s) * 1000)
    return bool(poller.poll(timeout_ms))
