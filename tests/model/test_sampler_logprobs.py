"""Log-probabilities are of the logits as the model gave them, whatever the rules do to the choice."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from stageline.pipeline.microbatch import Microbatch
from stageline.sampling import SamplerSpec, TokenLogprobs
from stageline.worker.logprobs import token_logprobs
from stageline.worker.sampler import Sampler
from tests.model.sampler_reference import microbatch_of, random_logits

VOCAB_SIZE = 700


def _check(described: TokenLogprobs, logits: torch.Tensor, token_id: int, count: int) -> None:
    logprobs = torch.log_softmax(logits.double(), -1).numpy()
    order = np.argsort(-logits.double().numpy(), kind="stable")[:count]
    assert described.token_ids == [token_id, *order.tolist()]
    np.testing.assert_allclose(described.logprobs, logprobs[[token_id, *order]], atol=1e-5)
    assert described.rank == 1 + int((logprobs > logprobs[token_id]).sum())


def test_the_chosen_token_comes_first_then_the_likeliest() -> None:
    specs = [
        SamplerSpec(seed=1, num_logprobs=5),
        SamplerSpec(seed=2, temperature=1.5, num_logprobs=0),
        SamplerSpec(seed=3),
        SamplerSpec(seed=4, temperature=0.5, num_logprobs=20, allowed_token_ids=(3, 4), repetition_penalty=1.5),
    ]
    logits = random_logits(4, VOCAB_SIZE, seed=1)
    sampler = Sampler(VOCAB_SIZE, torch.device("cpu"))
    microbatch = microbatch_of(specs, [[1, 2]] * 4, [2] * 4)
    sampler.apply(microbatch)
    tokens, logprobs = sampler.sample(microbatch, logits.clone())
    assert logprobs[2] is None
    for row in (0, 1, 3):
        described = logprobs[row]
        assert described is not None
        _check(described, logits[row], tokens[row], specs[row].num_logprobs)


def test_rules_do_not_show_in_the_logprobs_when_every_row_asks() -> None:
    spec = SamplerSpec(seed=1, num_logprobs=3, allowed_token_ids=(3, 4))
    logits = random_logits(1, VOCAB_SIZE, seed=1)
    sampler = Sampler(VOCAB_SIZE, torch.device("cpu"))
    microbatch = microbatch_of([spec], [[1, 2]], [2])
    sampler.apply(microbatch)
    tokens, logprobs = sampler.sample(microbatch, logits.clone())
    assert logprobs[0] is not None
    _check(logprobs[0], logits[0], tokens[0], 3)


def test_no_row_asking_means_no_logprobs() -> None:
    sampler = Sampler(VOCAB_SIZE, torch.device("cpu"))
    microbatch = microbatch_of([SamplerSpec(seed=1, temperature=1.0)], [[1, 2]], [2])
    sampler.apply(microbatch)
    assert sampler.sample(microbatch, random_logits(1, VOCAB_SIZE, seed=1))[1] == []


def test_more_rows_than_are_described_at_once() -> None:
    logits = random_logits(300, 90, seed=2)
    tokens = [row % 90 for row in range(300)]
    for row, described in enumerate(token_logprobs(logits, tokens, [row % 4 for row in range(300)])):
        _check(described, logits[row], tokens[row], row % 4)


@pytest.mark.parametrize("chunks", [[9], [1, 8], [4, 4, 1], [3, 3, 3], [9, 2]])
def test_every_prompt_token_but_the_first_is_described_once_whatever_the_chunks(chunks: list[int]) -> None:
    """One row per position: a request beside it does not ask, and the tokens after the prompt are not described."""
    prompt = [4, 8, 15, 16, 23, 42, 4, 8, 15]
    asking = SamplerSpec(seed=1, num_prompt_logprobs=2)
    silent = SamplerSpec(seed=1)
    all_logits = random_logits(len(prompt) + 2, VOCAB_SIZE, seed=3)
    sampler = Sampler(VOCAB_SIZE, torch.device("cpu"))
    sampler.apply(microbatch_of([silent, asking], [[1], prompt], [1, len(prompt)]))
    described: dict[int, TokenLogprobs] = {}
    start = 0
    for number, size in enumerate(chunks):
        microbatch = Microbatch(0, number, [], [], [], [0, 1], [number, start], [1, size], [0] * (1 + size), [])
        logits = torch.cat((torch.full((1, VOCAB_SIZE), torch.nan), all_logits[start : start + size]))
        for run in sampler.prompt_logprobs(microbatch, lambda indices, logits=logits: logits[list(indices)]):
            assert run.request_number == 1
            for offset, answer in enumerate(run.positions):
                assert described.setdefault(run.first_position + offset, answer) is answer
        start += size
    assert sorted(described) == list(range(1, len(prompt)))
    for position, answer in described.items():
        _check(answer, all_logits[position - 1], prompt[position], 2)


def test_the_logits_of_a_long_prompt_are_asked_for_in_parts() -> None:
    """The logits of 2048 prompt tokens at once would take 0.4 GB with a vocabulary of 50 000."""
    prompt = [7 * index % VOCAB_SIZE for index in range(300)]
    all_logits = random_logits(len(prompt), VOCAB_SIZE, seed=4)
    sampler = Sampler(VOCAB_SIZE, torch.device("cpu"))
    sampler.apply(microbatch_of([SamplerSpec(seed=1, num_prompt_logprobs=1)], [prompt], [len(prompt)]))
    microbatch = Microbatch(0, 1, [], [], [], [0], [0], [len(prompt)], [0] * len(prompt), [])
    asked: list[int] = []

    def logits_of(indices: Sequence[int]) -> torch.Tensor:
        assert len(indices) <= 128
        asked.extend(indices)
        return all_logits[list(indices)]

    (run,) = sampler.prompt_logprobs(microbatch, logits_of)
    assert asked == list(range(len(prompt) - 1))
    assert (run.first_position, len(run.positions)) == (1, len(prompt) - 1)
    for position, answer in enumerate(run.positions, start=1):
        _check(answer, all_logits[position - 1], prompt[position], 1)
