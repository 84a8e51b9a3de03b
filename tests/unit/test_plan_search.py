"""The search finds the layout that is best, says why the others lost, and what to type."""

from __future__ import annotations

import shlex
from pathlib import Path

import msgspec
import pytest

from stageline.cli.main import build_parser
from stageline.config.flags import cluster_config_from_args, engine_config_from_args
from stageline.config.plan_config import PlanConfig
from stageline.cost.model_costs import model_costs
from stageline.errors import ConfigError
from stageline.planner.commands import PlanFile, plan_file, serve_commands
from stageline.planner.known_models import find_model
from stageline.planner.layouts import LayoutPlan
from stageline.planner.pareto import curves, pareto_front
from stageline.planner.report import format_layouts
from stageline.planner.search import SearchResult, search, time_parts
from tests.unit.plan_clusters import HOME, TWO_NODES_OF_H100, cluster

# Few sizes: the laws hold for any, and a search over all takes a second.
SOME = {"tensor_parallel_size": 8}


def _search(folder: Path, model: str = "llama-3.1-70b", content: dict | None = None, **asked: object) -> SearchResult:
    config = PlanConfig(**{**({} if content else SOME), **asked}).check()  # type: ignore[arg-type]
    known = find_model(model)
    return search(model_costs(known.spec, known.weights), cluster(folder, content or TWO_NODES_OF_H100), config)


def _by_layout(result: SearchResult) -> dict[str, LayoutPlan]:
    return {str(ranked.plan.layout): ranked.plan for ranked in result.ranked}


def test_layouts_are_ranked_by_throughput_and_every_loser_has_a_reason_with_numbers(tmp_path: Path) -> None:
    result = _search(tmp_path)
    rates = [ranked.plan.tokens_per_s for ranked in result.ranked]
    assert rates == sorted(rates, reverse=True)
    assert result.ranked[0].reason == ""
    assert set(_by_layout(result)) == {"TP8 x PP1", "TP8 x PP1 x DP2", "TP8 x PP2"}
    for ranked in result.ranked[1:]:
        assert "less throughput" in ranked.reason and any(character.isdigit() for character in ranked.reason)


def test_what_a_cycle_is_made_of_sums_to_the_cycle(tmp_path: Path) -> None:
    for ranked in _search(tmp_path).ranked:
        plan = ranked.plan
        cycle_s = plan.num_running / plan.tokens_per_s
        assert sum(time_parts(plan).values()) == pytest.approx(cycle_s)


def test_no_layout_counts_more_requests_than_there_are(tmp_path: Path) -> None:
    """Five requests over two replicas: the fuller one has three, the other two."""
    plan = _by_layout(_search(tmp_path, concurrency=5))["TP8 x PP1 x DP2"]
    assert plan.decode.num_requests == 3
    assert plan.num_running == 5
    assert plan.tokens_per_s < 5 / plan.tpot_s


def test_the_shortest_tpot_and_the_lowest_cost_may_be_other_layouts(tmp_path: Path) -> None:
    shortest = _search(tmp_path, objective="tpot", concurrency=1).ranked
    tpots = [ranked.plan.tpot_s for ranked in shortest]
    assert tpots[0] == pytest.approx(min(tpots), rel=1e-3)
    with pytest.raises(ConfigError, match="price_per_hour"):
        _search(tmp_path, objective="cost")


def test_a_layout_below_the_wanted_throughput_loses_to_one_above(tmp_path: Path) -> None:
    free = _by_layout(_search(tmp_path, objective="tpot"))
    wanted = max(plan.tokens_per_s for plan in free.values()) - 1
    result = _search(tmp_path, objective="tpot", min_tokens_per_s=wanted)
    assert result.best.tokens_per_s >= wanted
    assert all("are below the wanted" in ranked.reason for ranked in result.ranked[1:])


def test_cost_prefers_fewer_devices_when_they_make_a_token_cheaper(tmp_path: Path) -> None:
    device = {
        "memory_bytes": 80e9,
        "memory_bytes_per_s": 2e12,
        "flops_per_s": {"bf16": 3e14},
        "source": "x",
        "price_per_hour": 2.0,
    }
    content = {"nodes": [{"device": "d", "count": 3}], "network": "ethernet-1g", "devices": {"d": device}}
    result = _search(tmp_path, "llama-3.1-8b", content, objective="cost", concurrency=3)
    assert str(result.best.layout) == "TP1 x PP1"
    assert result.best.price_per_hour == 2.0
    costs = [ranked.plan.price_per_million_tokens for ranked in result.ranked]
    assert costs[0] == pytest.approx(min(costs), rel=1e-3)


def test_requests_that_memory_does_not_hold_wait_and_the_layout_loses_to_one_that_holds_them(tmp_path: Path) -> None:
    plans = _search(tmp_path, prompt_tokens=32000, output_tokens=768, concurrency=80)
    assert str(plans.best.layout) == "TP8 x PP2"
    assert plans.best.num_waiting == 0
    lost = {str(ranked.plan.layout): ranked.reason for ranked in plans.ranked}
    assert lost["TP8 x PP1"].startswith("holds 37 of 80 requests")


def test_a_model_that_fits_nowhere_is_refused_with_the_numbers_and_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--weights of fewer bits") as refused:
        _search(tmp_path, "llama-3.1-405b", HOME)
    assert "TP1 x PP2: does not fit: weights of 811.7 GB" in str(refused.value)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"tensor_parallel_size": 3}, "64 heads and 8 KV heads do not divide over 3 devices; 2 or 4 would"),
        ({"tensor_parallel_size": 32}, "32 devices are neither within a node of 8 nor whole nodes of the 2"),
        ({"tensor_parallel_size": 8, "pipeline_parallel_size": 3}, "has room for 2"),
        ({"tensor_parallel_size": 8, "data_parallel_size": 3}, "has room for 2"),
        ({"concurrency": 0}, "--concurrency is 0; it must be an integer of at least 1"),
        ({"pipeline_parallel_size": -1}, "--pipeline-parallel-size is -1"),
        ({"memory_fraction": 0.0}, "--memory-fraction is 0; it must be above 0"),
        ({"objective": "speed"}, "choose from throughput, tpot, cost"),
        ({"min_tokens_per_s": -1.0}, "--min-tokens-per-s is -1"),
    ],
)
def test_impossible_wishes_say_what_would_work(tmp_path: Path, asked: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _search(tmp_path, **asked)


def test_a_model_smaller_than_the_memory_that_no_cut_brings_into_it_is_refused_with_what_cannot_be_cut(
    tmp_path: Path,
) -> None:
    """Llama 3.2 1B has 2.47 GB, but 3.0 on two stages, for both ends have the matrix that they share on one."""
    small = {
        "memory_bytes": 1.4e9,
        "memory_bytes_per_s": 1e11,
        "flops_per_s": {"bf16": 1e13},
        "reserved_bytes": 0,
        "source": "made up",
    }
    content = {"nodes": [{"device": "small", "count": 2}], "network": "ethernet-10g", "devices": {"small": small}}
    asked = {"concurrency": 1, "prompt_tokens": 16, "output_tokens": 16, "max_num_batched_tokens": 16}
    asked["tensor_parallel_size"] = 1
    with pytest.raises(ConfigError, match=r"PP2: .* less than 2 stages with 2\.8 GB free, but no cut.* of 0\.53 GB"):
        _search(tmp_path, "llama-3.2-1b", content, memory_fraction=1.0, **asked)


def test_slower_devices_get_fewer_layers_and_what_only_slows_is_left_out(tmp_path: Path) -> None:
    content = {
        "nodes": [{"device": "rtx-4090"}, {"device": "t4"}, {"device": "rtx-4090"}],
        "network": "ethernet-10g",
    }
    result = _search(tmp_path, "qwen3-8b", content, weights="auto", concurrency=8)
    plans = _by_layout(result)
    three = plans["TP1 x PP3"]
    by_device = {
        unit.where.device.memory_bytes_per_s: count
        for unit, count in zip(three.replicas[0], three.placement.layer_counts, strict=True)
    }
    assert by_device[300e9] < min(count for speed, count in by_device.items() if speed != 300e9)
    two = plans["TP1 x PP2"]
    assert {unit.where.device.memory_bytes for unit in two.replicas[0]} == {24e9}
    assert two.tokens_per_s > three.tokens_per_s * 0.9


def test_the_pareto_front_is_beaten_by_no_layout_with_any_number_of_requests(tmp_path: Path) -> None:
    result = _search(tmp_path, "llama-3.1-8b", HOME, concurrency=4)
    points = [point for curve in curves(result, PlanConfig(concurrency=4)) for point in curve]
    front = pareto_front(points)
    assert len(front) > 1
    for point in points:
        better = [f for f in front if f.tpot_s <= point.tpot_s and f.tokens_per_s >= point.tokens_per_s]
        assert better


def _serve_args(command: str):
    words = shlex.split(command)
    return build_parser().parse_args(words[words.index("stageline") + 1 :])


def test_every_printed_command_is_one_that_serve_understands(tmp_path: Path) -> None:
    result = _search(tmp_path, "qwen2.5-14b", HOME, concurrency=2, pipeline_parallel_size=2)
    found = cluster(tmp_path, HOME)
    commands = serve_commands(result.best, "Qwen/Qwen2.5-14B", found, PlanConfig(concurrency=2))
    parsed = [_serve_args(command.command) for command in commands]
    engines = [engine_config_from_args(args) for args in parsed]
    clusters = [cluster_config_from_args(args) for args in parsed]
    heads = [place for place in clusters if place.node_rank == 0]
    assert [place.headless for place in clusters] == [False, True] and len(heads) == 1
    assert {place.master_addr for place in clusters} == {commands[0].address}
    assert {place.nnodes for place in clusters} == {2}
    # Without one, they would not listen beyond loopback.
    assert all(place.cluster_key_file for place in clusters)
    assert len({engine.pp_layer_partition for engine in engines}) == 1
    counts = result.best.placement.layer_counts
    assert [command.layers for command in commands] == [(0, counts[0]), (counts[0], 48)]


def test_a_layout_with_a_device_of_unknown_price_is_not_the_cheapest_and_shows_none(tmp_path: Path) -> None:
    device = {"memory_bytes": 80e9, "memory_bytes_per_s": 2e12, "flops_per_s": {"bf16": 3e14}, "source": "x"}
    devices = {"priced": {**device, "price_per_hour": 2.0}, "unpriced": {**device, "memory_bytes_per_s": 3e12}}
    nodes = [{"device": name} for name in devices]
    content = {"nodes": nodes, "network": "ethernet-10g", "devices": devices}
    result = _search(tmp_path, "llama-3.1-8b", content, objective="cost")
    both = next(ranked for ranked in result.ranked if str(ranked.plan.layout) == "TP1 x PP2")
    assert both.reason.startswith("a device of it has no price_per_hour")
    row = next(line for line in format_layouts(result, 9, True).splitlines() if "TP1 x PP2" in line)
    assert "  -  " in row


def test_the_cheapest_layout_is_on_the_cheapest_devices_not_on_the_quickest(tmp_path: Path) -> None:
    def device(bytes_per_s: float, **price: float) -> dict[str, object]:
        fields = {"memory_bytes": 80e9, "memory_bytes_per_s": bytes_per_s, "flops_per_s": {"bf16": 3e14}, "source": "x"}
        return {**fields, **price}

    devices = {
        "quick": device(3e12),
        "dear": device(2e12, price_per_hour=9.0),
        "cheap": device(1e12, price_per_hour=1.0),
    }
    content = {"nodes": [{"device": name} for name in devices], "network": "ethernet-10g", "devices": devices}
    cheapest = _search(tmp_path, "llama-3.1-8b", content, objective="cost").best
    assert {unit.where.device.price_per_hour for unit in cheapest.replicas[0]} == {1.0}
    quickest = _search(tmp_path, "llama-3.1-8b", content, pipeline_parallel_size=1, data_parallel_size=1).best
    assert {unit.where.device.memory_bytes_per_s for unit in quickest.replicas[0]} == {3e12}


def test_replicas_in_one_node_are_one_command_with_one_port(tmp_path: Path) -> None:
    content = {"nodes": [{"device": "h100-sxm", "devices_per_node": 8, "link": "nvlink4"}]}
    result = _search(tmp_path, "llama-3.1-8b", content, tensor_parallel_size=2, pipeline_parallel_size=2)
    [command] = serve_commands(_by_layout(result)["TP2 x PP2 x DP2"], "m", cluster(tmp_path, content), PlanConfig())
    assert command.command.startswith("stageline serve m -tp 2 -pp 2 --pp-layer-partition ")
    assert " -dp 2 " in command.command and command.command.endswith("--port 8000")


def test_replicas_in_several_nodes_have_ports_and_devices_of_their_own(tmp_path: Path) -> None:
    content = {
        "nodes": [{"device": "h100-sxm", "devices_per_node": 4, "count": 2, "link": "nvlink4"}],
        "network": "infiniband-ndr",
    }
    result = _search(tmp_path, "llama-3.1-8b", content, tensor_parallel_size=1, pipeline_parallel_size=2)
    best = _by_layout(result)["TP1 x PP2 x DP4"]
    commands = serve_commands(best, "m", cluster(tmp_path, content), PlanConfig())
    assert [command.command.split()[0] for command in commands] == [
        "CUDA_VISIBLE_DEVICES=0,1", "CUDA_VISIBLE_DEVICES=2,3"
    ] * 2  # fmt: skip
    assert [command.command.split()[-1] for command in commands] == ["8000", "8001", "8002", "8003"]


def test_a_command_asks_for_the_kv_cache_that_the_plan_counts_on(tmp_path: Path) -> None:
    """Llama 3.1 8B: 128 KiB of KV a token, 1,281 tokens are 81 blocks of 16; two ranks share a stage's."""
    content = {"nodes": [{"device": "h100-sxm", "devices_per_node": 2, "link": "nvlink4"}]}
    asked = {"tensor_parallel_size": 2, "pipeline_parallel_size": 1, "concurrency": 10, "output_tokens": 257}
    best = _search(tmp_path, "llama-3.1-8b", content, **asked).best
    config = PlanConfig(concurrency=10, output_tokens=257)
    [command] = serve_commands(best, "m", cluster(tmp_path, content), config)
    assert engine_config_from_args(_serve_args(command.command)).kv_cache_memory == f"{10 * 81 * 16 // 8}MiB"
    many = _search(tmp_path, "llama-3.1-8b", content, **{**asked, "concurrency": 2000}).best
    [command] = serve_commands(many, "m", cluster(tmp_path, content), config)
    room_mib = 2 * many.capacity.stages[0].kv_room_bytes / 2**20
    text = engine_config_from_args(_serve_args(command.command)).kv_cache_memory
    assert int(text.removesuffix("MiB")) == pytest.approx(room_mib, rel=0.001)


def test_a_stage_on_a_cpu_has_a_thread_per_core(tmp_path: Path) -> None:
    content = {"nodes": [{"device": "raspberry-pi-5"}, {"device": "ryzen-9950x"}], "network": "ethernet-1g"}
    result = _search(tmp_path, "qwen3-0.6b", content, pipeline_parallel_size=2)
    commands = serve_commands(result.best, "m", cluster(tmp_path, content), PlanConfig())
    assert all("--threads-per-stage 4 " in command.command for command in commands)


def test_the_plan_as_yaml_holds_the_numbers_and_the_commands(tmp_path: Path) -> None:
    result, found = _search(tmp_path), cluster(tmp_path, TWO_NODES_OF_H100)
    text = plan_file(result.best, "meta-llama/Llama-3.1-70B", found, PlanConfig())
    plan = msgspec.yaml.decode(text, type=PlanFile)
    assert (plan.tensor_parallel_size, plan.pipeline_parallel_size, plan.data_parallel_size) == (8, 1, 2)
    assert plan.tpot_ms == pytest.approx(result.best.tpot_s * 1e3, abs=1e-3)
    assert len(plan.nodes) == 2 and plan.nodes[1].command.startswith("stageline serve meta-llama/Llama-3.1-70B -tp 8")
