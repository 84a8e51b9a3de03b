"""The fields of a request that say how tokens are chosen: OpenAI's, and those that users of vLLM send.

One idea: both kinds of completion inherit the same fields, and one function turns them into `SamplingParams`, beginning
with what the model's authors recommend. A field that is absent or null takes that default.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from stageline.sampling import MAX_LOGPROBS, MAX_N, MAX_SEED, SamplingParams, StructuredOutputs
from stageline.server.errors import bad_request
from stageline.server.protocol import (
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_CACHE_SALT_CHARS,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MODEL_HELP,
    StreamOptions,
    TokenId,
    at_least,
    between,
)

MAX_PRIORITY = 2**31
NonEmpty = Annotated[str, Meta(extra_json_schema={"minLength": 1})]


class JsonSchemaFormat(msgspec.Struct, kw_only=True, frozen=True):
    """Args:
    strict: accepted for OpenAI's sake: the answer keeps to the schema either way.
    """

    name: Annotated[str, Meta(min_length=1, max_length=64)]
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True, frozen=True):
    """OpenAI's way of asking for JSON.

    Args:
        json_schema: for the type json_schema only.
    """

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class GenerationRequest(msgspec.Struct, kw_only=True):
    """What chats and completions have in common. Unknown fields are ignored.

    Args:
        priority: lower is served earlier.
        cache_salt: prompts share cached keys and values with those of the same salt only.
        return_token_ids: give the token ids of prompt and choices, too.
        guided_json, guided_regex, guided_choice, guided_grammar: older names for the fields of structured_outputs.
    """

    model: Annotated[str, Meta(description=MODEL_HELP)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None

    n: Annotated[int | None, between(1, MAX_N)] = None
    temperature: Annotated[float | None, between(0, 100)] = None
    top_p: Annotated[float | None, Meta(extra_json_schema={"exclusiveMinimum": 0, "maximum": 1})] = None
    presence_penalty: Annotated[float | None, between(-2, 2)] = None
    frequency_penalty: Annotated[float | None, between(-2, 2)] = None
    seed: Annotated[int | None, between(-MAX_SEED - 1, MAX_SEED)] = None
    logit_bias: dict[str, Annotated[float, between(-100, 100)]] | None = None
    stop: (
        NonEmpty | Annotated[list[NonEmpty], Meta(extra_json_schema={"maxItems": MAX_STOP_STRINGS})] | None
    ) = None
    response_format: ResponseFormat | None = None

    top_k: Annotated[int | None, at_least(-1)] = None
    min_p: Annotated[float | None, between(0, 1)] = None
    repetition_penalty: Annotated[
        float | None, Meta(extra_json_schema={"exclusiveMinimum": 0, "maximum": 100})
    ] = None
    min_tokens: Annotated[int | None, at_least(0)] = None
    ignore_eos: bool | None = None
    stop_token_ids: list[TokenId] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: Annotated[list[TokenId] | None, Meta(extra_json_schema={"minItems": 1})] = None
    bad_words: Annotated[list[NonEmpty] | None, Meta(extra_json_schema={"maxItems": MAX_BAD_WORDS})] = None
    prompt_logprobs: Annotated[int | None, between(0, MAX_LOGPROBS)] = None
    return_token_ids: bool | None = None
    priority: Annotated[int | None, between(-MAX_PRIORITY, MAX_PRIORITY)] = None
    cache_salt: Annotated[str | None, Meta(extra_json_schema={"maxLength": MAX_CACHE_SALT_CHARS})] = None
    use_beam_search: bool | None = None
    truncate_prompt_tokens: int | None = None

    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    @property
    def is_streamed(self) -> bool:
        return bool(self.stream)

    @property
    def wants_usage_chunk(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wants_usage_in_every_chunk(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)


# Passed on as they are. SamplingParams refuses values out of range, naming the field.
_SAME_NAME = (
    "n", "temperature", "top_p", "presence_penalty", "frequency_penalty", "seed", "stop", "top_k", "min_p",
    "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids", "include_stop_str_in_output",
    "skip_special_tokens", "allowed_token_ids", "bad_words", "prompt_logprobs",
)  # fmt: skip


def sampling_params(
    request: GenerationRequest, defaults: SamplingParams, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    """What the request asks of the sampler.

    Args:
        defaults: for what the request leaves out.
        max_tokens: None for up to the model's length.
        logprobs: how many likeliest tokens to describe besides the chosen one; None for no description at all.
    Raises: ApiError for what cannot be written as `SamplingParams`; ranges are checked by `SamplingParams.validate`.
    """
    if request.stream_options is not None and not request.is_streamed:
        raise bad_request("stream_options is for streams: set stream to true, or leave it out", "stream_options")
    if request.use_beam_search:
        raise bad_request("use_beam_search is not supported; leave it out", "use_beam_search")
    if request.truncate_prompt_tokens is not None:
        raise bad_request("truncate_prompt_tokens is not supported; send a shorter prompt", "truncate_prompt_tokens")
    if request.priority is not None and abs(request.priority) > MAX_PRIORITY:
        raise bad_request(f"priority is {request.priority}; keep within ±{MAX_PRIORITY}", "priority")
    stop = [request.stop] if isinstance(request.stop, str) else request.stop
    _check_strings("stop", stop, MAX_STOP_STRINGS, MAX_STOP_CHARS)
    _check_strings("bad_words", request.bad_words, MAX_BAD_WORDS, MAX_BAD_WORD_CHARS)
    _check_strings("cache_salt", [request.cache_salt or ""], 1, MAX_CACHE_SALT_CHARS)
    given = {name: value for name in _SAME_NAME if (value := getattr(request, name)) is not None}
    return msgspec.structs.replace(
        defaults,
        **given,
        max_tokens=max_tokens,
        logprobs=logprobs,
        logit_bias=_logit_bias(request.logit_bias),
        structured_outputs=structured_outputs_of(request),
    )


def _check_strings(field: str, strings: list[str] | None, most: int, most_chars: int) -> None:
    """Raises: ApiError if there are too many, or too many characters in all of them together."""
    if strings is None:
        return
    if len(strings) > most:
        raise bad_request(f"{field} has {len(strings)} strings; give at most {most}", field)
    num_chars = sum(map(len, strings))
    if num_chars > most_chars:
        raise bad_request(f"{field} has {num_chars} characters; give at most {most_chars}", field)


def _logit_bias(by_text: dict[str, float] | None) -> dict[int, float] | None:
    """JSON's keys are strings; these are token ids."""
    if by_text is None:
        return None
    for key in by_text:
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise bad_request(f"logit_bias has the key {key[:40]!r}; keys are token ids in quotes", "logit_bias")
    return {int(key): bias for key, bias in by_text.items()}


def structured_outputs_of(request: GenerationRequest) -> StructuredOutputs | None:
    """The form that the answer must have, whichever of the ways to ask for it was used. Raises: ApiError if several."""
    asked: list[tuple[str, StructuredOutputs]] = []
    if request.structured_outputs is not None:
        asked.append(("structured_outputs", request.structured_outputs))
    for name in ("json", "regex", "choice", "grammar"):
        if (value := getattr(request, f"guided_{name}")) is not None:
            asked.append((f"guided_{name}", StructuredOutputs(**{name: value})))
    if (of_format := _of_response_format(request.response_format)) is not None:
        asked.append(("response_format", of_format))
    if len(asked) > 1:
        names = " and ".join(name for name, _ in asked)
        raise bad_request(f"{names} are both given; the answer can have one form only", asked[1][0])
    return asked[0][1] if asked else None


def structured_field_names(request: GenerationRequest) -> dict[str, str]:
    """What this request calls the fields of `structured_outputs`, for errors."""
    if request.structured_outputs is not None:
        return {}
    if request.response_format is not None:
        names = {"json": "response_format.json_schema.schema", "json_object": "response_format"}
        return {f"structured_outputs.{name}": written for name, written in names.items()}
    return {f"structured_outputs.{name}": f"guided_{name}" for name in ("json", "regex", "choice", "grammar")}


def _of_response_format(response_format: ResponseFormat | None) -> StructuredOutputs | None:
    if response_format is None or response_format.type == "text":
        return None
    if response_format.type == "json_object":
        return StructuredOutputs(json_object=True)
    if response_format.json_schema is None or response_format.json_schema.schema is None:
        field = "response_format.json_schema" + ("" if response_format.json_schema is None else ".schema")
        raise bad_request(f"{field} is missing; the type json_schema needs it", field)
    return StructuredOutputs(json=response_format.json_schema.schema)
