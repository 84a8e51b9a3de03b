"""The law: announcing decodes before their tokens are known changes no answer, whatever is asked of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stageline import LLM, SamplingParams, StructuredOutputs
from stageline.outputs import CompletionOutput
from tests.pipeline.failing import SETTINGS
from tests.tiny_models import TinyModel

GREEDY: dict[str, Any] = {"temperature": 0.0}
DRAWN: dict[str, Any] = {"temperature": 1.0, "seed": 7}
ASKED: list[dict[str, Any]] = [
    {**GREEDY, "ignore_eos": True},
    {**GREEDY},
    {**GREEDY, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "logprobs": 2},
    {**GREEDY, "min_tokens": 9, "stop_token_ids": list(range(40, 140))},
    {**GREEDY, "structured_outputs": StructuredOutputs(regex="[0-9]{3}-[0-9]{4}")},
    {**DRAWN, "ignore_eos": True},
    {**DRAWN, "top_p": 0.8, "presence_penalty": 1.0},
    {**DRAWN, "stop": ["a", "e", "1"]},
    {**DRAWN, "bad_words": ["a", "the"], "top_k": 20, "logprobs": 0},
    {**DRAWN, "max_tokens": 2},
    {**DRAWN, "max_tokens": 1},
]
PROMPTS = [f"Prompt {index}: " + "what follows? " * (index % 4) for index in range(2 * len(ASKED))]
PARAMS = [SamplingParams(**{"max_tokens": 40, **ASKED[index % len(ASKED)]}) for index in range(len(PROMPTS))]


def answers(model: Path, **settings: Any) -> tuple[list[CompletionOutput], int]:
    """Returns: the answers, and how many requests were preempted."""
    with LLM(str(model), max_num_seqs=16, **{**SETTINGS, **settings}) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        found = [output.outputs[0] for output in outputs]
        return found, sum(answer.timings.num_preemptions for answer in found)


def said(answer: CompletionOutput) -> tuple[Any, ...]:
    logprobs = [list(position) for position in answer.logprobs or []]
    return answer.token_ids, answer.text, answer.finish_reason, answer.stop_reason, logprobs


def test_answers_are_the_same_with_and_without_look_ahead(tmp_path: Path) -> None:
    """Ends of every kind, rules that look back, grammars beside free answers, memory that runs out."""
    model = TinyModel().write(tmp_path / "tiny")
    expected, _ = answers(model, distributed_executor_backend="in_process", pipeline_parallel_size=1)
    assert {answer.finish_reason for answer in expected} == {"stop", "length"}
    for num_stages in (1, 2):
        got, num_preemptions = answers(model, pipeline_parallel_size=num_stages, kv_cache_memory="250KB")
        assert [said(answer) for answer in got] == [said(answer) for answer in expected]
        assert num_preemptions > 0
