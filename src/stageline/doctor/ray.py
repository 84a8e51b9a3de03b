"""Whether Ray has the machines for the stages: it is asked to reserve them, as a start asks it, and gets them back."""

from __future__ import annotations

from dataclasses import replace

from stageline.cluster.ray_fleet import RayFleet, check_ray, ray_access
from stageline.doctor.finding import Finding, failed, ok
from stageline.doctor.patient import Asked
from stageline.errors import ConfigError

_PATIENCE_S = 10.0
"""A start waits for room as long as `--join-timeout` says; here it is enough to know that there is none now."""


def look_at_ray(asked: Asked) -> Finding:
    """Which ranks Ray has no room for, with its own view of what is there, or where it would put them."""
    cluster = replace(asked.cluster, join_timeout_s=min(_PATIENCE_S, asked.cluster.join_timeout_s))
    try:
        check_ray(asked.engine, cluster)
        fleet = RayFleet(asked.engine, cluster, ray_access(cluster, asked.serve.insecure))
    except ConfigError as error:
        return failed("ray", str(error))
    try:
        num_stages = asked.engine.pipeline_parallel_size
        if not fleet.cluster.is_spread:
            return ok("ray", f"it has room for all {num_stages} stages on this machine")
        own, machines = fleet.cluster.stages, fleet.cluster.nnodes
        return ok("ray", f"it has room for {num_stages} stages on {machines} machines, {own} of them on this one")
    finally:
        fleet.close()
