"""The machines a plan is for: a YAML or TOML file with nodes, what joins them, and hardware that is not in the table.

    nodes:
      - device: h100-sxm      # a name of `stageline plan --list`, or of `devices` below
        devices_per_node: 8
        count: 2              # such nodes
        link: nvlink4         # between the devices of one node
        addresses: [10.0.0.1, 10.0.0.2]
    network: infiniband-ndr   # between the nodes
    links:                    # optional, like devices: added to the table
      my-network: {bytes_per_s: 2.9e9, latency_s: 4e-5, source: iperf3, latency_source: ping}

One idea: devices of one kind are alike wherever they are; what differs is which of them share a node.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from stageline.cost.hardware import Device, HardwareTable, Link, check_hardware, shipped_hardware
from stageline.errors import ConfigError

_LARGEST_NUM_DEVICES = 4096
_DEFAULT_LINK = "pcie4-x16"


class _NodeGroup(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    device: str
    devices_per_node: int = 1
    count: int = 1
    link: str | None = None
    addresses: tuple[str, ...] = ()


class _ClusterFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    nodes: tuple[_NodeGroup, ...]
    network: str | None = None
    devices: dict[str, Device] = {}
    links: dict[str, Link] = {}


@dataclass(frozen=True)
class Node:
    """One machine.

    Args:
        index: its rank.
        link_name, link: between its devices.
        address: how the others reach it; a placeholder if the file names none.
    """

    index: int
    device_name: str
    device: Device
    num_devices: int
    link_name: str
    link: Link
    address: str


@dataclass(frozen=True)
class Cluster:
    """All machines, and what joins them. `network` is never used by a single node."""

    nodes: tuple[Node, ...]
    network_name: str
    network: Link

    @property
    def num_devices(self) -> int:
        return sum(node.num_devices for node in self.nodes)

    @property
    def devices_per_node(self) -> int | None:
        """The same number in every node, of the same device on the same link; None if nodes differ."""
        kinds = {(node.device_name, node.link_name, node.num_devices) for node in self.nodes}
        return self.nodes[0].num_devices if len(kinds) == 1 else None

    def __str__(self) -> str:
        counts: dict[str, int] = {}
        for node in self.nodes:
            text = f"{node.num_devices} x {node.device_name}"
            if node.num_devices > 1:
                text += f" ({node.link_name})"
            counts[text] = counts.get(text, 0) + 1
        nodes = " and ".join(f"{count} node{'s' * (count > 1)} of {text}" for text, count in counts.items())
        return nodes + (f", joined by {self.network_name}" if len(self.nodes) > 1 else "")


def read_cluster(path: str) -> Cluster:
    """Raises: ConfigError for a file that cannot be read or used, with the field at fault."""
    return cluster_of(_decode(path), path)


def cluster_of(file: _ClusterFile, source: str) -> Cluster:
    """Raises: ConfigError."""
    added = HardwareTable(dict(file.devices), dict(file.links))
    check_hardware(added, source)
    table = shipped_hardware().extended(added)
    if not file.nodes:
        raise ConfigError(f"{source}: nodes is empty; describe at least one, such as {{device: h100-sxm}}")
    nodes: list[Node] = []
    for number, group in enumerate(file.nodes):
        where = f"{source}: nodes[{number}]"
        nodes += _nodes_of(group, where, table, len(nodes))
    if (total := sum(node.num_devices for node in nodes)) > _LARGEST_NUM_DEVICES:
        raise ConfigError(f"{source}: {total} devices; a plan covers at most {_LARGEST_NUM_DEVICES}")
    if len(nodes) > 1 and file.network is None:
        raise ConfigError(f"{source}: {len(nodes)} nodes, but no network; name their link, such as ethernet-10g")
    name = file.network or "none"
    network = table.link(file.network) if file.network else nodes[0].link
    return Cluster(tuple(nodes), name, network)


def _nodes_of(group: _NodeGroup, where: str, table: HardwareTable, first_index: int) -> list[Node]:
    for field in ("devices_per_node", "count"):
        value = getattr(group, field)
        if not 1 <= value <= _LARGEST_NUM_DEVICES:
            raise ConfigError(f"{where}: {field} is {value}; it must be between 1 and {_LARGEST_NUM_DEVICES}")
    if group.addresses and len(group.addresses) != group.count:
        raise ConfigError(
            f"{where}: {len(group.addresses)} addresses for {group.count} nodes; give one for each, or none"
        )
    if group.link is None and group.devices_per_node > 1:
        raise ConfigError(
            f"{where}: {group.devices_per_node} devices per node, but no link; name it, such as {_DEFAULT_LINK}"
        )
    link_name = group.link or _DEFAULT_LINK
    device, link = table.device(group.device), table.link(link_name)
    return [
        Node(
            index=first_index + number,
            device_name=group.device,
            device=device,
            num_devices=group.devices_per_node,
            link_name=link_name,
            link=link,
            address=group.addresses[number] if group.addresses else f"NODE{first_index + number}",
        )
        for number in range(group.count)
    ]


def _decode(path: str) -> _ClusterFile:
    try:
        text = Path(path).read_bytes()
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"{path} cannot be read: {reason}; stageline plan --help shows such a file") from error
    decode = msgspec.toml.decode if path.endswith(".toml") else msgspec.yaml.decode
    try:
        return decode(text, type=_ClusterFile, strict=False)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        # YAML's parser tells where in lines of their own.
        where = " ".join(str(error).split())
        raise ConfigError(f"{path}: {where}; see docs/cost_model.md for what such a file holds") from error
