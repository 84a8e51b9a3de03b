"""The time of a microbatch on a stage: each item computes or reads, whichever takes longer.

One idea: a matrix product takes its FLOPs at the device's rate or its weights at the memory's, the larger of the two;
attention the same with the KV cache. Where matrix products were measured by number of rows, the measured rate has both
in it. To that come the all-reduces of a sharded stage, and fixed times of launching.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stageline.cost.communication import all_reduce_s, gather_s
from stageline.cost.hardware import Device, Link
from stageline.cost.model_costs import ACTIVATION_ITEMSIZE_BYTES, ItemShape, ModelCosts
from stageline.cost.stage_time import MicrobatchShape


@dataclass(frozen=True)
class StageDevices:
    """What a stage runs on.

    Args:
        num_devices: that share its tensors: the tensor parallel size.
        link: between them; whatever it is, it is not used by one device.
    """

    device: Device
    num_devices: int
    link: Link


@dataclass(frozen=True)
class StageParts:
    """What a microbatch's time on a stage is made of."""

    matrices_s: float = 0.0
    attention_s: float = 0.0
    communication_s: float = 0.0
    overhead_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.matrices_s + self.attention_s + self.communication_s + self.overhead_s

    def plus(self, other: StageParts, times: int = 1) -> StageParts:
        return StageParts(
            self.matrices_s + times * other.matrices_s,
            self.attention_s + times * other.attention_s,
            self.communication_s + times * other.communication_s,
            self.overhead_s + times * other.overhead_s,
        )


def counted_items(model: ModelCosts, layers: range, is_first: bool, is_last: bool) -> tuple[tuple[ItemShape, int], ...]:
    """A stage's items, equal ones once with how many there are: layers of one kind take the same.

    Args:
        layers: the stage's.
        is_first, is_last: it has the embedding; it has the head.
    """
    counts: dict[ItemShape, int] = {}
    ends = ([model.embedding] if is_first else []) + ([model.head] if is_last else [])
    for item in [*model.layers[layers.start : layers.stop], *ends]:
        counts[item] = counts.get(item, 0) + 1
    return tuple(counts.items())


def stage_parts(
    items: Sequence[tuple[ItemShape, int]], hidden_bytes: float, where: StageDevices, shape: MicrobatchShape
) -> StageParts:
    """One microbatch on one stage. Args: items: as `counted_items` gives them."""
    parts = StageParts(overhead_s=where.device.microbatch_overhead_s)
    for item, count in items:
        parts = parts.plus(item_parts(item, hidden_bytes, where, shape), count)
    return parts


def item_parts(item: ItemShape, hidden_bytes: float, where: StageDevices, shape: MicrobatchShape) -> StageParts:
    """One microbatch in one item."""
    rows = num_rows(item, shape)
    if not rows:
        return StageParts()
    return StageParts(
        matrices_s=matrices_s(item, where, rows),
        attention_s=attention_s(item, where, shape),
        communication_s=_communication_s(item, hidden_bytes, where, rows),
        overhead_s=_overhead_s(item, where, rows),
    )


def _overhead_s(item: ItemShape, where: StageDevices, rows: int) -> float:
    device = where.device
    launches_s = device.layer_overhead_s if item.kv_bytes_per_token else 0.0
    if not device.expert_overhead_s or not item.num_experts:
        return launches_s
    return launches_s + device.expert_overhead_s * item.num_expert_products(rows, where.num_devices)


def num_rows(item: ItemShape, shape: MicrobatchShape) -> int:
    """Rows that an item multiplies: the head only those that need a token."""
    if not item.output_size:
        return shape.num_tokens
    return shape.num_decodes + min(1, shape.num_prompt_tokens)


def matrices_s(item: ItemShape, where: StageDevices, rows: int) -> float:
    """All matrix products of an item on one of its devices."""
    device, num_devices = where.device, where.num_devices
    dense_flops = 2.0 * rows * item.own_dense(num_devices)
    expert_flops = 2.0 * item.rows_worth(rows, num_devices) * item.num_per_expert
    dense_rate = device.measured_flops_per_s(rows)
    if dense_rate is None:
        expert_format = item.expert_format if item.keeps_blocks(num_devices) else "bf16"
        flops_s = dense_flops / device.reached_flops_per_s(item.dense_format)
        flops_s += expert_flops / device.reached_flops_per_s(expert_format)
        return max(flops_s, item.read_bytes(rows, num_devices) / device.reached_bytes_per_s)
    if not expert_flops:
        return dense_flops / dense_rate
    rows_per_expert = item.rows_worth(rows, num_devices) / item.experts_worth(rows, num_devices)
    return dense_flops / dense_rate + expert_flops / (device.measured_flops_per_s(rows_per_expert) or dense_rate)


def attention_s(item: ItemShape, where: StageDevices, shape: MicrobatchShape) -> float:
    """Attention of an item on one of its devices: decodes read the KV cache, prompts mostly compute."""
    if not item.kv_bytes_per_token:
        return 0.0
    device, num_devices = where.device, where.num_devices
    flops_per_s = device.reached_flops_per_s("bf16")
    decode_s = prefill_s = 0.0
    if shape.num_decodes:
        tokens = shape.num_decodes * item.kv_tokens(shape.decode_context_tokens / shape.num_decodes)
        read_s = tokens * item.kv_bytes(num_devices) / device.kv_bytes_per_s
        decode_s = max(read_s, tokens * item.flops_per_pair / num_devices / flops_per_s)
    if shape.num_prompt_tokens:
        pairs = shape.prefill_attention / 2
        if item.window is not None:
            pairs = min(pairs, float(item.window * shape.num_prompt_tokens))
        prefill_s = pairs * item.flops_per_pair / num_devices / flops_per_s
    return decode_s + prefill_s


def _communication_s(item: ItemShape, hidden_bytes: float, where: StageDevices, rows: int) -> float:
    reduces_s = item.num_all_reduces * all_reduce_s(where.link, where.num_devices, rows * hidden_bytes)
    if not item.output_size:
        return reduces_s
    logits_bytes = rows * item.output_size * ACTIVATION_ITEMSIZE_BYTES
    return reduces_s + gather_s(where.link, where.num_devices, logits_bytes)
