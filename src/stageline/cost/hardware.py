"""What devices and links can do, as data: the shipped table, and what a user's file adds to it.

One idea: every number has a source beside it, and what no datasheet tells (how much of the peak is reached, what one
message costs) is said to be an assumption, and can be replaced by what was measured.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import resources

import msgspec

from stageline.errors import ConfigError

# How a number format that a device does not compute in is computed instead.
_WIDER_FORMAT = {"fp4": "fp8", "int4": "bf16", "fp8": "bf16", "int8": "bf16", "bf16": "fp16", "fp16": "fp32"}

ASSUMED_MEMORY_EFFICIENCY, ASSUMED_COMPUTE_EFFICIENCY = 0.8, 0.6
"""Shares of the datasheet's peaks that kernels reach: reading weights in order, and products of large matrices."""

ASSUMED_MICROBATCH_S = 200e-6
"""Of every stage for every microbatch: messages, preparing inputs, launching."""

_ANY_KIND = "accelerator"
ASSUMED_RESERVED_BYTES = {_ANY_KIND: 4 * 2**30, "cpu": 2**30}
"""Memory that neither weights nor KV cache may take: runtime, communication buffers, activations, fragmentation."""


class MatmulRate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Measured: products of weights with so many rows run at this rate."""

    num_rows: float
    flops_per_s: float


class Device(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One device: a GPU, another accelerator, or all cores and memory of a CPU.

    Args:
        memory_bytes: all of it.
        memory_bytes_per_s: peak of reading.
        flops_per_s: peak of dense matrix products, by number format: fp32, fp16, bf16, fp8, int8, fp4.
        source: where these numbers are from.
        kind: "accelerator" or "cpu".
        num_cores: of a CPU: threads of a stage on it; 0 if not known.
        memory_efficiency, compute_efficiency: fractions of the peaks that are reached.
        reserved_bytes: memory that is for neither weights nor KV cache; None for the kind's assumption.
        layer_overhead_s, microbatch_overhead_s: fixed time of a layer and of a microbatch on a stage (launching).
        expert_overhead_s: fixed time of every expert of a layer that some token takes (launching its products).
        matmul_rates: if measured, these tell the time of matrix products, between them by interpolation; ascending.
        attention_bytes_per_s: if measured, the rate at which decodes read the KV cache.
        sampling_s: of a microbatch, on the last stage.
        price_per_hour: in any currency; 0 if it does not matter.
    """

    memory_bytes: float
    memory_bytes_per_s: float
    flops_per_s: dict[str, float]
    source: str
    kind: str = _ANY_KIND
    num_cores: int = 0
    memory_efficiency: float = ASSUMED_MEMORY_EFFICIENCY
    compute_efficiency: float = ASSUMED_COMPUTE_EFFICIENCY
    reserved_bytes: float | None = None
    layer_overhead_s: float = 0.0
    expert_overhead_s: float = 0.0
    microbatch_overhead_s: float = ASSUMED_MICROBATCH_S
    matmul_rates: tuple[MatmulRate, ...] = ()
    attention_bytes_per_s: float | None = None
    sampling_s: float = 0.0
    price_per_hour: float = 0.0

    @property
    def reached_bytes_per_s(self) -> float:
        return self.memory_bytes_per_s * self.memory_efficiency

    @property
    def kv_bytes_per_s(self) -> float:
        return self.attention_bytes_per_s or self.reached_bytes_per_s

    def room_bytes(self, memory_fraction: float, activation_bytes: float = 0.0) -> float:
        """Memory for weights and KV cache together; not below 0.

        Args:
            activation_bytes: of the largest microbatch; they are part of what is reserved, as far as that goes.
        """
        reserved = self.reserved_bytes
        if reserved is None:
            reserved = ASSUMED_RESERVED_BYTES[self.kind]
        return max(0.0, self.memory_bytes * memory_fraction - max(reserved, activation_bytes))

    def reached_flops_per_s(self, number_format: str) -> float:
        """Rate of large matrix products in a number format, or the next wider one that the device has."""
        wanted: str | None = number_format
        while wanted is not None:
            if wanted in self.flops_per_s:
                return self.flops_per_s[wanted] * self.compute_efficiency
            wanted = _WIDER_FORMAT.get(wanted)
        return max(self.flops_per_s.values()) * self.compute_efficiency

    def measured_flops_per_s(self, num_rows: float) -> float | None:
        """The measured rate of matrix products with so many rows; None if nothing was measured."""
        if not self.matmul_rates:
            return None
        below = [rate for rate in self.matmul_rates if rate.num_rows <= num_rows]
        above = [rate for rate in self.matmul_rates if rate.num_rows > num_rows]
        if not below:
            # Fewer rows than were ever measured: the time is that of reading the weights, so the rate falls with them.
            return above[0].flops_per_s * num_rows / above[0].num_rows
        if not above:
            return below[-1].flops_per_s
        low, high = below[-1], above[0]
        share = math.log(num_rows / low.num_rows) / math.log(high.num_rows / low.num_rows)
        return low.flops_per_s + share * (high.flops_per_s - low.flops_per_s)


class Link(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What joins devices or nodes.

    Args:
        bytes_per_s: in one direction.
        latency_s: fixed time of a message from one end to the other.
        source: where the rate is from.
        latency_source: where the latency is from.
        all_reduce_latency_s: fixed time of one all-reduce, whatever the number of devices; None for a tree of messages,
            up and down.
        is_fast: fast enough for tensor parallelism inside a node.
    """

    bytes_per_s: float
    latency_s: float
    source: str
    latency_source: str
    all_reduce_latency_s: float | None = None
    is_fast: bool = False


class HardwareTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Devices and links by name."""

    devices: dict[str, Device] = {}
    links: dict[str, Link] = {}

    def device(self, name: str) -> Device:
        """Raises: ConfigError, with the names that come close."""
        if name not in self.devices:
            raise ConfigError(f"device {name!r} is not known; {_known(name, self.devices)}")
        return self.devices[name]

    def link(self, name: str) -> Link:
        """Raises: ConfigError, with the names that come close."""
        if name not in self.links:
            raise ConfigError(f"link {name!r} is not known; {_known(name, self.links)}")
        return self.links[name]

    def extended(self, other: HardwareTable) -> HardwareTable:
        """Both; what the other names too is the other's."""
        return HardwareTable({**self.devices, **other.devices}, {**self.links, **other.links})


@cache
def shipped_hardware() -> HardwareTable:
    """The table that comes with the package."""
    text = resources.files("stageline.cost").joinpath("data/hardware.toml").read_bytes()
    table = msgspec.toml.decode(text, type=HardwareTable)
    check_hardware(table, "hardware.toml")
    return table


def check_hardware(table: HardwareTable, source: str) -> None:
    """Raises: ConfigError for numbers that no hardware has, each named."""
    for name, device in table.devices.items():
        where = f"{source}: device {name}"
        if device.kind not in ASSUMED_RESERVED_BYTES:
            raise ConfigError(f"{where}: kind is {device.kind!r}; it must be {' or '.join(ASSUMED_RESERVED_BYTES)}")
        if not device.flops_per_s:
            raise ConfigError(f"{where}: flops_per_s is empty; give a rate for one number format, such as bf16")
        amounts = {
            "memory_bytes": device.memory_bytes,
            "memory_bytes_per_s": device.memory_bytes_per_s,
            **{f"flops_per_s.{key}": value for key, value in device.flops_per_s.items()},
        }
        _check_positive(where, amounts)
        fractions = {"memory_efficiency": device.memory_efficiency, "compute_efficiency": device.compute_efficiency}
        for field, value in fractions.items():
            if not 0 < value <= 1:
                raise ConfigError(f"{where}: {field} is {value:g}; it must be above 0 and at most 1")
        rest = {
            "num_cores": device.num_cores,
            "layer_overhead_s": device.layer_overhead_s,
            "expert_overhead_s": device.expert_overhead_s,
            "microbatch_overhead_s": device.microbatch_overhead_s,
            "sampling_s": device.sampling_s,
            "price_per_hour": device.price_per_hour,
            "reserved_bytes": device.reserved_bytes or 0.0,
        }
        _check_not_negative(where, rest)
    for name, link in table.links.items():
        where = f"{source}: link {name}"
        _check_positive(where, {"bytes_per_s": link.bytes_per_s})
        latencies = {"latency_s": link.latency_s, "all_reduce_latency_s": link.all_reduce_latency_s or 0.0}
        _check_not_negative(where, latencies)


def _check_positive(where: str, values: Mapping[str, float]) -> None:
    for field, value in values.items():
        if not 0 < value < math.inf:
            raise ConfigError(f"{where}: {field} is {value:g}; it must be a number above 0")


def _check_not_negative(where: str, values: Mapping[str, float]) -> None:
    for field, value in values.items():
        if not 0 <= value < math.inf:
            raise ConfigError(f"{where}: {field} is {value:g}; it must be a number of at least 0")


def _known(name: str, names: Iterable[str]) -> str:
    known = sorted(names)
    close = difflib.get_close_matches(name.lower(), known, n=4, cutoff=0.4)
    close += [other for other in known if name.lower() in other and other not in close]
    shown = f"did you mean {' or '.join(close)}?" if close else f"known are {', '.join(known)};"
    return f"{shown} `stageline plan --list` shows all; a file of your own can describe others"
