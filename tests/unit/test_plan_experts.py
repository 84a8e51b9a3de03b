"""Layouts with experts are judged with parts and with whole experts: the better stands in the plan, and says why."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from stageline.config.flags import engine_config_from_args
from stageline.config.plan_config import PlanConfig
from stageline.cost.model_costs import ModelCosts, model_costs
from stageline.cost.stage_time import MicrobatchShape
from stageline.errors import ConfigError
from stageline.planner.advice import ExpertShares, advise_experts
from stageline.planner.advisor import advise
from stageline.planner.commands import PlanFile, plan_file, serve_commands
from stageline.planner.known_models import find_model
from stageline.planner.layouts import Impossible, LayoutPlan
from stageline.planner.report import format_layouts
from stageline.planner.search import RankedLayout, SearchResult, search
from tests.unit.plan_clusters import TWO_NODES_OF_H100, cluster
from tests.unit.test_plan_search import _serve_args

ONE_DECODE = MicrobatchShape(1, 0, 1, 1152)


def _costs(model: str, expert_size: int | None = None) -> ModelCosts:
    known = find_model(model)
    spec, moe = known.spec, known.spec.moe
    if moe is not None and expert_size is not None:
        spec = replace(spec, moe=replace(moe, intermediate_size=expert_size))
    return model_costs(spec, known.weights)


def _search(folder: Path, costs: ModelCosts, **asked: int) -> SearchResult:
    return search(costs, cluster(folder, TWO_NODES_OF_H100), PlanConfig(**asked).check())  # type: ignore[arg-type]


def _only(result: SearchResult) -> RankedLayout:
    [ranked] = result.ranked
    return ranked


def test_few_rows_crowd_on_a_rank_and_parts_win(tmp_path: Path) -> None:
    """Mixtral's two chosen experts are a quarter of a layer in parts on 8 ranks; dealt, one rank reads a whole one."""
    asked = {"tensor_parallel_size": 8, "pipeline_parallel_size": 1, "data_parallel_size": 1, "concurrency": 1}
    ranked = _only(_search(tmp_path, _costs("mixtral-8x7b"), **asked))
    assert str(ranked.plan.layout) == "TP8 x PP1" and ranked.reason == ""
    assert isinstance(ranked.other, LayoutPlan) and str(ranked.other.layout) == "TP8+EP x PP1"
    [parts], [dealt] = (plan.placement.parts(ONE_DECODE) for plan in (ranked.plan, ranked.other))
    expert_s = 3 * 4096 * 14336 * 2 / (3.35e12 * 0.8)
    assert dealt.matrices_s - parts.matrices_s == pytest.approx(32 * (1 - 2 / 8) * expert_s)
    assert dealt.communication_s == parts.communication_s
    assert ranked.why_not_other == f"EP: {1 - ranked.other.tokens_per_s / ranked.plan.tokens_per_s:.0%} less throughput"
    stages = [plan.capacity.stages[0] for plan in (ranked.plan, ranked.other)]
    assert stages[0].weight_bytes == pytest.approx(stages[1].weight_bytes)


def test_parts_of_blocks_take_more_memory_and_whole_experts_win(tmp_path: Path) -> None:
    asked = {"tensor_parallel_size": 8, "pipeline_parallel_size": 2}
    costs = _costs("gpt-oss-120b")
    result = _search(tmp_path, costs, **asked)
    ranked = _only(result)
    assert str(ranked.plan.layout) == "TP8+EP x PP2" and ranked.why_not_other.startswith("no EP: ")
    assert isinstance(ranked.other, LayoutPlan)
    dealt, parts = (sum(stage.weight_bytes for stage in p.capacity.stages) for p in (ranked.plan, ranked.other))
    assert parts - dealt == pytest.approx(36 * 128 * 3 * 2880 * 2880 * (2 - 4.25 / 8) / 8)
    row = next(line for line in format_layouts(result, 9, False).splitlines() if "TP8+EP x PP2" in line)
    assert f"the best; {ranked.why_not_other}" in row


def test_what_is_printed_deals_experts_where_the_plan_does(tmp_path: Path) -> None:
    found, config = cluster(tmp_path, TWO_NODES_OF_H100), PlanConfig()
    for model, is_dealt in (("gpt-oss-120b", True), ("mixtral-8x7b", False)):
        best = _search(tmp_path, _costs(model), tensor_parallel_size=8, pipeline_parallel_size=2).best
        assert best.layout.deals_experts is is_dealt
        commands = serve_commands(best, model, found, config)
        engines = [engine_config_from_args(_serve_args(command.command)) for command in commands]
        assert len(engines) == 2 and all(engine.enable_expert_parallel is is_dealt for engine in engines)
        written = msgspec.yaml.decode(plan_file(best, model, found, config), type=PlanFile)
        assert written.enable_expert_parallel is is_dealt
        assert all(("--enable-expert-parallel" in node.command) is is_dealt for node in written.nodes)


def test_what_the_engine_refuses_is_not_planned(tmp_path: Path) -> None:
    sixteen = {"tensor_parallel_size": 16, "pipeline_parallel_size": 1}
    parts = _only(_search(tmp_path, _costs("mixtral-8x7b"), **sixteen))
    assert str(parts.plan.layout) == "TP16 x PP1" and isinstance(parts.other, Impossible)
    assert parts.why_not_other == "EP: 8 experts cannot be dealt evenly to 16 ranks"
    eight = {"tensor_parallel_size": 8, "pipeline_parallel_size": 1, "data_parallel_size": 1}
    dealt = _only(_search(tmp_path, _costs("mixtral-8x7b", 14340), **eight))
    assert str(dealt.plan.layout) == "TP8+EP x PP1"
    assert dealt.why_not_other == "no EP: an expert's 14340 inner numbers cannot be shared evenly by 8 ranks"
    with pytest.raises(ConfigError, match=r"TP16 x PP1: an expert's 14340 inner numbers .* possible are 1, 2, 4"):
        _search(tmp_path, _costs("mixtral-8x7b", 14340), **sixteen)


def test_a_dense_model_and_a_device_alone_have_one_way(tmp_path: Path) -> None:
    for costs, size in ((_costs("llama-3.1-8b"), 8), (_costs("qwen3-30b-a3b"), 1)):
        result = _search(tmp_path, costs, tensor_parallel_size=size, pipeline_parallel_size=2)
        assert all(ranked.other is None and not ranked.why_not_other for ranked in result.ranked)
        assert "EP" not in format_layouts(result, 9, False)


def test_the_advice_has_the_arithmetic_when_it_matters(tmp_path: Path) -> None:
    shares = ExpertShares(1, 8, 8, 2.0, 0.25, 1.0, 14336, True)
    advice = advise_experts("TP8 x PP1", False, 478.0, 191.0, "", shares)
    assert advice is not None and "1 rows take 2.0 of 8 experts: in parts a device reads 2.0 / 8 = 0.25" in advice.text
    assert "dealt the busiest reads 1.00, 4.00 times as many" in advice.text
    assert advice.text.endswith("makes 478 tokens/s in parts and 191 dealt, so parts of every expert")
    assert advise_experts("TP8 x PP1", False, 478.0, 474.0, "", shares) is None
    refused = advise_experts("TP16 x PP1", False, 478.0, None, "8 experts cannot be dealt", shares)
    assert refused is not None and refused.text.endswith("the other way cannot be: 8 experts cannot be dealt")
    costs, found = _costs("gpt-oss-120b"), cluster(tmp_path, TWO_NODES_OF_H100)
    config = PlanConfig(tensor_parallel_size=8, pipeline_parallel_size=2)
    said = {advice.rule: advice.text for advice in advise(costs, found, config, search(costs, found, config))}
    assert "in 16 bits, for 2,880 / 8 numbers are no whole blocks" in said["experts whole or in parts"]
    assert said["experts whole or in parts"].endswith("so --enable-expert-parallel")
