"""What is to be simulated: this host as it was measured, or the best layout of a cluster, with limits and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from stageline.config.engine_config import EngineConfig
from stageline.config.plan_config import KV_DTYPES, PlanConfig
from stageline.cost.host_profile import layer_shape, load_host_profile
from stageline.cost.model_costs import WeightFormat, model_costs
from stageline.engine.startup import scheduler_limits
from stageline.errors import ConfigError
from stageline.executor.simulated_stages import SimulatedPipeline
from stageline.loadgen.workload import PlannedRequest
from stageline.pipeline.partition import StageLayers, partition_layers
from stageline.planner.calibrate import this_host
from stageline.planner.cluster import Cluster
from stageline.planner.host_pipeline import host_pipeline
from stageline.planner.known_models import KnownModel
from stageline.planner.placed_pipeline import placed_pipeline
from stageline.planner.search import search
from stageline.planner.simulate import SimulatedMemory, SimulatedRun, check_servable, simulate
from stageline.scheduler.limits import SchedulerLimits

_KV_FRACTION_OF_FREE = 0.3
"""As the engine takes by default."""


@dataclass(frozen=True)
class Scenario:
    """One pipeline, ready to be simulated.

    Args:
        title: in words.
        num_replicas: that share the requests; one of them is simulated.
    """

    title: str
    pipeline: SimulatedPipeline
    partition: tuple[StageLayers, ...]
    memory: SimulatedMemory
    limits: SchedulerLimits
    num_replicas: int = 1

    def run(self, requests: Sequence[PlannedRequest], max_concurrency: int | None) -> SimulatedRun:
        """Args: max_concurrency: of all replicas together. Raises: ConfigError if a request can never be served."""
        share = requests[:: self.num_replicas]
        most = max_concurrency and -(-max_concurrency // self.num_replicas)
        check_servable(share, self.limits, self.memory)
        return simulate(share, self.pipeline, self.partition, self.limits, self.memory, most)


def on_this_host(model: KnownModel, config: PlanConfig) -> Scenario:
    """All stages on this host's cores. Raises: ConfigError if it was never measured."""
    engine = EngineConfig(model=model.name)
    key = this_host(engine, model.spec)
    profile = load_host_profile(key)
    if profile is None:
        raise ConfigError(
            f"this host was not measured yet ({key.machine}, {key.dtype}); run `stageline plan {model.name} "
            "--calibrate`, or give --cluster FILE"
        )
    costs = model_costs(model.spec)
    num_stages = config.pipeline_parallel_size or 1
    partition = partition_layers(model.spec.num_layers, num_stages, None)
    room_bytes = _KV_FRACTION_OF_FREE * psutil.virtual_memory().available
    return Scenario(
        f"{num_stages} stage{'s' * (num_stages > 1)} of this host, measured with {profile.model}",
        host_pipeline(profile, layer_shape(costs), partition),
        partition,
        _memory(room_bytes / costs.kv_bytes_per_token),
        _limits(model, num_stages, config, config.concurrency),
    )


def on_cluster(model: KnownModel, cluster: Cluster, config: PlanConfig) -> Scenario:
    """The layout that `stageline plan` finds best. Raises: ConfigError if there is none."""
    weights = model.weights if config.weights == "auto" else WeightFormat(config.weights, config.weights)
    best = search(model_costs(model.spec, weights, KV_DTYPES[config.kv_cache_dtype]), cluster, config).best
    layout = best.layout
    return Scenario(
        f"{cluster}: {layout}, partition {','.join(map(str, best.placement.layer_counts))}",
        placed_pipeline(best.placement),
        best.placement.cut,
        _memory(best.capacity.num_tokens),
        _limits(
            model, layout.pipeline_parallel_size, config, -(-config.concurrency // layout.data_parallel_size)
        ),
        layout.data_parallel_size,
    )


def _memory(num_tokens: float) -> SimulatedMemory:
    block_size = EngineConfig(model="simulated").block_size
    return SimulatedMemory(int(num_tokens) // block_size, block_size)


def _limits(model: KnownModel, num_stages: int, config: PlanConfig, concurrency: int) -> SchedulerLimits:
    engine = EngineConfig(
        model=model.name,
        pipeline_parallel_size=num_stages,
        max_num_seqs=max(EngineConfig(model=model.name).max_num_seqs, concurrency),
        max_num_batched_tokens=config.max_num_batched_tokens,
    )
    return scheduler_limits(engine, model.spec.max_position_embeddings)
