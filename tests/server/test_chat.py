"""/v1/chat/completions as OpenAI's client sees it."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from tests.server.conftest import MAX_MODEL_LEN, MODEL, events

QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "temperature": 0}


def _stream(client: openai.OpenAI, **asked: Any) -> list[Any]:
    return list(client.chat.completions.create(**GREEDY, stream=True, **asked))


def test_an_answer_is_what_the_client_expects(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**GREEDY, max_tokens=32)
    [choice] = answer.choices
    assert "Paris" in (choice.message.content or "")
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "stop", None)
    assert choice.message.role == "assistant"
    assert choice.message.refusal is None
    assert (answer.object, answer.model) == ("chat.completion", MODEL)
    assert answer.id.startswith("chatcmpl-")


def test_only_fields_of_openai_unless_more_is_asked_for(http: httpx.Client) -> None:
    answer = http.post("/v1/chat/completions", json={**GREEDY, "max_tokens": 2}).json()
    assert set(answer) == {"id", "object", "created", "model", "choices", "usage", "system_fingerprint"}
    assert set(answer["choices"][0]) == {"index", "message", "logprobs", "finish_reason"}
    assert set(answer["choices"][0]["message"]) == {"role", "content", "refusal", "annotations"}


def test_usage_counts_every_token(client: openai.OpenAI, http: httpx.Client) -> None:
    tokens = http.post("/tokenize", json={"messages": QUESTION}).json()
    answer = client.chat.completions.create(**GREEDY, max_tokens=5, n=3)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == tokens["count"]
    assert answer.usage.completion_tokens == 15
    assert answer.usage.total_tokens == tokens["count"] + 15
    again = client.chat.completions.create(**GREEDY, max_tokens=5).usage
    assert again is not None and again.prompt_tokens_details is not None
    cached = again.prompt_tokens_details.cached_tokens
    assert cached is not None and 0 < cached < tokens["count"]


def test_a_stream_says_what_the_whole_answer_says(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**GREEDY, max_tokens=24)
    chunks = _stream(client, max_tokens=24)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].choices[0].delta.content is None
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.object == "chat.completion.chunk" for chunk in chunks)


def test_usage_comes_in_a_last_chunk_without_choices(http: httpx.Client) -> None:
    body = {**GREEDY, "max_tokens": 4, "stream": True}
    plain = events(http.post("/v1/chat/completions", json=body).text)
    assert all("usage" not in event for event in plain)
    *others, last = events(
        http.post("/v1/chat/completions", json={**body, "stream_options": {"include_usage": True}}).text
    )
    assert all(event["usage"] is None and event["choices"] for event in others)
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 4


def test_usage_so_far_comes_with_every_chunk(http: httpx.Client) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {**GREEDY, "max_tokens": 4, "stream": True, "stream_options": options}
    chunks = events(http.post("/v1/chat/completions", json=body).text)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == 4


def test_choices_are_independent_and_a_seed_repeats_them(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {**GREEDY, "temperature": 1.5, "n": 4, "max_tokens": 12, "seed": 7}
    first, second = (client.chat.completions.create(**asked) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2, 3]
    assert len(set(texts)) > 1
    assert texts == [choice.message.content for choice in second.choices]
    streamed = ["", "", "", ""]
    for chunk in client.chat.completions.create(**asked, stream=True):
        [choice] = chunk.choices
        streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


def test_logprobs_describe_every_token_by_its_bytes(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**GREEDY, max_tokens=6, logprobs=True, top_logprobs=3)
    [choice] = answer.choices
    assert choice.logprobs is not None and choice.logprobs.content is not None and answer.usage is not None
    described = choice.logprobs.content
    assert len(described) == answer.usage.completion_tokens == 6
    text = b"".join(bytes(one.bytes or []) for one in described).decode()
    assert text == choice.message.content
    for one in described:
        assert len(one.top_logprobs) == 3
        assert one.top_logprobs[0].token == one.token
        assert one.top_logprobs[0].logprob == one.logprob <= 0
    streamed = [
        one
        for chunk in _stream(client, max_tokens=6, logprobs=True, top_logprobs=3)
        for one in (chunk.choices[0].logprobs.content if chunk.choices[0].logprobs else [])
    ]
    assert [one.token for one in streamed] == [one.token for one in described]


@pytest.mark.parametrize("stop", ["Paris", ["is Par", "zzz"], "capital of France is P"])
def test_a_stop_string_ends_the_text_wherever_it_lies(client: openai.OpenAI, stop: str | list[str]) -> None:
    ended_by = stop if isinstance(stop, str) else stop[0]
    whole = client.chat.completions.create(**GREEDY, max_tokens=32).choices[0].message.content or ""
    answer = client.chat.completions.create(**GREEDY, max_tokens=32, stop=stop).choices[0]
    assert answer.message.content == whole.partition(ended_by)[0]
    assert answer.finish_reason == "stop"
    assert answer.model_extra == {"stop_reason": ended_by}
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in _stream(client, max_tokens=32, stop=stop))
    assert streamed == answer.message.content


def test_a_character_is_never_split(http: httpx.Client) -> None:
    """Forced to write emoji, whose bytes lie in several tokens, one token after the other."""
    tokens = http.post("/tokenize", json={"prompt": "🇨🇭😀", "add_special_tokens": False}).json()["tokens"]
    body = {**GREEDY, "temperature": 1, "seed": 3, "max_tokens": 60, "stream": True, "allowed_token_ids": tokens}
    chunks = events(http.post("/v1/chat/completions", json=body).text)
    pieces = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    whole = http.post("/v1/chat/completions", json={**body, "stream": False}).json()["choices"][0]["message"]["content"]
    assert "".join(pieces) == whole
    assert "\N{GRINNING FACE}" in whole or "\N{REGIONAL INDICATOR SYMBOL LETTER C}" in whole
    # What does not become a character is shown as such, but never what is merely not complete yet.
    assert [piece for piece in pieces if piece.endswith("\ufffd") and piece not in whole] == []


def test_both_names_of_the_token_limit_work(client: openai.OpenAI) -> None:
    for limit in ({"max_tokens": 3}, {"max_completion_tokens": 3}, {"max_completion_tokens": 3, "max_tokens": 9}):
        answer = client.chat.completions.create(**GREEDY, **limit)
        assert answer.usage is not None and answer.usage.completion_tokens == 3
        assert answer.choices[0].finish_reason == "length"


def test_null_means_the_same_as_absent(http: httpx.Client) -> None:
    optional = ["n", "stop", "seed", "max_tokens", "top_p", "logprobs", "tools", "stream", "stream_options", "user",
                "response_format", "logit_bias", "top_k", "stop_token_ids", "structured_outputs"]  # fmt: skip
    body = {**GREEDY, **dict.fromkeys(optional), "max_completion_tokens": 3, "an_unknown_field": {"deep": [1]}}
    assert http.post("/v1/chat/completions", json=body).status_code == 200


def test_messages_may_be_made_of_parts_and_come_from_a_developer(client: openai.OpenAI) -> None:
    def answer(messages: list[Any]) -> str | None:
        asked = {**GREEDY, "messages": messages}
        return client.chat.completions.create(**asked, max_tokens=8).choices[0].message.content

    plain = answer([{"role": "system", "content": "Be brief.\nVery."}, *QUESTION])
    parts = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Very."}]
    assert answer([{"role": "developer", "content": parts}, *QUESTION]) == plain


def test_the_last_message_can_be_continued(http: httpx.Client) -> None:
    begun = [*QUESTION, {"role": "assistant", "content": "The capital of France is"}]
    asked = {"messages": begun, "continue_final_message": True}
    tokens = http.post("/tokenize", json=asked).json()["tokens"]
    text = http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert text.endswith("assistant\nThe capital of France is")
    answer = http.post("/v1/chat/completions", json={**GREEDY, **asked, "max_tokens": 4}).json()
    assert answer["choices"][0]["message"]["content"].startswith(" Paris")


def test_extensions_give_ids_and_logprobs_of_the_prompt(http: httpx.Client) -> None:
    body = {**GREEDY, "max_tokens": 3, "return_token_ids": True, "prompt_logprobs": 1}
    answer = http.post("/v1/chat/completions", json=body).json()
    ids = answer["prompt_token_ids"]
    assert ids == http.post("/tokenize", json={"messages": QUESTION}).json()["tokens"]
    assert len(answer["choices"][0]["token_ids"]) == 3
    assert answer["prompt_logprobs"][0] is None
    assert [str(token) in by_id for token, by_id in zip(ids[1:], answer["prompt_logprobs"][1:], strict=True)] == [
        True
    ] * (len(ids) - 1)
    chunks = events(http.post("/v1/chat/completions", json={**body, "stream": True}).text)
    assert chunks[0]["prompt_token_ids"] == ids
    assert chunks[0]["prompt_logprobs"] == answer["prompt_logprobs"]
    streamed = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", [])]
    assert streamed == answer["choices"][0]["token_ids"]


def test_without_a_limit_an_answer_may_fill_the_models_length(http: httpx.Client) -> None:
    prompt = http.post("/tokenize", json={"prompt": "word " * (MAX_MODEL_LEN - 60)}).json()["tokens"]
    text = http.post("/detokenize", json={"tokens": prompt}).json()["prompt"]
    body = {**GREEDY, "messages": [{"role": "user", "content": text}], "ignore_eos": True}
    usage = http.post("/v1/chat/completions", json=body).json()["usage"]
    assert usage["total_tokens"] == MAX_MODEL_LEN


def test_bias_allows_and_forbids_tokens(client: openai.OpenAI, http: httpx.Client) -> None:
    [token] = http.post("/tokenize", json={"prompt": " Paris", "add_special_tokens": False}).json()["tokens"]
    answer = client.chat.completions.create(**GREEDY, max_tokens=12, logit_bias={str(token): -100})
    assert " Paris" not in (answer.choices[0].message.content or "")
