"""Chained stages generate what `transformers` does, answer what was asked, and refuse what was not promised."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stageline.checkpoint import open_checkpoint
from stageline.errors import ConfigError, FrameError
from stageline.pipeline.microbatch import Microbatch, MicrobatchLimits, MicrobatchResult
from stageline.sampling import SamplerSpec
from stageline.timeline.span import Span
from stageline.weights.reader import CheckpointReader
from stageline.worker.stage import Stage
from tests.model.requests_under_test import RequestsUnderTest
from tests.tiny_models import TinyModel, load_reference, reference_greedy, reference_logits

CPU = torch.device("cpu")
NUM_LAYERS = 4
PROMPTS = {0: [7, 42, 99, 3, 250] * 5, 1: [11], 2: list(range(40, 73))}


class CountingClock:
    """One second per look."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now_s(self) -> float:
        self._now_s += 1.0
        return self._now_s


@pytest.fixture(scope="module")
def checkpoint_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TinyModel(num_layers=NUM_LAYERS, max_position_embeddings=128).write(tmp_path_factory.mktemp("tiny"))


def make_limits(num_blocks: int = 40) -> MicrobatchLimits:
    return MicrobatchLimits(
        num_blocks=num_blocks, block_size=8, vocab_size=260, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=96
    )


class Pipeline:
    """Stages one behind the other, each prepared before the first one runs."""

    def __init__(self, path: Path, num_stages: int, dtype: torch.dtype = torch.float32) -> None:
        checkpoint = open_checkpoint(str(path))
        self.spans: list[Span] = []
        self.requests = RequestsUnderTest(make_limits())
        ends = [NUM_LAYERS * (index + 1) // num_stages for index in range(num_stages)]
        starts = [0, *ends[:-1]]
        with CheckpointReader(checkpoint, dtype, CPU) as reader:
            self.stages = [
                Stage(checkpoint.spec, range(start, end), reader, 96, stage_index=index, clock=CountingClock(),
                      record=self.spans.append)
                for index, (start, end) in enumerate(zip(starts, ends, strict=True))
            ]
        for stage in self.stages:
            stage.allocate_kv(make_limits())

    def step(self, rows: dict[int, int]) -> MicrobatchResult:
        return self.run(self.requests.microbatch(rows))

    def run(self, microbatch: Microbatch) -> MicrobatchResult:
        prepared = [stage.prepare(microbatch) for stage in self.stages]
        flowing: torch.Tensor | MicrobatchResult | None = None
        for stage, ready in zip(self.stages, prepared, strict=True):
            assert not isinstance(flowing, MicrobatchResult)
            flowing = stage.run(ready, flowing)
        assert isinstance(flowing, MicrobatchResult)
        self.requests.append(microbatch, flowing.token_ids)
        return flowing


@pytest.fixture(params=[1, 2, 3, 4])
def pipeline(checkpoint_path: Path, request: pytest.FixtureRequest) -> Pipeline:
    return Pipeline(checkpoint_path, request.param)


def test_greedy_tokens_equal_transformers_for_every_depth(pipeline: Pipeline, checkpoint_path: Path) -> None:
    reference = load_reference(checkpoint_path)
    for number, prompt in PROMPTS.items():
        pipeline.requests.add(number, prompt)
    pipeline.step({0: 10, 1: 1, 2: 30})
    pipeline.step({0: 15, 1: 1, 2: 3})
    for _ in range(12):
        pipeline.step({0: 1, 1: 1, 2: 1})
    for number, prompt in PROMPTS.items():
        generated = pipeline.requests.requests[number].tokens[len(prompt) :]
        assert len(generated) >= 13
        assert generated == reference_greedy(reference, prompt, len(generated))


def test_a_microbatch_may_be_prepared_while_earlier_ones_have_not_run(checkpoint_path: Path) -> None:
    """Removing a request in the later one does not disturb the earlier one, which still samples it."""
    pipeline, plain = Pipeline(checkpoint_path, 1), Pipeline(checkpoint_path, 1)
    (stage,) = pipeline.stages
    pipeline.requests.add(0, PROMPTS[0])
    first = pipeline.requests.microbatch({0: 25})
    pipeline.requests.remove(0)
    pipeline.requests.add(1, PROMPTS[2])
    second = pipeline.requests.microbatch({1: 33})
    prepared = [stage.prepare(first), stage.prepare(second)]
    results = [stage.run(one) for one in prepared]
    for number, prompt in ((0, PROMPTS[0]), (1, PROMPTS[2])):
        plain.requests.add(number, prompt)
        result = results[number]
        assert isinstance(result, MicrobatchResult)
        assert result.token_ids == plain.step({number: len(prompt)}).token_ids


def test_a_prompt_chunk_that_samples_nothing_answers_with_an_empty_result(pipeline: Pipeline) -> None:
    pipeline.requests.add(0, PROMPTS[2])
    result = pipeline.step({0: 16})
    assert result == MicrobatchResult(0, 0, [], [], [])


def test_a_microbatch_without_rows_passes_through(pipeline: Pipeline) -> None:
    pipeline.requests.add(0, PROMPTS[0])
    pipeline.step({0: 25})
    pipeline.requests.remove(0)
    assert pipeline.step({}) == MicrobatchResult(0, 1, [], [], [])


def test_prompt_logprobs_are_the_references(pipeline: Pipeline, checkpoint_path: Path) -> None:
    prompt = PROMPTS[2]
    expected = torch.log_softmax(reference_logits(load_reference(checkpoint_path), prompt), -1)
    pipeline.requests.add(0, prompt, SamplerSpec(seed=0, num_logprobs=2, num_prompt_logprobs=0))
    found: list[float] = []
    for chunk in (20, 13):
        result = pipeline.step({0: chunk})
        for run in result.prompt_logprobs:
            assert run.first_position == len(found) + 1
            found += [position.logprobs[0] for position in run.positions]
    assert found == pytest.approx([expected[i, prompt[i + 1]].item() for i in range(len(prompt) - 1)], abs=1e-4)
    assert result.logprobs[0] is not None
    assert result.logprobs[0].logprobs[0] == pytest.approx(expected[-1].max().item(), abs=1e-4)


def test_every_stage_records_forward_and_the_last_one_sample(pipeline: Pipeline) -> None:
    pipeline.requests.add(0, PROMPTS[0])
    pipeline.step({0: 25})
    last = len(pipeline.stages) - 1
    kinds = [(span.stage_index, span.microbatch, span.kind) for span in pipeline.spans]
    assert kinds == [(index, 0, "forward") for index in range(last + 1)] + [(last, 0, "sample")]
    assert all(span.end_s > span.start_s and span.num_tokens == 25 and span.num_rows == 1 for span in pipeline.spans)


def test_only_later_stages_expect_input_and_refuse_another(checkpoint_path: Path) -> None:
    pipeline = Pipeline(checkpoint_path, 2)
    pipeline.requests.add(0, PROMPTS[0])
    microbatch = pipeline.requests.microbatch({0: 25})
    first, last = pipeline.stages
    assert first.expected_input(microbatch) is None
    assert last.expected_input(microbatch) == ((25, 64), torch.float32)
    prepared = last.prepare(microbatch)
    with pytest.raises(FrameError, match=r"s1 m0: hidden states \(24, 64\)"):
        last.run(prepared, torch.zeros(24, 64))
    with pytest.raises(FrameError, match="bfloat16"):
        last.run(prepared, torch.zeros(25, 64, dtype=torch.bfloat16))


def test_input_is_not_changed_by_the_stage_that_reads_it(checkpoint_path: Path) -> None:
    pipeline = Pipeline(checkpoint_path, 2)
    pipeline.requests.add(0, PROMPTS[0])
    prepared = pipeline.stages[1].prepare(pipeline.requests.microbatch({0: 25}))
    hidden = torch.randn(25, 64, generator=torch.Generator().manual_seed(0))
    before = hidden.clone()
    pipeline.stages[1].run(prepared, hidden)
    assert torch.equal(hidden, before)


def test_a_microbatch_beyond_the_limits_is_refused(checkpoint_path: Path) -> None:
    pipeline = Pipeline(checkpoint_path, 1)
    pipeline.requests.add(0, [259] * 65)
    with pytest.raises(FrameError, match="65 tokens, limit 64"):
        pipeline.stages[0].prepare(pipeline.requests.microbatch({0: 65}))


def test_a_cache_that_does_not_fit_is_refused_with_the_numbers(checkpoint_path: Path) -> None:
    pipeline = Pipeline(checkpoint_path, 2)
    with pytest.raises(ConfigError, match=r"2000000000 blocks for 2 layers needs \d+ MiB on cpu"):
        pipeline.stages[0].allocate_kv(make_limits(num_blocks=2_000_000_000))


def test_allocating_again_forgets_every_request(checkpoint_path: Path) -> None:
    pipeline = Pipeline(checkpoint_path, 1)
    pipeline.requests.add(0, PROMPTS[0])
    first = pipeline.step({0: 25})
    pipeline.stages[0].allocate_kv(make_limits())
    pipeline.requests = RequestsUnderTest(make_limits())
    pipeline.requests.add(0, PROMPTS[0])
    assert pipeline.step({0: 25}) == first


def test_a_sequence_may_reach_exactly_max_model_len(checkpoint_path: Path) -> None:
    pipeline = Pipeline(checkpoint_path, 2)
    prompt = [index % 256 for index in range(95)]
    pipeline.requests.add(0, prompt)
    pipeline.step({0: 64})
    pipeline.step({0: 31})
    pipeline.step({0: 1})
    expected = reference_greedy(load_reference(checkpoint_path), prompt, 2)
    assert pipeline.requests.requests[0].tokens[95:] == expected


def test_greedy_tokens_in_bfloat16_are_the_same_alone_in_a_crowd_and_beside_drawn_ones(checkpoint_path: Path) -> None:
    """The likeliest token is found with and without writing logits, for one row and for several."""
    alone, crowd, mixed = (Pipeline(checkpoint_path, 1, torch.bfloat16) for _ in range(3))
    alone.requests.add(0, PROMPTS[0])
    for pipeline in (crowd, mixed):
        for number, prompt in PROMPTS.items():
            is_drawn = pipeline is mixed and number == 1
            pipeline.requests.add(number, prompt, SamplerSpec(temperature=1.0 if is_drawn else 0.0, seed=1))
    alone.step({0: 25})
    for pipeline in (crowd, mixed):
        pipeline.step({0: 25, 1: 1, 2: 33})
    for _ in range(12):
        alone.step({0: 1})
        crowd.step({0: 1, 1: 1, 2: 1})
        mixed.step({0: 1, 1: 1, 2: 1})
    tokens = {number: request.tokens for number, request in crowd.requests.requests.items()}
    assert alone.requests.requests[0].tokens == tokens[0] == mixed.requests.requests[0].tokens
    assert mixed.requests.requests[2].tokens == tokens[2]
