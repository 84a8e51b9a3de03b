"""`stageline plan --calibrate`: what this host does with a model's layers, in less than a minute.

One idea: every number comes from the code that serves: layers in processes like a stage's, alone and all at once, and
small pipelines that really run, for what lies between layers.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable

import psutil
from msgspec.structs import replace

from stageline.checkpoint.model_spec import ModelSpec
from stageline.config.engine_config import EngineConfig
from stageline.cost.host_profile import Factors, HostKey, HostProfile, host_key, layer_shape
from stageline.cost.model_costs import model_costs
from stageline.errors import ConfigError
from stageline.executor.stage_processes import available_cores
from stageline.planner.crowding import lone_work, with_crowding
from stageline.planner.measure_layers import LayerTimes, MeasuringProcesses
from stageline.planner.measure_pipelines import FILLED_ROWS, MOST_PIPELINES, CalibratingPipelines
from stageline.planner.run_costs import engine_costs, head_curve, run_costs

_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
_NUM_ROUNDS = 3
"""The host becomes faster or slower for seconds: all that is compared is measured in turns, and medians are taken."""

POINT_S = 0.3
_LARGER_THAN_CACHES_BYTES = 2**28
_MOST_MEMORY_FRACTION = 0.4
_MOST_PROCESSES = 8

OnStep = Callable[[str], None]


def this_host(config: EngineConfig, spec: ModelSpec) -> HostKey:
    """Where the profile of this machine is kept, computing as the configuration asks."""
    dtype = spec.dtype if config.dtype == "auto" else config.dtype
    return host_key(config.device, dtype, config.quantization, config.threads_per_stage, len(_cores()))


def _cores() -> list[int]:
    return available_cores() or list(range(os.cpu_count() or 1))


def calibrate_host(
    config: EngineConfig, spec: ModelSpec, on_step: OnStep = lambda text: None, point_s: float = POINT_S
) -> HostProfile:
    """Measure this host with layers of a model's shape; their weights are made up, so none are needed.

    Args:
        config: whose name of the model the profile remembers, and whose threads and cores the stages have.
        on_step: hears what is measured next.
        point_s: for how long each microbatch is run again and again.
    Raises: ConfigError if the model cannot be measured here; StagelineError if a measuring process is lost.
    """
    if spec.num_layers < 2:
        raise ConfigError("a model of one layer makes no pipeline; calibrate with one of two or more")
    itemsize = _ITEMSIZE[spec.dtype if config.dtype == "auto" else config.dtype]
    costs, cores = model_costs(spec, kv_itemsize_bytes=itemsize), _cores()
    layer_bytes, head_bytes = (item.num_parameters * itemsize for item in (costs.layers[0], costs.head))
    num_processes = max(1, min(len(cores) // config.threads_per_stage, _MOST_PROCESSES))
    num_layers = _layers_to_time(layer_bytes, head_bytes, spec.num_layers, num_processes + MOST_PIPELINES)
    key = this_host(config, spec)
    on_step(f"starting {num_processes} measuring processes with {num_layers} layers each")
    with MeasuringProcesses(config, spec, num_layers, num_processes, cores) as processes:
        on_step("prompts and messages")
        layers = LayerTimes(processes, num_layers, _NUM_ROUNDS, point_s)
        message_send_s, link_bytes_per_s = processes.measure_messages()
        on_step("starting pipelines")
        with CalibratingPipelines(config, spec, num_layers, key.num_places, _NUM_ROUNDS, point_s) as pipelines:
            for number in range(_NUM_ROUNDS):
                on_step(f"round {number + 1} of {_NUM_ROUNDS}: layers, alone and at once")
                layers.go_round()
                on_step("pipelines that run")
                pipelines.go_round(number)
    fitted, single, crowded = layers.fit(), pipelines.single, pipelines.crowded
    run = run_costs(single, *pipelines.several)
    profile = HostProfile(
        key=key,
        model=config.model,
        shape=layer_shape(costs),
        layer_s=fitted.layer_s,
        head_s=head_curve(single),
        stage_s=fitted.stage_s,
        attention_token_s=fitted.attention_token_s,
        prefill_attention_s=fitted.prefill_attention_s,
        contention=fitted.contention,
        run=run,
        crowded_run=run_costs(single, *crowded, undisturbed=run) if crowded else run,
        message_send_s=message_send_s,
        link_bytes_per_s=link_bytes_per_s,
        engine=engine_costs(single),
        memory_bytes_per_s=layer_bytes / fitted.layer_s.times_s[0],
        memory_bytes=float(psutil.virtual_memory().total),
    )
    if (bound := pipelines.bound_turns) is not None:
        work = Factors((1, FILLED_ROWS), (lone_work(profile, bound), 1.0))
        profile = replace(profile, run=replace(run, work=work))
    return with_crowding(profile, config, pipelines.crowded_turns) if crowded else profile


def _layers_to_time(layer_bytes: float, head_bytes: float, num_layers: int, num_copies: int) -> int:
    """As many as are larger than the caches, if there are so many and memory allows."""
    most_bytes = _MOST_MEMORY_FRACTION * psutil.virtual_memory().available / num_copies - 2 * head_bytes
    num_most = int(most_bytes // layer_bytes) - 2
    if num_most < 1:
        raise ConfigError(
            f"measuring needs memory for {num_copies} times three layers of {layer_bytes:,.0f} bytes and two matrices "
            f"of {head_bytes:,.0f}; calibrate with a smaller model"
        )
    wanted = math.ceil(_LARGER_THAN_CACHES_BYTES / layer_bytes)
    return max(1, min(wanted, num_most, num_layers - 1))
