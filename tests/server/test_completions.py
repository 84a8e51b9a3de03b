"""/v1/completions as OpenAI's client sees it."""

from __future__ import annotations

import re
from typing import Any

import httpx
import openai
import pytest

from tests.server.conftest import MAX_MODEL_LEN, MODEL, events

PROMPT = "The capital of France is"
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0}


def _tokens(http: httpx.Client, text: str) -> list[int]:
    tokens: list[int] = http.post("/tokenize", json={"prompt": text}).json()["tokens"]
    return tokens


def test_a_text_and_its_tokens_are_the_same_prompt(client: openai.OpenAI, http: httpx.Client) -> None:
    from_text = client.completions.create(prompt=PROMPT, **GREEDY)
    from_tokens = client.completions.create(prompt=_tokens(http, PROMPT), **GREEDY)
    assert "Paris" in from_text.choices[0].text
    assert from_tokens.choices[0].text == from_text.choices[0].text
    assert from_text.usage is not None and from_text.usage.completion_tokens == 16  # OpenAI's default
    assert from_text.object == "text_completion" and from_text.id.startswith("cmpl-")


def test_output_that_would_not_fit_is_cut_only_if_nobody_asked_for_so_much(http: httpx.Client) -> None:
    prompt = [1] * (MAX_MODEL_LEN - 3)
    answer = http.post("/v1/completions", json={**GREEDY, "prompt": prompt, "ignore_eos": True}).json()
    assert answer["usage"]["completion_tokens"] == 3
    error = http.post("/v1/completions", json={**GREEDY, "prompt": prompt, "max_tokens": 16}).json()["error"]
    assert (error["param"], error["code"]) == ("max_tokens", "context_length_exceeded")
    numbers = f"max_tokens is 16 for a prompt of {MAX_MODEL_LEN - 3} tokens, .* {MAX_MODEL_LEN}; ask for at most 3,"
    assert re.match(numbers, error["message"])


def test_only_fields_of_openai_unless_more_is_asked_for(http: httpx.Client) -> None:
    answer = http.post("/v1/completions", json={**GREEDY, "prompt": PROMPT, "max_tokens": 2}).json()
    assert set(answer) == {"id", "object", "created", "model", "choices", "usage", "system_fingerprint"}
    assert set(answer["choices"][0]) == {"index", "text", "logprobs", "finish_reason"}


@pytest.mark.parametrize("as_tokens", [False, True])
def test_choices_of_several_prompts_are_counted_through(
    client: openai.OpenAI, http: httpx.Client, as_tokens: bool
) -> None:
    texts = [PROMPT, "One, two, three, four,", "Roses are red, violets are"]
    prompts: Any = [_tokens(http, text) for text in texts] if as_tokens else texts
    alone = [client.completions.create(prompt=prompt, max_tokens=6, **GREEDY).choices[0].text for prompt in prompts]
    answer = client.completions.create(prompt=prompts, max_tokens=6, n=2, **GREEDY)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3, 4, 5]
    assert [choice.text for choice in answer.choices] == [text for text in alone for _ in range(2)]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == sum(len(_tokens(http, text)) for text in texts)
    assert answer.usage.completion_tokens == 36
    streamed = [""] * 6
    ends: list[int] = []
    for chunk in client.completions.create(prompt=prompts, max_tokens=6, n=2, stream=True, **GREEDY):
        [choice] = chunk.choices
        streamed[choice.index] += choice.text
        ends += [choice.index] if choice.finish_reason else []
    assert streamed == [choice.text for choice in answer.choices]
    assert sorted(ends) == [0, 1, 2, 3, 4, 5]


def test_echo_gives_the_prompt_first(client: openai.OpenAI, http: httpx.Client) -> None:
    asked: dict[str, Any] = {**GREEDY, "max_tokens": 4}
    plain = client.completions.create(prompt=PROMPT, **asked).choices[0].text
    for prompt in (PROMPT, _tokens(http, PROMPT)):
        assert client.completions.create(prompt=prompt, echo=True, **asked).choices[0].text == PROMPT + plain
        chunks = client.completions.create(prompt=prompt, echo=True, stream=True, **asked)
        assert "".join(chunk.choices[0].text for chunk in chunks) == PROMPT + plain


def test_logprobs_with_echo_describe_prompt_and_continuation(client: openai.OpenAI) -> None:
    more: dict[str, Any] = {"prompt_logprobs": 5}
    answer = client.completions.create(prompt=PROMPT, max_tokens=4, echo=True, logprobs=2, extra_body=more, **GREEDY)
    [choice] = answer.choices
    assert choice.model_extra is not None and len(choice.model_extra["prompt_logprobs"][1]) in (5, 6)
    described = choice.logprobs
    assert described is not None and answer.usage is not None
    assert described.tokens is not None and described.text_offset is not None
    assert described.token_logprobs is not None and described.top_logprobs is not None
    assert "".join(described.tokens) == choice.text
    assert len(described.tokens) == answer.usage.total_tokens
    assert described.text_offset == [sum(map(len, described.tokens[:place])) for place in range(len(described.tokens))]
    assert described.token_logprobs[0] is None and described.top_logprobs[0] is None
    for token, logprob, top in zip(
        described.tokens[1:], described.token_logprobs[1:], described.top_logprobs[1:], strict=True
    ):
        assert top[token] == logprob <= 0
        assert len(top) in (2, 3)  # the chosen one may be outside of the likeliest


def test_a_stream_describes_the_same_tokens(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {**GREEDY, "prompt": PROMPT, "max_tokens": 5, "echo": True, "logprobs": 1}
    whole = client.completions.create(**asked).choices[0].logprobs
    assert whole is not None
    parts = [chunk.choices[0].logprobs for chunk in client.completions.create(**asked, stream=True)]
    for name in ("tokens", "text_offset"):
        joined = [value for part in parts if part is not None for value in getattr(part, name)]
        assert joined == getattr(whole, name)


def test_a_prompt_can_be_scored_without_generating(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {**GREEDY, "prompt": [PROMPT, "xyzzy"], "max_tokens": 0, "echo": True, "logprobs": 0}
    answer = client.completions.create(**asked)
    assert [choice.text for choice in answer.choices] == [PROMPT, "xyzzy"]
    assert answer.usage is not None and answer.usage.completion_tokens == 0
    first = answer.choices[0].logprobs
    assert first is not None and first.token_logprobs is not None and first.tokens is not None
    assert "".join(first.tokens) == PROMPT
    # Scored is what is found when the last word is generated.
    generated = client.completions.create(prompt="The capital of France", max_tokens=1, logprobs=0, **GREEDY)
    described = generated.choices[0].logprobs
    assert described is not None and described.token_logprobs is not None and described.tokens == [" is"]
    assert first.token_logprobs[-1] == pytest.approx(described.token_logprobs[0], abs=1e-3)


def test_the_best_of_several_are_the_likeliest(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "temperature": 1.5, "seed": 11, "max_tokens": 6}
    every = client.completions.create(**asked, n=6, logprobs=0)

    def likelihood(choice: Any) -> float:
        return sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)

    expected = [choice.text for choice in sorted(every.choices, key=likelihood, reverse=True)[:2]]
    best = client.completions.create(**asked, n=2, best_of=6)
    assert [choice.text for choice in best.choices] == expected
    assert [choice.index for choice in best.choices] == [0, 1]
    assert best.usage is not None and every.usage is not None
    assert best.usage.completion_tokens == every.usage.completion_tokens
    assert best.choices[0].logprobs is None


def test_usage_is_streamed_when_asked_for(http: httpx.Client) -> None:
    options = {"include_usage": True}
    body = {**GREEDY, "prompt": [PROMPT, "Two"], "max_tokens": 3, "stream": True, "stream_options": options}
    *others, last = events(http.post("/v1/completions", json=body).text)
    assert all(event["usage"] is None for event in others)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 6


def test_a_stop_token_is_named_and_may_be_kept(http: httpx.Client) -> None:
    [dot] = _tokens(http, ".")
    body = {**GREEDY, "prompt": PROMPT, "max_tokens": 16, "stop_token_ids": [dot], "return_token_ids": True}
    [choice] = http.post("/v1/completions", json=body).json()["choices"]
    assert (choice["finish_reason"], choice["stop_reason"], choice["token_ids"][-1]) == ("stop", dot, dot)
    assert not choice["text"].endswith(".")
    [kept] = http.post("/v1/completions", json={**body, "include_stop_str_in_output": True}).json()["choices"]
    assert kept["text"] == choice["text"] + "."
