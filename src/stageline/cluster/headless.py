"""A machine that brings stages and serves nothing, with the head's own flags: `stageline serve ... --headless`."""

from __future__ import annotations

from stageline.checkpoint.open import open_checkpoint
from stageline.cluster.handshake import settings_of
from stageline.cluster.node import NodeSettings, run_node
from stageline.cluster.ray_fleet import BACKEND, check_ray
from stageline.cluster.start import link_access
from stageline.config.cluster_config import ClusterConfig
from stageline.config.engine_config import EngineConfig


def run_headless(engine: EngineConfig, cluster: ClusterConfig, is_insecure: bool) -> None:
    """Take part until a signal says to stop. Raises: ConfigError for what is known to be wrong, here or by the head."""
    if engine.distributed_executor_backend == BACKEND:
        check_ray(engine, cluster)
    assert cluster.master_addr is not None
    engine.check()
    if cluster.model_source == "local":
        # What cannot be opened here is told before anybody is waited for.
        open_checkpoint(engine.model)
    run_node(
        NodeSettings(
            head=cluster.master_addr,
            port=cluster.master_port,
            ports=cluster.ports,
            access=link_access(cluster, is_insecure),
            join_timeout_s=cluster.join_timeout_s,
            model=engine.model,
            model_source=cluster.model_source,
            rank=cluster.node_rank,
            num_stages=cluster.stages,
            address=cluster.node_address,
            interface=cluster.interface,
            settings=settings_of(engine, cluster),
            binds_cores=engine.bind_cores,
        )
    )
