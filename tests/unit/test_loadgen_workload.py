"""Workloads: lengths, sharing and arrivals are what was asked for, and the same for the same seed."""

from __future__ import annotations

import math
import random
from itertools import islice, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageline.errors import ConfigError
from stageline.loadgen import workload
from stageline.loadgen.prompts import PromptMaker, words
from stageline.loadgen.workload import PlannedRequest, Segment

NUM_GAPS = 20_000


def gaps(rate: float, burstiness: float, seed: int = 1) -> np.ndarray:
    times = islice(workload.arrival_times(rate, burstiness, random.Random(seed)), NUM_GAPS + 1)
    return np.diff(list(times))


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_of_the_rate_and_the_spread_of_the_shape(burstiness) -> None:
    found = gaps(5.0, burstiness)
    coefficient = 1 / math.sqrt(burstiness)
    # Five standard errors of the mean, and of the coefficient of variation where it is largest.
    assert found.mean() == pytest.approx(0.2, rel=5 * coefficient / math.sqrt(NUM_GAPS))
    assert found.std() / found.mean() == pytest.approx(coefficient, rel=0.08)


def test_a_poisson_process_has_as_much_variance_as_mean_in_every_window() -> None:
    times = np.cumsum(gaps(5.0, 1.0))
    counts = np.bincount((times // 2.0).astype(int))[:-1]
    assert counts.mean() == pytest.approx(10.0, rel=0.03)
    assert counts.var() == pytest.approx(10.0, rel=0.15)


def test_a_constant_rate_has_equal_gaps_and_starts_at_once() -> None:
    times = list(islice(workload.arrival_times(4.0, math.inf, random.Random(0)), 9))
    assert times == [0.25 * index for index in range(9)]


def test_the_same_seed_gives_the_same_workload() -> None:
    def draw(seed: int) -> list[PlannedRequest]:
        generator = random.Random(seed)
        requests = workload.draw_like_sharegpt(50, generator)
        return workload.arriving(requests, workload.arrival_times(3.0, 1.0, generator))

    assert draw(7) == draw(7) != draw(8)


def test_lengths_vary_by_the_ratio_around_the_mean() -> None:
    generator = random.Random(3)
    requests = workload.draw_random(4000, workload.uniform(100, 0.5), workload.uniform(20, 0.0), generator)
    prompts = [request.num_prompt_tokens for request in requests]
    assert (min(prompts), max(prompts)) == (50, 150)
    assert np.mean(prompts) == pytest.approx(100, rel=0.03)
    assert {request.num_output_tokens for request in requests} == {20}


def test_lengths_like_sharegpt_are_skewed_and_bounded() -> None:
    requests = workload.draw_like_sharegpt(4000, random.Random(3))
    prompts = np.array([request.num_prompt_tokens for request in requests])
    assert prompts.min() >= 4 and prompts.max() <= 2048
    assert np.median(prompts) == pytest.approx(100, rel=0.1) and prompts.mean() > 1.7 * np.median(prompts)


def test_prompts_share_what_the_plan_says_and_nothing_else() -> None:
    lengths = (workload.uniform(8, 0.0), workload.uniform(4, 0.0))
    requests = workload.draw_sharing(60, 3, 32, *lengths, random.Random(5))
    maker = PromptMaker(range(1000), 1.0, seed=9)
    prompts = [maker.prompt(request) for request in requests]
    assert all(len(prompt) == 40 for prompt in prompts)
    assert len({tuple(prompt[:32]) for prompt in prompts}) == 3
    assert len({tuple(prompt[32:]) for prompt in prompts}) == 60
    for request, prompt in zip(requests, prompts, strict=True):
        assert PromptMaker(range(1000), 1.0, seed=9).prompt(request) == prompt
        assert PromptMaker(range(1000), 1.0, seed=10).prompt(request) != prompt


def test_words_make_about_as_many_tokens_as_planned() -> None:
    prompt = PromptMaker(words(), 1.25, seed=0).prompt(PlannedRequest((Segment(100, 0),), 1))
    assert isinstance(prompt, str) and len(prompt.split()) == 80


@given(
    st.lists(st.tuples(st.lists(st.integers(1, 50), min_size=1, max_size=4), st.integers(1, 100)), max_size=20),
    st.integers(2, 120),
)
def test_what_is_fitted_fits_and_what_fitted_is_left_alone(lengths, max_model_len) -> None:
    requests = [
        PlannedRequest(tuple(Segment(length, index) for index, length in enumerate(segments)), num_output)
        for segments, num_output in lengths
    ]
    fitting, num_cut = workload.fitted(requests, max_model_len)
    for before, now in zip(requests, fitting, strict=True):
        assert now.num_prompt_tokens >= 1 and now.num_output_tokens >= 1
        assert now.num_prompt_tokens + now.num_output_tokens <= max_model_len
        if before.num_prompt_tokens + before.num_output_tokens <= max_model_len:
            assert now == before
    assert num_cut == sum(now != before for before, now in zip(requests, fitting, strict=True))


def test_a_model_without_room_for_an_answer_is_refused() -> None:
    with pytest.raises(ConfigError, match="1 tokens"):
        workload.fitted([PlannedRequest((Segment(1, 0),), 1)], 1)


def test_scaled_times_keep_their_proportions() -> None:
    requests = workload.arriving([PlannedRequest((), 1)] * 4, iter([0.0, 1.0, 3.0, 4.0]))
    assert [request.at_s for request in workload.scaled(requests, 0.5)] == [0.0, 0.5, 1.5, 2.0]
    assert all(later.at_s >= earlier.at_s for earlier, later in pairwise(requests))
