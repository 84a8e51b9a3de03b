"""Every rule of sampling against its plain form, one row at a time."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from stageline.errors import FrameError
from stageline.pipeline.microbatch import Microbatch
from stageline.sampling import SamplerSpec
from stageline.worker.choice import random_fraction
from stageline.worker.leading_tokens import largest, leading_tokens
from stageline.worker.sampler import Sampler
from stageline.worker.sampler_rules import SampledRow, change_logits
from stageline.worker.token_history import TokenHistory
from tests.model.sampler_reference import (
    changed_logits,
    distribution,
    microbatch_of,
    random_logits,
    sample_once,
)

VOCAB_SIZE = 300
RULES = {
    "nothing": SamplerSpec(seed=1),
    "allowed": SamplerSpec(seed=1, allowed_token_ids=(5, 17, 200)),
    "bad words": SamplerSpec(seed=1, bad_words=((8,), (2, 3, 9), (4, 3, 9), (1, 2, 3, 4, 10))),
    "min tokens": SamplerSpec(seed=1, min_tokens=4, forbidden_before_min_tokens=(0, 7)),
    "min tokens reached": SamplerSpec(seed=1, min_tokens=3, forbidden_before_min_tokens=(0, 7)),
    "bias": SamplerSpec(seed=1, logit_bias=((0, 50.0), (7, -100.0), (299, 1.5))),
    "repetition": SamplerSpec(seed=1, repetition_penalty=1.7),
    "repetition wanted": SamplerSpec(seed=1, repetition_penalty=0.6),
    "presence": SamplerSpec(seed=1, presence_penalty=1.25),
    "frequency": SamplerSpec(seed=1, frequency_penalty=-0.75),
    "all": SamplerSpec(
        seed=1,
        allowed_token_ids=tuple(range(0, 300, 2)),
        bad_words=((8,), (2, 3, 10)),
        min_tokens=9,
        forbidden_before_min_tokens=(6,),
        logit_bias=((2, 3.0), (3, 4.0)),
        repetition_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=0.25,
    ),
}
HISTORY = [4, 2, 2, 100, 4, 2, 3]
NUM_PROMPT_TOKENS = 4


def _row(spec: SamplerSpec, history: list[int], num_prompt_tokens: int) -> SampledRow:
    kept = TokenHistory(history, num_prompt_tokens) if spec.needs_history else None
    return SampledRow(spec, kept, len(history) - num_prompt_tokens)


@pytest.mark.parametrize("name", RULES)
def test_a_rule_changes_the_logits_as_its_plain_form_does(name: str) -> None:
    logits = random_logits(1, VOCAB_SIZE, seed=2)
    expected = changed_logits(logits[0].numpy(), RULES[name], HISTORY, NUM_PROMPT_TOKENS)
    change_logits(logits, [_row(RULES[name], HISTORY, NUM_PROMPT_TOKENS)])
    np.testing.assert_allclose(logits[0].numpy(), expected, rtol=1e-5)


def test_rules_of_one_row_leave_the_other_rows_alone() -> None:
    logits = random_logits(len(RULES), VOCAB_SIZE, seed=3)
    expected = [
        changed_logits(row.numpy(), spec, HISTORY, NUM_PROMPT_TOKENS)
        for row, spec in zip(logits, RULES.values(), strict=True)
    ]
    change_logits(logits, [_row(spec, HISTORY, NUM_PROMPT_TOKENS) for spec in RULES.values()])
    np.testing.assert_allclose(logits.numpy(), np.stack(expected), rtol=1e-5)


def test_penalties_follow_the_tokens_that_were_generated() -> None:
    """The counts kept token by token are those of a history counted anew."""
    spec = SamplerSpec(seed=1, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.5)
    sampler = Sampler(VOCAB_SIZE, torch.device("cpu"))
    history = [1, 2, 1]
    sampler.apply(microbatch_of([spec], [history], [3]))
    for step in range(200):
        logits = random_logits(1, VOCAB_SIZE, seed=step, scale=1.0)
        microbatch = Microbatch(0, step, [], [], [], [0], [len(history) - 1], [1], [history[-1]], [0])
        expected = int(np.argmax(changed_logits(logits[0].numpy(), spec, history, 3)))
        tokens, _ = sampler.sample(microbatch, logits.clone())
        assert tokens == [expected], f"step {step}"
        history.append(tokens[0])


def test_rules_that_forbid_every_allowed_token_yield_to_the_allowed_ones() -> None:
    spec = SamplerSpec(
        seed=1, allowed_token_ids=(5, 6), bad_words=((5,),), min_tokens=3, forbidden_before_min_tokens=(6,)
    )
    assert sample_once(random_logits(1, VOCAB_SIZE, seed=4), [spec], [HISTORY], [len(HISTORY)])[0] in (5, 6)


@pytest.mark.parametrize("temperature", [0.0, 1e-9])
def test_greedy_takes_the_largest_logit_and_of_equals_the_lowest_id(temperature: float) -> None:
    logits = torch.zeros(3, VOCAB_SIZE)
    logits[0, [40, 41, 299]] = 2.0
    logits[1, 299] = 1.0
    specs = [SamplerSpec(seed=1, temperature=temperature)] * 3
    assert sample_once(logits, specs, [[1]] * 3, [1] * 3) == [40, 299, 0]


@pytest.mark.parametrize("vocab_size", [1, 7, 32, 33, 1000, 4096, 5001])
def test_leading_tokens_are_those_of_a_full_stable_sort(vocab_size: int) -> None:
    logits = random_logits(3, vocab_size, seed=vocab_size)
    logits[1] = logits[1].round()
    logits[2, vocab_size // 3 :] = -torch.inf
    values, ids = logits.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(largest(logits), ids[:, 0])
    for k in {1, 5, 31, vocab_size // 2 + 1, vocab_size, vocab_size + 5}:
        leading_values, leading_ids = leading_tokens(logits, k)
        assert torch.equal(leading_values, values[:, :k])
        assert torch.equal(leading_ids, ids[:, :k])


def _random_spec(rng: random.Random, vocab_size: int) -> SamplerSpec:
    def some(value: float | int | tuple[object, ...], otherwise: object) -> object:
        return value if rng.random() < 0.3 else otherwise

    return SamplerSpec(
        seed=rng.getrandbits(63),
        temperature=rng.choice([0.0, 0.3, 0.8, 1.0, 2.5, 30.0]),
        top_k=rng.choice([0, 0, -1, 1, 3, 50, 64, 65, 300, vocab_size, vocab_size + 9]),
        top_p=rng.choice([1.0, 1.0, 0.01, 0.5, 0.9, 0.99]),
        min_p=rng.choice([0.0, 0.0, 0.02, 0.3, 1.0]),
        repetition_penalty=some(1.3, 1.0),
        frequency_penalty=some(0.4, 0.0),
        logit_bias=some(((3, 2.0), (vocab_size - 1, -3.0)), ()),
        min_tokens=some(5, 0),
        forbidden_before_min_tokens=(2, 3),
        allowed_token_ids=some(tuple(range(1, vocab_size, 3)), ()),
        bad_words=some(((2, 3), (6,)), ()),
    )


@pytest.mark.parametrize("vocab_size", [33, 1000, 12000])
def test_a_batch_of_anything_is_chosen_row_by_row_as_the_plain_form_chooses(vocab_size: int) -> None:
    """With the row's random number in hand, the token is where the plain distribution, summed by id, exceeds it."""
    rng = random.Random(vocab_size)
    specs = [_random_spec(rng, vocab_size) for _ in range(60)]
    histories = [[rng.randrange(vocab_size) for _ in range(rng.randrange(3, 20))] for _ in specs]
    prompts = [rng.randrange(1, len(history) + 1) for history in histories]
    logits = random_logits(len(specs), vocab_size, seed=vocab_size)
    tokens = sample_once(logits, specs, histories, prompts)
    for row, (spec, history, num_prompt, token) in enumerate(zip(specs, histories, prompts, tokens, strict=True)):
        changed = changed_logits(logits[row].numpy(), spec, history, num_prompt)
        if spec.temperature == 0.0:
            assert changed[token] == pytest.approx(changed.max(), rel=1e-6), f"row {row}: {spec}"
            continue
        probabilities = distribution(changed, spec)
        fraction = random_fraction(spec.seed, len(history) - num_prompt)
        end = np.cumsum(probabilities)[token]
        assert end - probabilities[token] - 1e-6 <= fraction <= end + 1e-6, f"row {row}: {spec}"
        assert probabilities[token] > 0, f"row {row}: {spec}"


def test_a_sampled_request_that_was_never_added_is_refused() -> None:
    sampler = Sampler(VOCAB_SIZE, torch.device("cpu"))
    microbatch = Microbatch(0, 3, [], [], [], [7], [2], [1], [1], [0])
    with pytest.raises(FrameError, match="m3: request 7"):
        sampler.sample(microbatch, torch.zeros(1, VOCAB_SIZE))


def test_a_removed_request_is_forgotten() -> None:
    sampler = Sampler(VOCAB_SIZE, torch.device("cpu"))
    microbatch = microbatch_of([SamplerSpec(seed=1)], [[1, 2]], [2])
    sampler.apply(microbatch)
    sampler.apply(Microbatch(0, 1, [0], [], [], [], [], [], [], []))
    with pytest.raises(FrameError, match="never added"):
        sampler.sample(microbatch, torch.zeros(1, VOCAB_SIZE))
