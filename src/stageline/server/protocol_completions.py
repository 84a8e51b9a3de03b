"""Requests and answers of /v1/completions, as OpenAI writes them, and the fields that users of vLLM add."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from stageline.sampling import MAX_LOGPROBS, MAX_N
from stageline.server.protocol import MAX_PROMPTS, TOKEN_ID_SCHEMA, Usage, between, output_tokens
from stageline.server.protocol_chat import PromptLogprobs
from stageline.server.protocol_sampling import GenerationRequest

_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": {"type": "string", "minLength": 1}},
        {"type": "array", "minItems": 1, "items": TOKEN_ID_SCHEMA},
        {
            "type": "array",
            "minItems": 1,
            "maxItems": MAX_PROMPTS,
            "items": {"type": "array", "minItems": 1, "items": TOKEN_ID_SCHEMA},
        },
    ]
}


class CompletionRequest(GenerationRequest, kw_only=True):
    """Prompts to be continued.

    Args:
        prompt: a text, a list of token ids, or a list of either; choices of prompt i begin at index i * n.
        max_tokens: 0 generates nothing, which scores the prompt together with echo and logprobs.
        logprobs: describe each token, with this many of the likeliest at its place.
        echo: give the prompt before each continuation.
        best_of: generate this many, and return the n likeliest per token.
        suffix: not supported.
        add_special_tokens: false leaves out the tokenizer's own, such as a beginning-of-sequence token.
    """

    prompt: Annotated[Any, Meta(extra_json_schema=_PROMPT_SCHEMA)]
    max_tokens: Annotated[int | None, output_tokens(0)] = None
    logprobs: Annotated[int | None, between(0, MAX_LOGPROBS)] = None
    echo: bool | None = None
    best_of: Annotated[int | None, between(1, MAX_N)] = None
    suffix: Annotated[str | None, Meta(extra_json_schema={"maxLength": 0})] = None
    add_special_tokens: bool | None = None


class CompletionLogprobs(msgspec.Struct, kw_only=True, frozen=True):
    """Per token of the text.

    Args:
        text_offset: where each token begins in the text, in characters.
        token_logprobs, top_logprobs: None for the first token of an echoed prompt, which nothing predicts.
    """

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(msgspec.Struct, kw_only=True, frozen=True):
    """One continuation, or in a stream its news.

    Args:
        finish_reason: None only in a stream, while it goes on.
        stop_reason: present if a stop string or one of stop_token_ids ended it: that string or id.
        token_ids, prompt_token_ids, prompt_logprobs: if they were asked for.
    """

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length", "content_filter"] | None
    stop_reason: int | str | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(msgspec.Struct, kw_only=True, frozen=True):
    """All continuations, or an event of their stream.

    Args:
        created: seconds since 1970.
        usage: in a stream only if stream_options asks for it.
    """

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    system_fingerprint: str
    usage: Usage | UnsetType | None = UNSET
