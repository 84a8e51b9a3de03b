"""Each rule of the planner's advice on both sides of its boundary, with the numbers that decide it in its sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from stageline.config.plan_config import PlanConfig
from stageline.cost.hardware import Link, shipped_hardware
from stageline.cost.model_costs import model_costs
from stageline.cost.placement import Placement
from stageline.cost.ring import Ring
from stageline.cost.roofline import StageDevices
from stageline.cost.stage_time import MicrobatchShape
from stageline.planner.advice import (
    LinkLoad,
    advise_chunk,
    advise_concurrency,
    advise_fit,
    advise_heads,
    advise_kv_heads,
    advise_link_in_node,
    advise_network,
    advise_pipeline_or_sharding,
    advise_replicas,
)
from stageline.planner.advisor import advise, saturating_rows
from stageline.planner.known_models import find_model
from stageline.planner.search import search
from tests.unit.plan_clusters import HOME, TWO_NODES_OF_H100, cluster

TABLE = shipped_hardware()


def test_what_fits_one_node_is_sharded_inside_it_and_what_does_not_goes_across() -> None:
    fits = advise_fit(600e9, 600e9, 8, 2, 2, is_fast_link=True)
    assert fits.rule == "fits one node"
    assert "take 600.0 GB, a node has room for up to 600.0 GB" in fits.text
    assert "tensor parallelism inside a node, and replicas on the 2 nodes that hold it" in fits.text
    across = advise_fit(600e9 + 1, 600e9, 8, 0, 2, is_fast_link=True)
    assert across.text.endswith("tensor parallelism inside a node, a pipeline across nodes")
    slow = advise_fit(601e9, 600e9, 8, 0, 2, is_fast_link=False)
    assert slow.text.endswith("a pipeline inside a node, a pipeline across nodes")
    assert advise_fit(601e9, 600e9, 8, 0, 1, is_fast_link=True).text.endswith("or weights of fewer bits")


def test_heads_that_do_not_divide_leave_sizes_that_do() -> None:
    powers = [1, 2, 4, 8, 16, 32]
    assert advise_heads(32, 8, powers) is None
    advice = advise_heads(32, 6, powers)
    assert advice is not None
    assert "at most 4 can share a stage (leaving 2 over), or 6 stages of one" in advice.text
    twelve = advise_heads(32, 12, powers)
    assert twelve is not None and "at most 8 can share a stage (leaving 4 over)" in twelve.text
    nine = advise_heads(9, 2, [1, 3, 9])
    assert nine is not None and "no fewer can share a stage either: 2 stages of one" in nine.text


def test_sizes_that_only_heads_allow_are_not_advised(tmp_path: Path) -> None:
    """Qwen2.5 7B has 28 heads, which 7 divides; but neither do 4 KV heads divide over 7 devices, nor 7 over 4."""
    content = {"nodes": [{"device": "h100-sxm", "devices_per_node": 8, "link": "nvlink4"}]}
    costs, found = model_costs(find_model("qwen2.5-7b").spec), cluster(tmp_path, content)
    config = PlanConfig(pipeline_parallel_size=1, data_parallel_size=1)
    text_of = {one.rule: one.text for one in advise(costs, found, config, search(costs, found, config))}
    assert "at most 4 can share a stage; 2 stages of 4" in text_of["heads do not divide"]


def test_more_devices_than_kv_heads_keep_the_cache_several_times() -> None:
    assert advise_kv_heads(8, 8) is None
    advice = advise_kv_heads(8, 16)
    assert advice is not None and "KV 2 times; 8 devices in each of 2 stages hold 2 times as many tokens" in advice.text
    odd, little = advise_kv_heads(3, 8), advise_kv_heads(3, 4)
    assert odd is not None and "KV 2.67 times; 3 devices in each of 2 stages hold 2 times" in odd.text
    assert little is not None and little.text.endswith("KV 1.33 times")


def test_without_a_fast_link_in_the_node_the_cheaper_way_is_named() -> None:
    fast, slow = TABLE.link("nvlink4"), TABLE.link("pcie4-x16")
    assert advise_link_in_node("nvlink4", fast, 8, 3e-3, 1e-4) is None
    assert advise_link_in_node("pcie4-x16", slow, 1, 0.0, 0.0) is None
    pipeline = advise_link_in_node("pcie4-x16", slow, 8, 3e-3, 1e-4)
    assert pipeline is not None and "3.00 ms in all-reduces" in pipeline.text
    assert pipeline.text.endswith("0.10 ms in hops as 8 stages: the pipeline costs less")
    sharding = advise_link_in_node("pcie4-x16", slow, 2, 1e-4, 1e-4)
    assert sharding is not None and sharding.text.endswith("sharding all the same costs less")


def test_one_request_decodes_faster_on_stages_when_all_reduces_outweigh_the_weights_saved() -> None:
    boundary_s = 20e-3 * (1 - 1 / 8) / 160
    shards = advise_pipeline_or_sharding(80, boundary_s, 20e-3, 8)
    stages = advise_pipeline_or_sharding(80, boundary_s * 1.001, 20e-3, 8)
    assert "<=" in shards.text and shards.text.endswith("faster on 8 shards")
    assert ">" in stages.text and stages.text.endswith("faster on 8 stages")
    assert "2 x 80 all-reduces of 109.4 µs = 17.50 ms" in shards.text


def test_the_least_concurrency_is_the_ring_over_the_slowest_stage() -> None:
    ring = Ring((2e-3, 2e-3), hops_s=(2e-3,))
    assert advise_concurrency(Ring((2e-3,)), 1) is None
    enough, few = advise_concurrency(ring, 3), advise_concurrency(ring, 2)
    assert enough is not None and "3 microbatches fill the pipeline, so at least 3 requests; 3 do" in enough.text
    assert few is not None and "3 requests would fill the pipeline; 2 leave it idle 33% of it" in few.text


def test_chunks_are_advised_where_they_are_shorter_than_the_prompt() -> None:
    assert advise_chunk(1024, 1024, 0.1, 0.1) is None
    advice = advise_chunk(1024, 256, 0.05, 0.1)
    assert advice is not None and "chunks of 256: 50 ms to its first token instead of 100 ms" in advice.text


def _load(hop_s: float, prompt_hop_s: float, saturating: int | None) -> LinkLoad:
    ring = Ring((2e-3, 2e-3), hops_s=(hop_s,))
    return LinkLoad(ring, 4e-3 + hop_s, 4e-3, prompt_hop_s, 10e-3, 512, saturating)


def test_a_network_is_judged_by_what_decodes_and_prompts_lose_and_by_where_its_wire_is_full() -> None:
    good = advise_network("ethernet-10g", _load(1e-3, 10e-3, None)).text
    assert "1.00 ms is hidden, decodes lose 20% of their pace" in good
    assert "prompts lose 0%; decodes never fill its wire" in good
    bad = advise_network("ethernet-1g", _load(4e-3, 20e-3, 37)).text
    assert "4.00 ms is longer than a stage takes, decodes lose 50%" in bad
    assert "prompts lose 50%; its wire is full from 37 requests per microbatch on" in bad


def test_replicas_are_advised_when_they_make_more() -> None:
    assert advise_replicas("PP2", 100.0, "DP2", 100.0, 2) is None
    advice = advise_replicas("TP8 x PP2", 100.0, "TP8 x PP1 x DP2", 101.0, 2)
    assert advice is not None and advice.text.startswith("two replicas beat this pipeline: TP8 x PP1 x DP2 makes 101")


def test_a_wire_is_full_from_the_first_number_of_rows_whose_bytes_outlast_the_slowest_stage() -> None:
    model = model_costs(find_model("llama-3.1-70b").spec)
    stage = StageDevices(TABLE.device("h100-sxm"), 8, TABLE.link("nvlink4"))

    def placement(link: Link) -> Placement:
        return Placement(model, (40, 40), (stage, stage), (link,))

    slow = placement(TABLE.link("ethernet-1g"))
    rows = saturating_rows(slow, 1024)
    assert rows is not None
    rings = [slow.ring(MicrobatchShape(count, 0, count, count * 1024)) for count in (rows - 1, rows)]
    assert rings[0].wires_s[0] <= max(rings[0].stages_s)
    assert rings[1].wires_s[0] > max(rings[1].stages_s)
    assert saturating_rows(placement(TABLE.link("infiniband-ndr")), 1024) is None


@pytest.mark.parametrize(
    ("model", "rules"),
    [
        ("llama-3.1-70b", {"fits one node", "more devices than KV heads", "replicas", "chunk size"}),
        ("llama-3.1-405b", {"does not fit one node", "requests that fill the pipeline", "ethernet-1g between stages"}),
    ],
)
def test_the_rules_are_applied_to_the_layouts_that_were_judged(tmp_path: Path, model: str, rules: set[str]) -> None:
    costs, found = model_costs(find_model(model).spec), cluster(tmp_path, TWO_NODES_OF_H100)
    config = PlanConfig(tensor_parallel_size=8)
    said = {advice.rule: advice.text for advice in advise(costs, found, config, search(costs, found, config))}
    assert rules <= said.keys()
    assert all(any(character.isdigit() for character in text) for text in said.values())


def test_two_different_boxes_that_each_hold_the_model_are_told_to_work_apart(tmp_path: Path) -> None:
    def said(model: str) -> dict[str, str]:
        costs, found, config = model_costs(find_model(model).spec), cluster(tmp_path, HOME), PlanConfig(concurrency=4)
        return {advice.rule: advice.text for advice in advise(costs, found, config, search(costs, found, config))}

    assert "two replicas beat this pipeline: each of the 2 nodes on its own makes" in said("qwen3-4b")["replicas"]
    assert "replicas" not in said("qwen2.5-14b"), "neither box holds it"
