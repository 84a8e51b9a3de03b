"""A slowdown that was asked for is there, in every span, and changes no token."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest

from stageline import LLM, SamplingParams
from stageline.errors import ConfigError
from stageline.timeline.span import Span
from tests.pipeline.failing import SETTINGS
from tests.tiny_models import TinyModel

PROMPT = [3, 1, 4, 1, 5]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return TinyModel(num_layers=4).write(tmp_path_factory.mktemp("slowed"))


def run(model: Path, **settings) -> tuple[list[int], list[Span]]:
    with LLM(model, **{**SETTINGS, "pipeline_parallel_size": 2, **settings}) as llm:
        [output] = llm.generate([PROMPT], GREEDY, use_tqdm=False)
        return output.outputs[0].token_ids, llm.spans()


@pytest.mark.parametrize("executor", ["multi_process", "in_process"])
def test_a_slowed_stage_takes_longer_and_says_the_same(model, monkeypatch, executor):
    tokens, _ = run(model, distributed_executor_backend=executor)
    monkeypatch.setenv("STAGELINE_INJECT_SLOWDOWN", "s0:30")
    slow_tokens, spans = run(model, distributed_executor_backend=executor)
    forward_s = [
        median(span.end_s - span.start_s for span in spans if span.kind == "forward" and span.stage_index == stage)
        for stage in range(2)
    ]
    assert slow_tokens == tokens
    # 30 times as long, in a process that may have had less of its core than the other.
    assert forward_s[0] > 3 * forward_s[1]


def test_what_a_slowed_link_carries_comes_later(model, monkeypatch):
    monkeypatch.setenv("STAGELINE_INJECT_SLOWDOWN", "link0:20ms")
    _, spans = run(model)
    sent_s = {span.microbatch: span.start_s for span in spans if span.kind == "send" and span.stage_index == 0}
    begun_s = {span.microbatch: span.start_s for span in spans if span.kind == "forward" and span.stage_index == 1}
    assert len(sent_s) == len(begun_s) >= GREEDY.max_tokens
    assert all(begun_s[microbatch] - sent_s[microbatch] >= 20e-3 for microbatch in sent_s)


def test_a_slowdown_of_a_stage_that_is_not_there_is_refused(model, monkeypatch):
    monkeypatch.setenv("STAGELINE_INJECT_SLOWDOWN", "s2:2")
    with pytest.raises(ConfigError, match="there are stages s0 to s1"):
        run(model)
