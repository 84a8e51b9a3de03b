"""Checks of the model: its files, the cut of its layers, and whether each stage's part fits where it would run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from stageline.checkpoint.checkpoint import Checkpoint
from stageline.checkpoint.open import open_checkpoint
from stageline.checkpoint.stage_tensors import stage_file_bytes, stage_weight_bytes
from stageline.checkpoint.tokenizer import load_tokenizer
from stageline.config.engine_config import EngineConfig
from stageline.cost.layer_costs import item_bytes
from stageline.doctor.finding import Finding, failed, finding_of, ok, warning
from stageline.doctor.memory import check_memories, memories_of
from stageline.doctor.patient import Asked, Model
from stageline.engine.layout import ITEMSIZE, LayoutRules
from stageline.engine.partitioning import choose_partition, format_counts
from stageline.engine.startup import check_quantization, check_ranks, check_threads, choose_max_model_len
from stageline.engine.startup_table import format_bytes
from stageline.errors import ConfigError
from stageline.executor.messages import StageLoaded
from stageline.kv.kv_plan import parse_kv_cache_memory
from stageline.kv.kv_size import kept_window, kv_bytes_per_layer
from stageline.pipeline.host_devices import HostDevices
from stageline.pipeline.partition import stages_of


def check_model(asked: Asked) -> tuple[list[Finding], Model | None]:
    """Files, lengths and cut. Returns: no model if it cannot be run at all."""
    config = asked.engine
    try:
        checkpoint = open_checkpoint(config.model)
        num_bytes = stage_file_bytes(checkpoint, range(checkpoint.spec.num_layers), is_first=True, is_last=True)
    except ConfigError as error:
        return [failed("weights", str(error))], None
    spec = checkpoint.spec
    findings = [
        ok("weights", f"{checkpoint.path}: {spec.num_layers} layers, {spec.dtype}, {format_bytes(num_bytes)}"),
        finding_of("tokenizer", lambda: _look_at_tokenizer(config, checkpoint)),
        finding_of("settings", lambda: _look_at_settings(config, checkpoint)),
    ]
    try:
        max_model_len = choose_max_model_len(config, checkpoint)
    except ConfigError as error:
        return [*findings, failed("model length", str(error))], None
    try:
        choice = choose_partition(config, checkpoint, max_model_len)
    except ConfigError as error:
        return [*findings, failed("layers", str(error))], None
    cut = f"{format_counts(choice.stages)} layers on {config.pipeline_parallel_size} stages"
    findings.append(ok("layers", f"{cut}, until times are measured" if choice.calibration else cut))
    counts = tuple(len(part.layers) for part in choice.stages)
    return findings, Model(checkpoint, max_model_len, counts)


def _look_at_tokenizer(config: EngineConfig, checkpoint: Checkpoint) -> str:
    load_tokenizer(checkpoint, config.tokenizer, config.chat_template)
    return config.tokenizer or "the model's own"


def _look_at_settings(config: EngineConfig, checkpoint: Checkpoint) -> str:
    check_threads(config)
    check_quantization(config, checkpoint)
    check_ranks(config, checkpoint)
    parse_kv_cache_memory(config.kv_cache_memory, config.pipeline_parallel_size)
    return "they fit the model and this machine"


def check_memory(
    asked: Asked, model: Model, shares: Mapping[int, int], devices: Mapping[int, HostDevices]
) -> Finding:
    """Whether weights and KV cache fit, as far as machines were asked.

    Args:
        shares: by rank of the machine, how many stages run there.
        devices: by rank; of machines that were asked.
    """
    config = asked.engine
    names, free_bytes = _memories_of_stages(config.ranks_per_stage, shares, devices, asked.serve.data_parallel_size)
    itemsize = ITEMSIZE[model.checkpoint.spec.dtype if config.dtype == "auto" else config.dtype]
    keeps_quantized = config.quantization != "none"
    window = kept_window(model.checkpoint.spec, model.max_model_len)
    least_kv = kv_bytes_per_layer(model.checkpoint.spec, config.block_size, itemsize, window)
    sizes = item_bytes(model.checkpoint, itemsize, keeps_quantized, least_kv)
    try:
        check_memories(memories_of(names, free_bytes), model.layer_counts, sizes)
        if None in free_bytes:
            known = f"what is known of {len(devices)} of {len(shares)} machines"
            return ok("memory", f"weights fit, by {known}; --peers asks the others")
        reports = _predicted_reports(config, model, names, [free or 0 for free in free_bytes])
        rules = LayoutRules(config, model.checkpoint, model.max_model_len)
        plan = rules.laid_out(stages_of(model.layer_counts), reports).kv_plan
    except ConfigError as error:
        return failed("memory", str(error))
    weights = ", ".join(f"s{report.stage_index} {format_bytes(report.weight_bytes)}" for report in reports)
    line = f"weights {weights}; KV cache for about {plan.num_tokens:,} tokens"
    if plan.num_tokens < model.max_model_len:
        return warning(
            "memory", f"{line}, fewer than the model length of {model.max_model_len:,}: longer requests would be "
            "refused; give more --kv-cache-memory, or a smaller --max-model-len",
        )  # fmt: skip
    return ok("memory", line)


def _memories_of_stages(
    per_stage: Sequence[int], shares: Mapping[int, int], devices: Mapping[int, HostDevices], num_replicas: int
) -> tuple[list[str], list[int | None]]:
    """[stages] the name of the memory that each stage uses, and what is free there for one replica."""
    names: list[str] = []
    free_bytes: list[int | None] = []
    for rank, num_stages in sorted(shares.items()):
        machine = "this machine" if rank == 0 else f"node {rank}"
        known = devices.get(rank)
        before = sum(per_stage[: len(names)])
        for stage in range(len(names), len(names) + num_stages):
            if known is None or known.kind == "cpu":
                names.append(machine)
                free_bytes.append(None if known is None else known.free_bytes[0] // num_replicas)
                continue
            first = sum(per_stage[:stage]) - before
            gpus = sorted({process % len(known.free_bytes) for process in range(first, first + per_stage[stage])})
            names.append(f"GPU {', '.join(map(str, gpus))} of {machine}")
            # Every rank takes an equal part, so the fullest one decides.
            free_bytes.append(len(gpus) * min(known.free_bytes[gpu] for gpu in gpus))
    return names, free_bytes


def _predicted_reports(
    config: EngineConfig, model: Model, names: Sequence[str], free_bytes: Sequence[int]
) -> list[StageLoaded]:
    """What stages would say after they loaded."""
    dtype = model.checkpoint.spec.dtype if config.dtype == "auto" else config.dtype
    ends = list(accumulate(model.layer_counts))
    last = len(ends) - 1
    weights = [
        stage_weight_bytes(
            model.checkpoint, range(first, end), stage == 0, stage == last, ITEMSIZE[dtype],
            config.quantization != "none",
        )
        for stage, (first, end) in enumerate(zip([0, *ends], ends, strict=False))
    ]  # fmt: skip
    used = {name: sum(size for other, size in zip(names, weights, strict=True) if other == name) for name in names}
    return [
        StageLoaded(stage, weights[stage], max(0, free_bytes[stage] - used[name]), name, dtype)
        for stage, name in enumerate(names)
    ]
