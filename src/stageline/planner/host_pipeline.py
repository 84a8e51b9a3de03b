"""A calibrated host as a simulated pipeline: all stages and the engine on its cores, as `stageline serve` would run."""

from __future__ import annotations

from stageline.cost.host_profile import HostProfile, LayerShape, stage_times_of
from stageline.executor.simulated_stages import HostCores, SimulatedLink, SimulatedPipeline
from stageline.pipeline.partition import StageLayers


def host_pipeline(profile: HostProfile, shape: LayerShape, partition: tuple[StageLayers, ...]) -> SimulatedPipeline:
    """Args: shape: of the model whose layers are cut so."""
    num_stages, messages, engine = len(partition), profile.messages, profile.engine
    return SimulatedPipeline(
        num_stages=num_stages,
        stage_times=stage_times_of(profile, shape, partition),
        links=(SimulatedLink(messages.latency_s, messages.bytes_per_s),) * (num_stages - 1),
        activation_bytes_per_token=shape.hidden_bytes,
        to_stages_s=messages.latency_s,
        to_engine_s=messages.latency_s,
        to_first_stage_s=messages.latency_s if num_stages > 1 else 0.0,
        prepare_s=profile.prepare_s,
        prepare_row_s=profile.prepare_row_s,
        send_s=messages.send_s,
        launch_s=engine.launch_s + num_stages * messages.send_s,
        launch_row_s=engine.launch_row_s,
        result_s=engine.result_s,
        result_row_s=engine.result_row_s,
        news_s=engine.news_s,
        news_row_s=engine.news_row_s,
        host=HostCores(max(1, profile.key.num_cores // profile.key.threads_per_stage), profile.slowdowns),
    )
