"""What can be known to be wrong about machines before anything starts: ports, addresses, the key, the executor."""

from __future__ import annotations

from stageline.cluster.ports import HeldPort, check_port, resolve
from stageline.cluster.ways import own_hosts
from stageline.config.cluster_config import ClusterConfig
from stageline.config.engine_config import EngineConfig
from stageline.errors import ConfigError
from stageline.executor.messages import LinkAccess
from stageline.links.key_file import given_security
from stageline.links.sockets import check_is_protected
from stageline.links.tcp_address import TcpAddress


def link_access(cluster: ClusterConfig, is_insecure: bool) -> LinkAccess:
    """How links between machines are protected. Raises: ConfigError if a key is given that is none."""
    if not cluster.is_spread and cluster.cluster_key_file is None:
        return LinkAccess()
    security = given_security(cluster.cluster_key_file, is_insecure)
    if security is None:
        return LinkAccess()
    return LinkAccess(None if security.key is None else security.key.text(), is_insecure=security.key is None)


def check_head(
    engine: EngineConfig, cluster: ClusterConfig, access: LinkAccess, api_port: int | None = None
) -> None:
    """Refuse what the head could not listen on, or run. Raises: ConfigError."""
    if cluster.model_source != "local":
        raise ConfigError(
            f"--model-source is {cluster.model_source}, but the head has to have the model itself; give it to the "
            "other machines, which then get it from here"
        )
    if not cluster.is_spread:
        return
    assert cluster.master_addr is not None
    if engine.distributed_executor_backend == "in_process":
        raise ConfigError(
            "--distributed-executor-backend in_process runs all stages in one process; leave it out to use several "
            "machines"
        )
    num_stages, num_nodes = engine.pipeline_parallel_size, cluster.nnodes or 2
    if num_stages < num_nodes:
        raise ConfigError(
            f"--pipeline-parallel-size {num_stages} gives {num_nodes} machines fewer than one stage each; give at "
            f"least -pp {num_nodes}, or a smaller --nnodes"
        )
    if cluster.stages is not None and cluster.stages > num_stages - num_nodes + 1:
        raise ConfigError(
            f"--stages is {cluster.stages}, which leaves fewer than one of {num_stages} stages to each other machine; "
            f"give at most {num_stages - num_nodes + 1}, or a larger --pipeline-parallel-size"
        )
    address = TcpAddress(resolve(cluster.master_addr, "--master-addr"), cluster.master_port)
    check_is_protected(address, access.security())
    if address.port == api_port:
        raise ConfigError(
            f"--port and --master-port are both {api_port}: one is for clients, the other for machines; give two"
        )
    check_port(address.host, address.port, "--master-port")
    if cluster.master_port in cluster.ports:
        raise ConfigError(
            f"--port-range {cluster.port_range} holds --master-port {cluster.master_port}, where other machines join; "
            "leave it out of the range"
        )
    if list(cluster.ports) == [api_port]:
        raise ConfigError(f"--port-range {cluster.port_range} is --port, which is for clients; give another range")
    own = resolve(cluster.node_address, "--node-address") if cluster.node_address else address.host
    HeldPort(own, cluster.ports).close()
    own_hosts(own, cluster.interface, is_only=cluster.node_address is not None)


def check_replicas(num_replicas: int, cluster: ClusterConfig, is_by_ray: bool = False) -> None:
    """Raises: ConfigError for several replicas of a pipeline over several machines."""
    if num_replicas == 1 or not (cluster.is_spread or is_by_ray):
        return
    flags = "--distributed-executor-backend ray" if is_by_ray else "--nnodes and --master-addr"
    own = "with its own --port" if is_by_ray else "with its own machines, --port and --master-port"
    raise ConfigError(
        f"-dp {num_replicas}: replicas share one machine, and this pipeline may be spread over several; start a head "
        f"for each pipeline, {own}, and a balancer before them, as docs/cluster.md shows; or leave {flags} out"
    )
