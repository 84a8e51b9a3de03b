"""Clusters for tests of the planner."""

from __future__ import annotations

from pathlib import Path

import msgspec

from stageline.planner.cluster import Cluster, read_cluster

TWO_NODES_OF_H100 = {
    "nodes": [{"device": "h100-sxm", "devices_per_node": 8, "count": 2, "link": "nvlink4"}],
    "network": "infiniband-ndr",
}
HOME = {
    "nodes": [{"device": "rtx-4090", "addresses": ["10.0.0.1"]}, {"device": "rtx-3090", "addresses": ["10.0.0.2"]}],
    "network": "ethernet-1g",
}


def cluster_file(folder: Path, content: dict[str, object]) -> str:
    """The path of a file with this content."""
    path = folder / "cluster.yaml"
    path.write_bytes(msgspec.yaml.encode(content))
    return str(path)


def cluster(folder: Path, content: dict[str, object]) -> Cluster:
    return read_cluster(cluster_file(folder, content))
