"""Cluster files: what they describe, and that what cannot be is refused with the field and the way out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stageline.cost.model_costs import model_costs
from stageline.errors import ConfigError
from stageline.planner.cluster import read_cluster
from stageline.planner.known_models import find_model
from stageline.planner.units import sizes_to_try, take_units, units_of, why_not_sharded
from tests.architecture.source_tree import ROOT
from tests.unit.plan_clusters import HOME, TWO_NODES_OF_H100, cluster


def test_yaml_and_toml_describe_the_same(tmp_path: Path) -> None:
    toml = tmp_path / "cluster.toml"
    toml.write_text(
        'network = "infiniband-ndr"\n'
        '[[nodes]]\ndevice = "h100-sxm"\ndevices_per_node = 8\ncount = 2\nlink = "nvlink4"\n'
    )
    assert read_cluster(str(toml)) == cluster(tmp_path, TWO_NODES_OF_H100)


def test_a_file_adds_devices_and_links_and_replaces_those_of_the_table(tmp_path: Path) -> None:
    content = {
        "nodes": [{"device": "mine", "count": 2}],
        "network": "ethernet-1g",
        "devices": {
            "mine": {
                "memory_bytes": "64e9",  # YAML 1.1 reads 64e9 as text
                "memory_bytes_per_s": 2e11,
                "flops_per_s": {"bf16": 5e12},
                "source": "measured",
            }
        },
        "links": {
            "ethernet-1g": {"bytes_per_s": 1e8, "latency_s": 1e-4, "source": "iperf3", "latency_source": "ping"}
        },
    }
    found = cluster(tmp_path, content)
    assert found.nodes[1].device.memory_bytes == 64e9
    assert found.network.bytes_per_s == 1e8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"nodes": []}, "nodes is empty"),
        ({"nodes": [{"device": "h100"}]}, r"device 'h100' is not known; did you mean h100-sxm"),
        ({"nodes": [{"device": "l4", "devices_per_node": 0}]}, r"nodes\[0\]: devices_per_node is 0; it must be"),
        ({"nodes": [{"device": "l4", "count": -2}]}, r"nodes\[0\]: count is -2"),
        ({"nodes": [{"device": "l4", "devices_per_node": 2}]}, "2 devices per node, but no link; name it, such as"),
        ({"nodes": [{"device": "l4", "count": 2}], "network": None}, "2 nodes, but no network"),
        ({"nodes": [{"device": "l4", "count": 2, "addresses": ["a"]}]}, "1 addresses for 2 nodes"),
        ({"network": "10gbe"}, "link '10gbe' is not known"),
        ({"nods": []}, "unknown field `nods`"),
        ({"nodes": [{"device": "l4", "count": "many"}]}, r"nodes\[0\].count|\$\.nodes\[\.\.\.\]\.count"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        cluster(tmp_path, {**TWO_NODES_OF_H100, **change})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("memory_bytes", 0, "device mine: memory_bytes is 0; it must be a number above 0"),
        ("memory_bytes", float("inf"), "memory_bytes is inf; it must be a number above 0"),
        ("memory_bytes_per_s", float("nan"), "memory_bytes_per_s is nan"),
        ("memory_bytes_per_s", -1, "memory_bytes_per_s is -1"),
        ("flops_per_s", {}, "flops_per_s is empty"),
        ("flops_per_s", {"bf16": 0}, "flops_per_s.bf16 is 0"),
        ("memory_efficiency", 1.5, "memory_efficiency is 1.5; it must be above 0 and at most 1"),
        ("kind", "gpu", "kind is 'gpu'; it must be accelerator or cpu"),
        ("price_per_hour", -1, "price_per_hour is -1; it must be a number of at least 0"),
    ],
)
def test_numbers_that_no_device_has_are_refused(tmp_path: Path, field: str, value: object, message: str) -> None:
    device = {"memory_bytes": 1e9, "memory_bytes_per_s": 1e9, "flops_per_s": {"bf16": 1e12}, "source": "measured"}
    content = {"nodes": [{"device": "mine"}], "devices": {"mine": {**device, field: value}}}
    with pytest.raises(ConfigError, match=message):
        cluster(tmp_path, content)


def test_the_example_of_the_documentation_is_a_cluster(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "cost_model.md").read_text()
    [example] = re.findall(r"^```yaml\n(.*?)^```", page, flags=re.M | re.S)
    (tmp_path / "cluster.yaml").write_text(example)
    found = read_cluster(str(tmp_path / "cluster.yaml"))
    assert [node.address for node in found.nodes] == ["10.0.0.1", "10.0.0.2", "NODE2"]
    assert found.nodes[2].device.price_per_hour == 0.4 and found.network.latency_s == 9e-5


def test_a_file_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no\.yaml cannot be read: No such file"):
        read_cluster("no.yaml")


def test_devices_share_a_stage_within_a_node_or_as_whole_nodes(tmp_path: Path) -> None:
    found = cluster(tmp_path, TWO_NODES_OF_H100)
    assert sizes_to_try(found) == [1, 2, 4, 8, 16]
    four = units_of(found, 4)
    assert not isinstance(four, str) and [(unit.nodes, unit.first_device) for unit in four] == [
        ((0,), 0), ((0,), 4), ((1,), 0), ((1,), 4)
    ]  # fmt: skip
    [both] = units_of(found, 16)
    assert both.nodes == (0, 1) and both.where.link == found.network
    assert "12 devices are neither within a node of 8 nor whole nodes" in units_of(found, 12)
    assert "nodes differ, and none has 2 devices" in units_of(cluster(tmp_path, HOME), 2)


def test_replicas_stay_within_a_node_as_long_as_one_has_room_for_all_their_stages(tmp_path: Path) -> None:
    three_each = {"nodes": [{"device": "h100-sxm", "devices_per_node": 3, "count": 2, "link": "nvlink4"}]}
    units = units_of(cluster(tmp_path, {**three_each, "network": "ethernet-10g"}), 1)
    assert not isinstance(units, str)
    replicas = take_units(units, [units[0].kind] * 2, 3)
    assert [[unit.nodes[0] for unit in replica] for replica in replicas] == [[0, 0], [1, 1], [0, 1]]
    assert len({(unit.nodes, unit.first_device) for replica in replicas for unit in replica}) == 6


def test_heads_that_do_not_divide_say_which_numbers_of_devices_do() -> None:
    model = model_costs(find_model("qwen2.5-14b").spec)  # 40 heads, 8 KV heads, MLPs of 13,824
    assert why_not_sharded(model, 8) is None
    assert why_not_sharded(model, 16) == "40 heads and 8 KV heads do not divide over 16 devices; 8 would"
    # The engine does not share MLPs unevenly, so the plan does not offer that.
    refused = "the MLP's 13824 inner numbers cannot be shared evenly by 40 ranks; possible are 1, 2, 4, 8"
    assert why_not_sharded(model, 40) == refused
    two = model_costs(find_model("llama-3.1-70b").spec)  # 64 heads, 8 KV heads
    assert why_not_sharded(two, 3) == "64 heads and 8 KV heads do not divide over 3 devices; 2 or 4 would"
    latent = model_costs(find_model("deepseek-v3").spec)
    assert why_not_sharded(latent, 16) is None
    assert why_not_sharded(latent, 24) == "128 heads do not divide over 24 devices; 16 or 32 would"
