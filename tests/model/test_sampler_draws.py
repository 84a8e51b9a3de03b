"""Draws have the distribution they should, and depend on nothing but seed, index and the row itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from stageline.pipeline.microbatch import Microbatch
from stageline.sampling import SamplerSpec
from stageline.worker.choice import choose, random_fraction
from stageline.worker.sampler import Sampler
from tests.model.sampler_reference import distribution, microbatch_of, random_logits, sample_once

NUM_DRAWS = 20_000


def _chi_square_limit(degrees: int) -> float:
    """Exceeded by chance once in some 30 000 experiments. Source: Wilson and Hilferty 1931, 4 standard deviations."""
    spread = 2 / (9 * degrees)
    return degrees * (1 - spread + 4.0 * spread**0.5) ** 3


def _chi_square(observed: np.ndarray, probabilities: np.ndarray) -> tuple[float, int]:
    """Rare tokens count as one, so that every expected count is large enough. Returns: statistic and degrees."""
    rare = probabilities * NUM_DRAWS < 10
    counts = np.append(observed[~rare], observed[rare].sum())
    expected = np.append(probabilities[~rare], probabilities[rare].sum()) * NUM_DRAWS
    counts, expected = counts[expected > 0], expected[expected > 0]
    return float(((counts - expected) ** 2 / expected).sum()), len(counts) - 1


@pytest.mark.parametrize(
    "spec",
    [
        SamplerSpec(seed=11, temperature=1.0),
        SamplerSpec(seed=-5, temperature=0.7),
        SamplerSpec(seed=12, temperature=1.5, top_k=20),
        SamplerSpec(seed=2**63 - 1, temperature=1.0, top_p=0.8),
        SamplerSpec(seed=14, temperature=1.0, min_p=0.05),
        SamplerSpec(seed=15, temperature=1.2, top_k=40, top_p=0.9, min_p=0.01),
    ],
    ids=lambda spec: f"T{spec.temperature} k{spec.top_k} p{spec.top_p} m{spec.min_p}",
)
def test_one_request_s_tokens_have_the_distribution_asked_for(spec: SamplerSpec) -> None:
    logits = random_logits(1, 200, seed=5, scale=2.0)
    tokens = choose(logits.expand(NUM_DRAWS, -1).contiguous(), [spec] * NUM_DRAWS, range(NUM_DRAWS))
    probabilities = distribution(logits[0].double().numpy(), spec)
    observed = np.bincount(tokens, minlength=200)
    assert not observed[probabilities == 0].any()
    statistic, degrees = _chi_square(observed, probabilities)
    assert statistic < _chi_square_limit(degrees)


def test_neighbouring_seeds_share_nothing() -> None:
    """Neither the same index under the next seed nor the next index under the seed before gives the same number."""
    numbers = {random_fraction(seed, index) for seed in range(-50, 50) for index in range(100)}
    assert len(numbers) == 10_000
    first_tokens = np.array([random_fraction(seed, 0) for seed in range(NUM_DRAWS)])
    statistic, degrees = _chi_square(np.histogram(first_tokens, bins=50, range=(0, 1))[0], np.full(50, 1 / 50))
    assert statistic < _chi_square_limit(degrees)
    assert abs(np.corrcoef(first_tokens[1:], first_tokens[:-1])[0, 1]) < 4 / NUM_DRAWS**0.5


def test_random_fractions_are_pinned() -> None:
    """A seed means the same tokens in every version. The first is SplitMix64's published first output for state 0."""
    assert random_fraction(0, 0) == ((0xE220A8397B1DCDAF >> 12) + 0.5) / 2**52
    assert random_fraction(42, 7) == 0.15289334222649986


MIXED = [
    SamplerSpec(seed=1),
    SamplerSpec(seed=2, temperature=0.8, top_p=0.95, top_k=50),
    SamplerSpec(seed=3, temperature=1.0),
    SamplerSpec(seed=4, temperature=1.0, top_p=0.99),
    SamplerSpec(seed=5, temperature=2.0, min_p=0.1, num_logprobs=3),
    SamplerSpec(seed=6, temperature=0.9, repetition_penalty=1.2, logit_bias=((4, 5.0),)),
    SamplerSpec(seed=7, temperature=1.0, top_k=700),
    SamplerSpec(seed=8, temperature=5.0, top_p=0.5),
]


def test_a_seeded_token_does_not_depend_on_the_batch() -> None:
    logits = random_logits(len(MIXED), 5000, seed=6)
    histories = [[row + 1, 9, 9] for row in range(len(MIXED))]
    prompts = [2] * len(MIXED)
    together = sample_once(logits, MIXED, histories, prompts)
    for row, spec in enumerate(MIXED):
        assert sample_once(logits[row : row + 1], [spec], [histories[row]], [2]) == [together[row]]
    order = [5, 2, 7, 0, 1, 6, 3, 4] * 9
    shuffled = sample_once(logits[order], [MIXED[i] for i in order], [histories[i] for i in order], [2] * len(order))
    assert shuffled == [together[i] for i in order]


def test_a_seeded_token_does_not_depend_on_recomputation_or_chunks() -> None:
    """A request that comes back after preemption, or whose last chunk is longer, draws the same next token."""
    spec = SamplerSpec(seed=9, temperature=1.0, repetition_penalty=1.3)
    history = [3, 1, 4, 1, 5]
    steps = [random_logits(1, 500, seed=step) for step in range(4)]
    sampler = Sampler(500, torch.device("cpu"))
    sampler.apply(microbatch_of([spec], [history], [5]))
    tokens: list[int] = []
    for step, logits in enumerate(steps):
        microbatch = Microbatch(0, step, [], [], [], [0], [4 + step], [1], [1], [0])
        tokens += sampler.sample(microbatch, logits.clone())[0]
    again = Sampler(500, torch.device("cpu"))
    again.apply(microbatch_of([spec], [history + tokens[:3]], [5], first_number=8))
    recomputed = Microbatch(0, 0, [], [], [], [8], [2], [6], [1] * 6, [0])
    assert again.sample(recomputed, steps[3].clone())[0] == tokens[3:]


def test_an_added_request_without_a_sampling_row_draws_nothing() -> None:
    sampler = Sampler(500, torch.device("cpu"))
    microbatch = microbatch_of([SamplerSpec(seed=1, temperature=1.0)], [[1, 2, 3]], [3])
    chunk = Microbatch(0, 0, [], microbatch.added, [], [0], [0], [2], [1, 2], [])
    sampler.apply(chunk)
    assert sampler.sample(chunk, torch.empty(0, 500)) == ([], [])


@pytest.mark.parametrize("spec", [MIXED[2], MIXED[3], MIXED[1]])
def test_a_token_of_probability_one_is_always_drawn(spec: SamplerSpec) -> None:
    logits = torch.full((200, 1000), -torch.inf)
    logits[:, 999] = 0.0
    assert choose(logits, [spec] * 200, range(200)) == [999] * 200
