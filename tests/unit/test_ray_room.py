"""Where Ray can place stages: refused with its view, neighbours together, and the machines as flags would name them."""

from __future__ import annotations

import importlib.util

import pytest

from stageline.cluster.ray_fleet import check_ray, cluster_of, ray_access
from stageline.cluster.ray_messages import Placed, PlacedNode
from stageline.cluster.ray_room import Bundle, RayNode, check_room, describe, stages_by_node
from stageline.config.cluster_config import ClusterConfig
from stageline.config.engine_config import EngineConfig
from stageline.errors import ConfigError

GPU_STAGE = Bundle(num_cpus=1, num_gpus=1)
NODES = [RayNode("a", "10.0.0.1", num_cpus=8, num_gpus=2), RayNode("b", "10.0.0.2", num_cpus=1, num_gpus=4)]


def _check(nodes: list[RayNode], num_stages: int, own_id: str = "a", bundle: Bundle = GPU_STAGE) -> None:
    check_room(nodes, own_id, bundle, num_stages, describe(nodes, own_id, {"CPU": 9.0, "GPU": 5.0}))


def test_room_is_counted_by_what_is_scarcest_on_each_node() -> None:
    _check(NODES, 3)
    with pytest.raises(ConfigError) as refused:
        _check(NODES, 4)
    assert str(refused.value) == (
        "--pipeline-parallel-size 4 needs 4 times 1 CPU, 1 GPU, and Ray has room for 3. Ray has 2 nodes (10.0.0.1 (this"
        " machine): 8 CPUs, 2 GPUs; 10.0.0.2: 1 CPU, 4 GPUs), free now: 9 CPUs, 5 GPUs; add nodes with `ray start "
        "--address`, or give at most -pp 3"
    )


def test_the_first_stage_needs_room_on_this_machine() -> None:
    nodes = [RayNode("a", "10.0.0.1", num_cpus=0, num_gpus=0), NODES[1]]
    for own_id in ("a", "elsewhere"):
        with pytest.raises(ConfigError, match="the first stage runs on this machine and needs 1 CPU, 1 GPU"):
            _check(nodes, 1, own_id)


def test_ranks_of_a_stage_need_room_on_one_machine_and_the_smaller_number_is_the_way_out() -> None:
    both = Bundle(num_cpus=2, num_gpus=2, num_ranks=2)
    nodes = [RayNode(name, f"10.0.0.{name}", num_cpus=3, num_gpus=3) for name in "123"]
    _check(nodes, 3, "1", both)
    with pytest.raises(ConfigError, match=r"4 times 2 CPUs, 2 GPUs on one machine \(-tp 2\), .* 3\. .*smaller -tp$"):
        _check(nodes, 4, "1", both)


def test_stages_of_one_node_are_neighbours_and_this_machines_come_first() -> None:
    assert stages_by_node(["a", "b", "c", "b", "a"], "a") == {"a": [0, 4], "b": [1, 3], "c": [2]}


def test_a_placement_is_a_cluster_as_flags_would_name_it() -> None:
    asked = ClusterConfig(master_port=4000)
    placed = Placed("10.0.0.1", 2, [], [PlacedNode("10.0.0.2", 1), PlacedNode("10.0.0.3", 3)])
    made = cluster_of(placed, asked).check()
    assert (made.master_addr, made.master_port, made.nnodes, made.stages) == ("10.0.0.1", 4000, 3, 2)
    assert cluster_of(placed, ClusterConfig(master_addr="head.local")).master_addr == "head.local"
    assert not cluster_of(Placed("10.0.0.1", 2, [], []), ClusterConfig(master_addr="10.0.0.1")).is_spread


@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        (ClusterConfig(nnodes=2), "leave --nnodes out"),
        (ClusterConfig(stages=1), "leave --stages out"),
        (ClusterConfig(node_rank=1), "leave --node-rank out"),
        (ClusterConfig(node_rank=1, headless=True), "leave --headless out"),
    ],
)
def test_what_ray_decides_cannot_be_asked_for(
    monkeypatch: pytest.MonkeyPatch, cluster: ClusterConfig, words: str
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: object())
    with pytest.raises(ConfigError, match=words):
        check_ray(EngineConfig(model="m"), cluster)


def test_without_ray_the_way_to_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=r"needs Ray, which is not installed; .*: pip install '\.\[ray\]'"):
        check_ray(EngineConfig(model="m"), ClusterConfig())


def test_without_a_key_links_have_one_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STAGELINE_CLUSTER_KEY", "STAGELINE_CLUSTER_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)
    made = [ray_access(ClusterConfig(), is_insecure=False) for _ in range(2)]
    assert all(access.key for access in made) and made[0].key != made[1].key
    assert ray_access(ClusterConfig(), is_insecure=True).security() is not None
    assert ray_access(ClusterConfig(), is_insecure=True).key is None
