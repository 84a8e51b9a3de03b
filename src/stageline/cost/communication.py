"""What moving activations takes: all-reduces inside a stage, hops between stages, the gathering of logits.

One idea: every communication is a fixed time and a size over a rate. A ring moves 2·(n - 1)/n of the tensor over each
device's link, whatever n is, so what differs between links is mostly the fixed time.
"""

from __future__ import annotations

import math

from stageline.cost.hardware import Link


def all_reduce_s(link: Link, num_devices: int, num_bytes: float) -> float:
    """Sum a tensor of so many bytes over the devices, the result on each; 0 for one device."""
    if num_devices < 2:
        return 0.0
    latency_s = link.all_reduce_latency_s
    if latency_s is None:
        latency_s = 2 * math.ceil(math.log2(num_devices)) * link.latency_s
    return latency_s + 2 * (num_devices - 1) / num_devices * num_bytes / link.bytes_per_s


def gather_s(link: Link, num_devices: int, num_bytes: float) -> float:
    """Bring the devices' shards of a tensor of so many bytes together on one; 0 for one device."""
    if num_devices < 2:
        return 0.0
    return link.latency_s + (num_devices - 1) / num_devices * num_bytes / link.bytes_per_s


def hop_s(link: Link, num_bytes: float) -> float:
    """From one stage to the next."""
    return link.latency_s + wire_s(link, num_bytes)


def wire_s(link: Link, num_bytes: float) -> float:
    """That part of a hop in which the wire carries nothing else."""
    return num_bytes / link.bytes_per_s


def hop_bytes(num_tokens: int, hidden_bytes: float, num_tensors: int = 1) -> float:
    """What crosses a boundary: hidden states, and where they are not summed first, the residual as a second tensor."""
    return num_tokens * hidden_bytes * num_tensors
