"""The cut of a running pipeline is moved, and nobody's tokens are lost, repeated or changed by it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from stageline import LLM, AsyncLLM, SamplingParams, StructuredOutputs
from stageline.config.engine_config import EngineConfig
from stageline.engine.core import EngineCore
from stageline.errors import ConfigError, WorkerLost
from stageline.outputs import RequestOutput
from tests.pipeline.failing import SETTINGS
from tests.pipeline.running import request
from tests.tiny_models import TinyModel, load_reference, reference_greedy

NUM_LAYERS = 8
PROMPTS = [[number + 1, 2, 3, 5, 8, 13] * 4 for number in range(6)]
# Some are over before the cut is moved, and some begin after it.
NUM_TOKENS = [10, 30, 60, 60, 45, 60]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TinyModel(num_layers=NUM_LAYERS).write(tmp_path_factory.mktemp("moving"))


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    reference = load_reference(model)
    return [reference_greedy(reference, *asked) for asked in zip(PROMPTS, NUM_TOKENS, strict=True)]


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


class CutsInBetween:
    """Asks for other cuts after some steps of the engine."""

    def __init__(self, core: EngineCore, monkeypatch: pytest.MonkeyPatch, cuts: dict[int, tuple[int, ...]]) -> None:
        self._step, self._cuts, self._num_steps = core.step, cuts, 0
        self._core = core
        monkeypatch.setattr(core, "step", self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._num_steps += 1
        if self._num_steps in self._cuts:
            self._core.cut_otherwise(self._cuts[self._num_steps])
        return self._step(*args, **kwargs)


@pytest.mark.parametrize(("executor", "ranks"), [("multi_process", "2,1"), ("in_process", "1")])
def test_tokens_do_not_depend_on_the_cut_being_moved(
    model: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, executor: str, ranks: str
) -> None:
    settings = {**SETTINGS, "pipeline_parallel_size": 2, "distributed_executor_backend": executor, "max_num_seqs": 4}
    settings["tensor_parallel_size"] = ranks
    with LLM(model, **settings) as llm:
        cuts = {15: (1, 7), 40: (6, 2), 60: (5, 3)}
        CutsInBetween(llm._core, monkeypatch, cuts)
        outputs = llm.generate(PROMPTS, [greedy(number) for number in NUM_TOKENS], use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == expected
        assert [len(part.layers) for part in llm.partition] == [5, 3]
        assert "[5, 8)" in llm.startup_table()
        first, last = llm.stage_reports
        assert first.weight_bytes > last.weight_bytes
        with pytest.raises(ConfigError, match="9,-1"):
            llm._core.cut_otherwise((9, -1))
        # Blocks that were shared in an earlier epoch are not shared in this one.
        [again] = llm.generate([PROMPTS[3]], greedy(20), use_tqdm=False)
        assert again.outputs[0].token_ids == expected[3][:20]


def test_drawn_penalised_described_and_constrained_tokens_do_not_depend_on_it_either(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**SETTINGS, "pipeline_parallel_size": 2, "distributed_executor_backend": "in_process"}
    digits = StructuredOutputs(regex="[0-9]{20,30}")
    asked = [
        SamplingParams(temperature=0.9, seed=7, max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.5, max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=0.0, logprobs=2, prompt_logprobs=1, max_tokens=40, ignore_eos=True),
        SamplingParams(temperature=1.0, seed=1, structured_outputs=digits, max_tokens=40),
    ]
    answers = []
    with LLM(model, **settings) as llm:
        for cuts in ({}, {3: (1, 7), 12: (7, 1), 25: (2, 6)}):
            CutsInBetween(llm._core, monkeypatch, cuts)
            answers.append(llm.generate(PROMPTS[: len(asked)], asked, use_tqdm=False))
        assert [len(part.layers) for part in llm.partition] == [2, 6]
    unmoved, moved = answers
    for before, after in zip(unmoved, moved, strict=True):
        assert after.outputs[0].token_ids == before.outputs[0].token_ids
        assert after.outputs[0].text == before.outputs[0].text
    assert log_probabilities(moved[2]) == pytest.approx(log_probabilities(unmoved[2]), abs=1e-4)


def log_probabilities(output: RequestOutput) -> dict[tuple[int, int], float]:
    """By position and token, of the prompt and of what followed."""
    positions = [*(output.prompt_logprobs or []), *(output.outputs[0].logprobs or [])]
    return {(at, token): one.logprob for at, found in enumerate(positions) for token, one in (found or {}).items()}


def test_a_cut_that_leaves_too_little_kv_cache_is_refused_and_all_goes_on(model: Path, expected: Any) -> None:
    settings = {**SETTINGS, "pipeline_parallel_size": 2, "distributed_executor_backend": "in_process"}
    with LLM(model, **{**settings, "kv_cache_memory": "300KiB"}) as llm:
        with pytest.raises(ConfigError, match="fewer than the"):
            llm._core.cut_otherwise((7, 1))
        [output] = llm.generate([PROMPTS[0]], greedy(10), use_tqdm=False)
        assert output.outputs[0].token_ids == expected[0]
        assert [len(part.layers) for part in llm.partition] == [4, 4]


def test_a_stage_that_is_lost_while_the_cut_is_moved_takes_no_token_along(
    model: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a result brought is told before the stages are asked for anything: nobody else knows of it any more."""

    def lose(stages: Any) -> Any:
        raise WorkerLost(1, "killed while it changed its layers")

    settings = {**SETTINGS, "pipeline_parallel_size": 2, "distributed_executor_backend": "in_process"}
    with LLM(model, **settings) as llm:
        core, told = llm._core, []
        monkeypatch.setattr(core._executor, "repartition", lose)
        core.add(request("R", PROMPTS[1], NUM_TOKENS[1]))
        with pytest.raises(WorkerLost):
            while True:
                if len(told) == 10:
                    core.cut_otherwise((1, 7))
                told += [token_id for update in core.step() for token_id in update.token_ids]
        known = core._scheduler._by_id["R"].token_ids[len(PROMPTS[1]) :]
        assert told == known == expected[1][: len(told)]


def test_a_stage_that_becomes_slow_while_serving_loses_layers(
    model: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAGELINE_INJECT_SLOWDOWN", "s1:12@m60")
    config = EngineConfig(
        model=str(model),
        **{
            **SETTINGS,
            "pipeline_parallel_size": 2,
            "rebalance": True,
            "rebalance_patience_s": 0.2,
            "rebalance_gain": 0.3,
            "heartbeat_timeout_s": 4.0,
        },
    )

    async def main() -> None:
        async with await AsyncLLM.start(config) as llm:
            assert [stage.end_layer for stage in (await llm.stats()).facts.stages] == [4, 8]

            async def ask(index: int) -> None:
                seen: list[int] = []
                async for output in llm.generate(PROMPTS[index], greedy(NUM_TOKENS[index])):
                    seen += output.outputs[0].token_ids
                    assert seen == expected[index][: len(seen)]
                assert len(seen) == NUM_TOKENS[index]

            async def keep_busy(index: int) -> None:
                while True:
                    await ask(index)

            async def wait_for_the_move() -> None:
                while not any(event.kind == "rebalance" for event in (await llm.stats()).events):
                    await ask(3)

            others = [asyncio.ensure_future(keep_busy(index)) for index in range(len(PROMPTS))]
            try:
                async with asyncio.timeout(60):
                    await wait_for_the_move()
                await ask(5)
            finally:
                for other in others:
                    other.cancel()
                results = await asyncio.gather(*others, return_exceptions=True)
            assert all(isinstance(result, asyncio.CancelledError) for result in results)
            stats = await llm.stats()
            assert stats.facts.stages[0].end_layer > 4
            assert {"imbalance", "rebalance"} <= {event.kind for event in stats.events}
            assert stats.scheduler.num_preemptions == 0
            llm.check_health()

    asyncio.run(main())
