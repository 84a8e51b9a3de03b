"""A calibrated host as a simulated pipeline: all stages and the engine on its cores, as `stageline serve` would run."""

from __future__ import annotations

from stageline.cost.host_profile import HostProfile, LayerShape, stage_times_of
from stageline.executor.simulated_stages import HostCores, SimulatedLink, SimulatedPipeline
from stageline.pipeline.partition import StageLayers


def host_pipeline(profile: HostProfile, shape: LayerShape, partition: tuple[StageLayers, ...]) -> SimulatedPipeline:
    """Args: shape: of the model whose layers are cut so."""
    num_stages, engine = len(partition), profile.engine
    run = profile.run_of(num_stages)
    return SimulatedPipeline(
        num_stages=num_stages,
        stage_times=stage_times_of(profile, shape, partition),
        links=(SimulatedLink(run.to_next_stage_s, profile.link_bytes_per_s),) * (num_stages - 1),
        activation_bytes_per_token=shape.hidden_bytes,
        to_stages_s=run.to_stages_s,
        to_engine_s=run.to_engine_s,
        to_first_stage_s=run.to_next_stage_s if num_stages > 1 else 0.0,
        prepare_s=run.prepare_s,
        prepare_row_s=run.prepare_row_s,
        begin_s=run.begin_s,
        send_s=run.send_s,
        hand_on_s=run.hand_on_s if num_stages > 1 else 0.0,
        result_send_s=run.result_send_s,
        launch_s=engine.launch_s + (num_stages - 1) * profile.message_send_s,
        launch_row_s=engine.launch_row_s,
        result_s=engine.result_s,
        result_row_s=engine.result_row_s,
        news_s=engine.news_s,
        news_row_s=engine.news_row_s,
        host=HostCores(profile.key.num_places, profile.slowdowns, run.core_share.at),
    )
