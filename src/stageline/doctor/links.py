"""Whether a link is quick enough for the model: what a microbatch takes on it, beside what a stage takes."""

from __future__ import annotations

from dataclasses import dataclass

from stageline.config.engine_config import EngineConfig
from stageline.cost.layer_costs import analytic_costs, item_bytes
from stageline.doctor.finding import Finding, ok, warning
from stageline.doctor.patient import Model
from stageline.engine.layout import ITEMSIZE
from stageline.engine.partitioning import planned_microbatch
from stageline.kv.kv_size import kv_bytes_per_token
from stageline.pipeline.partition_by_cost import StageRoom, stage_times_s

_BYTES_PER_NUMBER = 2


@dataclass(frozen=True)
class Need:
    """What crosses a boundary in one microbatch of many requests.

    Args:
        stage_s: the slowest stage's time for it, estimated; None if nothing is known of its device.
    """

    num_tokens: int
    num_bytes: int
    stage_s: float | None


TYPICAL_NEED = Need(64, 64 * 4096 * _BYTES_PER_NUMBER, None)
"""Where no model is given: 64 tokens of hidden size 4096."""


def need_of(config: EngineConfig, model: Model, is_cpu: bool) -> Need:
    """Args: is_cpu: stages compute on CPUs, whose times can be estimated."""
    spec = model.checkpoint.spec
    planned = planned_microbatch(config, model.max_model_len)
    bytes_per_number = _BYTES_PER_NUMBER if config.activation_dtype == "auto" else 1
    num_bytes = planned.num_rows * spec.hidden_size * bytes_per_number
    if not is_cpu:
        return Need(planned.num_rows, num_bytes, None)
    itemsize = ITEMSIZE[spec.dtype if config.dtype == "auto" else config.dtype]
    weights = item_bytes(model.checkpoint, itemsize, config.quantization != "none", 0)
    costs = analytic_costs(model.checkpoint, planned, weights, kv_bytes_per_token(spec, 1, itemsize))
    times_s = stage_times_s(costs, (StageRoom(),) * len(model.layer_counts), model.layer_counts)
    return Need(planned.num_rows, num_bytes, max(times_s))


def judge_link(words: str, round_trip_s: float, bytes_per_s: float, need: Need, where: str) -> Finding:
    """Args: words: of the link, with its figures."""
    wire_s = need.num_bytes / bytes_per_s
    line = f"{words}; a microbatch of {need.num_tokens} tokens takes {1000 * (round_trip_s / 2 + wire_s):.3g} ms"
    if need.stage_s is None:
        return ok("link", f"{line}, at most {need.num_tokens / wire_s:,.0f} tokens/s", where)
    line += f", the slowest stage about {1000 * need.stage_s:.3g} ms"
    if wire_s > need.stage_s:
        return warning(
            "link", f"{line}: the link would set the pace; give --activation-dtype int8, fewer machines, or a faster "
            "network (docs/network.md)", where,
        )  # fmt: skip
    if round_trip_s / 2 + wire_s > need.stage_s:
        line += "; it takes more requests at a time to hide that"
    return ok("link", line, where)
