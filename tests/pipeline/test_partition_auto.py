"""`--pp-layer-partition auto` and `stageline tune` on real stages: times are taken, a cut follows, tokens stay."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path

import pytest

from stageline import LLM, SamplingParams
from stageline.checkpoint import open_checkpoint
from stageline.cli.main import main
from stageline.clock import MonotonicClock
from stageline.config import environment
from stageline.config.engine_config import EngineConfig
from stageline.cost.layer_costs import costs_from_measured, layer_kinds
from stageline.cost.profile import Profile, load_profile, save_profile
from stageline.engine.partitioning import choose_partition, profile_key_of
from stageline.errors import WorkerLost
from stageline.executor.executor import CalibrationPlan
from stageline.executor.multi_process import MultiProcessExecutor
from stageline.pipeline.item_times import PlannedMicrobatch, StageItemTimes
from stageline.pipeline.partition import StageLayers, stages_of
from stageline.pipeline.partition_by_cost import ItemCosts, StageRoom
from tests.tiny_models import TinyModel, load_reference, reference_greedy

PROMPT = [3, 1, 4, 1, 5]
NUM_LAYERS = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return TinyModel(num_layers=NUM_LAYERS).write(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> None:
    """In this process alone: the stages keep their compiled kernels."""
    monkeypatch.setattr(environment, "cache_directory", lambda: tmp_path / "cache")


def _settings(**changes: object) -> dict[str, object]:
    return {"dtype": "float32", "device": "cpu", "bind_cores": False, "kv_cache_memory": "32MiB", **changes}


def _generate(llm: LLM) -> list[int]:
    [output] = llm.generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True), False)
    return output.outputs[0].token_ids


def test_stages_time_some_layers_and_then_load_those_they_are_given(model: Path, caplog) -> None:
    settings = _settings(pipeline_parallel_size=3, tensor_parallel_size="2,1,1", pp_layer_partition="auto")
    with caplog.at_level(logging.INFO), LLM(model, **settings) as llm:
        counts = [len(stage.layers) for stage in llm.partition]
        tokens = _generate(llm)
    assert sum(counts) == NUM_LAYERS and min(counts) >= 1
    assert tokens == reference_greedy(load_reference(model), PROMPT, 12)
    [note] = [record.message for record in caplog.records if "--pp-layer-partition auto" in record.message]
    assert ",".join(map(str, counts)) in note and "taken just now by the stages" in note


def test_calibration_times_the_planned_layers_and_each_end_where_it_is(model: Path) -> None:
    heard: list[StageItemTimes] = []

    def choose(measured: list[StageItemTimes]) -> tuple[StageLayers, ...]:
        heard.extend(measured)
        return stages_of((1, 4, 1))

    executor = _executor(model, CalibrationPlan(PlannedMicrobatch(3, 20), (0, 2), choose), (2, 2, 2), ranks="1,1,2")
    try:
        executor.load()
        assert [len(stage.layers) for stage in executor.partition] == [1, 4, 1]
    finally:
        executor.close()
    assert [times.stage_index for times in heard] == [0, 1, 2]
    assert all(times.layers == [0, 2] and min(times.layers_s) > 0 and times.num_rows == 3 for times in heard)
    assert [times.embedding_s is not None for times in heard] == [True, False, False]
    assert [times.head_s is not None for times in heard] == [False, False, True]


def _executor(
    model: Path, calibration: CalibrationPlan, counts: tuple[int, ...] = (3, 3), ranks: str = "1"
) -> MultiProcessExecutor:
    config = EngineConfig(
        model=str(model), pipeline_parallel_size=len(counts), tensor_parallel_size=ranks, **_settings()
    )
    return MultiProcessExecutor(config, str(model), stages_of(counts), 64, MonotonicClock(), calibration)


@pytest.mark.parametrize(("stage_index", "first", "end"), [(0, 0, 6), (1, 4, 3)])
def test_layers_that_cannot_be_a_stage_s_are_refused_by_it(
    model: Path, stage_index: int, first: int, end: int
) -> None:

    def choose(measured: list[StageItemTimes]) -> tuple[StageLayers, ...]:
        stages = list(stages_of((3, 3)))
        stages[stage_index] = dataclasses.replace(stages[stage_index], layers=range(first, end))
        return tuple(stages)

    executor = _executor(model, CalibrationPlan(PlannedMicrobatch(2, 8), (0,), choose))
    try:
        with pytest.raises(WorkerLost, match=rf"layers \[{first}, {end}\) of 6 for stage {stage_index} of 2"):
            executor.load()
    finally:
        executor.close()


def test_a_refusal_to_cut_ends_the_stages(model: Path) -> None:
    def choose(measured: list[StageItemTimes]) -> tuple[StageLayers, ...]:
        raise ZeroDivisionError("the cut is wrong")

    executor = _executor(model, CalibrationPlan(PlannedMicrobatch(2, 8), (0,), choose))
    pids = executor.worker_pids
    try:
        with pytest.raises(ZeroDivisionError):
            executor.load()
    finally:
        executor.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_items_are_timed_from_the_first_question_on(model: Path) -> None:
    with LLM(model, pipeline_parallel_size=2, **_settings()) as llm:
        _generate(llm)
        assert [times.num_microbatches for times in llm.item_times()] == [0, 0]
        _generate(llm)
        first, last = llm.item_times()
        # One prompt's microbatch and 11 decodes, of which the decodes count.
        assert (first.num_microbatches, last.num_microbatches) == (11, 11)
        assert (first.layers, last.layers) == ([0, 1, 2], [3, 4, 5])
        assert len(last.layers_s) == 3 and min(first.layers_s + last.layers_s) > 0
        assert first.embedding_s is not None and first.head_s is None
        assert last.head_s is not None and last.embedding_s is None
        assert [times.num_microbatches for times in llm.item_times()] == [0, 0]


def test_tune_measures_both_partitions_and_auto_uses_what_it_applied(model: Path, tmp_path, capsys) -> None:
    result = tmp_path / "result.json"
    status = main(
        [
            "tune", str(model), "-pp", "2", "--concurrency", "4", "--context", "20", "--output-len", "12",
            "--repetitions", "1", "--pp-layer-partition", "5,1", "--dtype", "float32", "--device", "cpu",
            "--no-bind-cores", "--kv-cache-memory", "32MiB", "--apply", "--output", str(result), "-tp", "2,1",
        ]
    )  # fmt: skip
    assert status == 0
    printed = capsys.readouterr().out
    assert "s0 embedding" in printed and "s1 norm + LM head" in printed and "output tokens/s" in printed
    found = json.loads(result.read_text())
    assert found["partitions"][0]["counts"] == [5, 1]
    assert len(found["layers_s"]) == NUM_LAYERS and min(found["layers_s"]) > 0
    config = EngineConfig(
        model=str(model), pipeline_parallel_size=2, pp_layer_partition="auto", **_settings(bind_cores=True),
        tensor_parallel_size="2,1",
    )  # fmt: skip
    checkpoint = open_checkpoint(str(model))
    profile = load_profile(profile_key_of(config, checkpoint))
    assert profile is not None and list(profile.costs.layers_s) == found["layers_s"]
    choice = choose_partition(config, checkpoint, 64)
    assert choice.calibration is None and "a profile of `stageline tune`" in choice.note
    assert [len(stage.layers) for stage in choice.stages] == found["proposal"]
    # Layers that are shared otherwise take other times.
    assert load_profile(profile_key_of(dataclasses.replace(config, tensor_parallel_size="1"), checkpoint)) is None


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["-pp", "1"], "tune at least 2 stages"),
        (["-pp", "3", "--concurrency", "2"], "give at least 3"),
        (["-pp", "2", "--context", "1"], "--context is 1"),
        (["-pp", "2", "--distributed-executor-backend", "in_process"], "tune with multi_process"),
        (["-pp", "2", "--pp-layer-partition", "5,2"], "6 layers"),
    ],
)
def test_tune_refuses_before_a_start_what_it_could_not_measure(model: Path, capsys, flags: list[str], said) -> None:
    assert main(["tune", str(model), *flags]) == 2
    assert said in capsys.readouterr().err


def test_stages_of_one_process_are_cut_by_an_estimate(model: Path) -> None:
    config = EngineConfig(
        model=str(model), pipeline_parallel_size=2, pp_layer_partition="auto",
        **_settings(distributed_executor_backend="in_process"),
    )  # fmt: skip
    choice = choose_partition(config, open_checkpoint(str(model)), 64)
    assert choice.calibration is None and "an estimate from the model's shapes" in choice.note
    assert sum(len(stage.layers) for stage in choice.stages) == NUM_LAYERS


def test_latency_is_another_objective_than_throughput(model: Path) -> None:
    asked = EngineConfig(model=str(model), pipeline_parallel_size=2, **_settings())
    checkpoint = open_checkpoint(str(model))
    costs = ItemCosts(0.0, (0.01,) * NUM_LAYERS, 0.0)
    rooms = (StageRoom(), StageRoom(2.0))
    key = profile_key_of(asked, checkpoint)
    save_profile(Profile(key, str(model), PlannedMicrobatch(4, 20), costs, rooms))
    for text, counts in [("auto", [2, 4]), ("auto-latency", [1, 5])]:
        config = dataclasses.replace(asked, pp_layer_partition=text)
        assert [len(stage.layers) for stage in choose_partition(config, checkpoint, 64).stages] == counts


def test_a_profile_with_a_heavy_head_moves_layers_to_the_front(model: Path) -> None:
    config = EngineConfig(model=str(model), pipeline_parallel_size=2, pp_layer_partition="auto", **_settings())
    checkpoint = open_checkpoint(str(model))
    executor_times = StageItemTimes(0, 5, 4, list(range(NUM_LAYERS)), [0.01] * NUM_LAYERS, 0.0, 0.04, 0, "cpu")
    costs = costs_from_measured([executor_times], layer_kinds(checkpoint)).items
    key = profile_key_of(config, checkpoint)
    save_profile(Profile(key, str(model), PlannedMicrobatch(4, 20), costs, (StageRoom(),)))
    assert [len(stage.layers) for stage in choose_partition(config, checkpoint, 64).stages] == [5, 1]
    with LLM(model, pipeline_parallel_size=2, pp_layer_partition="auto", **_settings()) as llm:
        assert [len(stage.layers) for stage in llm.partition] == [5, 1]
        assert _generate(llm) == reference_greedy(load_reference(model), PROMPT, 12)
