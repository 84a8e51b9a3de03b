"""Every wrong parameter is refused by name, and every right one is taken."""

from __future__ import annotations

from typing import Any

import pytest

from stageline.errors import RequestError
from stageline.sampling import MAX_LOGPROBS, MAX_N, MAX_SEED, SamplerSpec, SamplingParams

WRONG: list[tuple[str, Any]] = [
    ("n", 0),
    ("n", MAX_N + 1),
    ("n", 1.5),
    ("n", True),
    ("temperature", -0.1),
    ("temperature", float("nan")),
    ("temperature", float("inf")),
    ("temperature", "hot"),
    ("top_k", -2),
    ("top_k", 1.0),
    ("top_p", 0.0),
    ("top_p", 1.1),
    ("min_p", -0.1),
    ("min_p", 1.5),
    ("seed", MAX_SEED + 1),
    ("seed", 1.0),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", -1.0),
    ("presence_penalty", 2.5),
    ("frequency_penalty", -2.5),
    ("logit_bias", {10: 1.0}),
    ("logit_bias", {"1": 1.0}),
    ("logit_bias", {1: 101.0}),
    ("logit_bias", [1]),
    ("logprobs", MAX_LOGPROBS + 1),
    ("logprobs", -1),
    ("prompt_logprobs", -1),
    ("stop", ""),
    ("stop", ["x", ""]),
    ("stop", 5),
    ("stop", [5]),
    ("stop_token_ids", [10]),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", "12"),
    ("include_stop_str_in_output", 1),
    ("min_tokens", -1),
    ("min_tokens", 17),
    ("max_tokens", 0),
    ("max_tokens", True),
    ("ignore_eos", None),
    ("allowed_token_ids", []),
    ("allowed_token_ids", [3, 10]),
    ("bad_words", [""]),
    ("bad_words", "word"),
    ("skip_special_tokens", "no"),
]
RIGHT: list[tuple[str, Any]] = [
    ("n", MAX_N),
    ("temperature", 0),
    ("temperature", 100.0),
    ("top_k", -1),
    ("top_k", 10**9),
    ("top_p", 1),
    ("min_p", 1.0),
    ("seed", -MAX_SEED - 1),
    ("logit_bias", {0: -100, 9: 100.0}),
    ("logprobs", 0),
    ("prompt_logprobs", MAX_LOGPROBS),
    ("stop", "\n"),
    ("stop", []),
    ("stop_token_ids", []),
    ("min_tokens", 16),
    ("max_tokens", None),
    ("allowed_token_ids", [0, 9]),
    ("bad_words", ["a b"]),
]


@pytest.mark.parametrize(("field", "value"), WRONG)
def test_a_wrong_value_is_refused_naming_its_field_and_what_was_given(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=field) as caught:
        SamplingParams(**{field: value}).validate(vocab_size=10)
    assert caught.value.field == field


@pytest.mark.parametrize(("field", "value"), RIGHT)
def test_a_right_value_is_taken(field: str, value: Any) -> None:
    SamplingParams(**{field: value}).validate(vocab_size=10)


@pytest.mark.parametrize(
    "wish",
    [
        {"temperature": 1.0},
        {"num_logprobs": 0},
        {"logit_bias": ((1, 1.0),)},
        {"allowed_token_ids": (1,)},
        {"bad_words": ((1,),)},
        {"min_tokens": 1},
        {"repetition_penalty": 1.1},
        {"presence_penalty": -1.0},
        {"frequency_penalty": 1.0},
    ],
    ids=str,
)
def test_any_wish_makes_a_request_more_than_plain_greedy(wish: dict[str, Any]) -> None:
    assert SamplerSpec(seed=1).is_plain_greedy
    assert not SamplerSpec(seed=1, **wish).is_plain_greedy
