"""A planned placement as a simulated pipeline: every stage on devices of its own, timed by the cost model."""

from __future__ import annotations

from stageline.cost.placement import Placement
from stageline.cost.stage_time import MicrobatchShape
from stageline.executor.simulated_stages import SimulatedLink, SimulatedPipeline
from stageline.pipeline.microbatch import Microbatch

ASSUMED_LAUNCH_S, ASSUMED_LAUNCH_ROW_S = 1e-4, 6e-6
ASSUMED_RESULT_S, ASSUMED_RESULT_ROW_S = 2e-5, 5e-6
"""The engine's time for a microbatch and its rows, before and after; about what a 3 GHz core takes."""


def placed_pipeline(placement: Placement) -> SimulatedPipeline:
    """Messages between engine and stages take what the sampled tokens' way back takes."""

    def stage_times(microbatch: Microbatch) -> list[float]:
        shape = MicrobatchShape.of_rows(microbatch.num_computed_tokens, microbatch.num_scheduled_tokens)
        times_s = list(placement.stage_times_s(shape))
        times_s[-1] += placement.sampling_s
        return times_s

    return SimulatedPipeline(
        num_stages=placement.num_stages,
        stage_times=stage_times,
        links=tuple(SimulatedLink(link.latency_s, link.bytes_per_s) for link in placement.links),
        activation_bytes_per_token=placement.model.hidden_bytes * placement.tensors_per_hop,
        to_stages_s=placement.return_s,
        to_engine_s=placement.return_s,
        to_first_stage_s=placement.return_s,
        launch_s=ASSUMED_LAUNCH_S,
        launch_row_s=ASSUMED_LAUNCH_ROW_S,
        result_s=ASSUMED_RESULT_S,
        result_row_s=ASSUMED_RESULT_ROW_S,
    )
