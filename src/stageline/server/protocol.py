"""What travels over HTTP besides chats and completions, as structs: they decode requests, encode answers, and are the
schemas of /openapi.json, so the three cannot differ.

One idea: the structs hold types and the bounds that a schema can tell; what needs the model is checked where it is
known, with a message that gives the numbers.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

# What a client may ask for with one request; more is refused with a message that names the number. Characters are
# those of all strings together: each of n completions looks for them on its own.
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 4096
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_CHARS = 16384
MAX_CACHE_SALT_CHARS = 1024
MAX_PROMPTS = 128
MAX_COMPLETIONS = 1024
MAX_MESSAGES = 4096
MAX_DETOKENIZED = 2**19  # two bytes of a request can be more than a hundred of the text

MODEL_HELP = "one of the names that /v1/models lists"


def at_least(lowest: float) -> Meta:
    """For the schema only: a bound whose refusal is worded elsewhere."""
    return Meta(extra_json_schema={"minimum": lowest})


def between(lowest: float, highest: float) -> Meta:
    """For the schema only: bounds whose refusal is worded elsewhere."""
    return Meta(extra_json_schema={"minimum": lowest, "maximum": highest})


# The schema that is shown has the most tokens of output in the marker's place, once the model is known.
OUTPUT_TOKENS_MARKER = "x-output-tokens"


def output_tokens(lowest: int) -> Meta:
    """For the schema only: how many tokens of output can be asked for."""
    return Meta(extra_json_schema={"minimum": lowest, OUTPUT_TOKENS_MARKER: True})


# The schema that is shown has the highest id in the marker's place, once the model is known.
TOKEN_ID_MARKER = "x-token-id"
TOKEN_ID_SCHEMA = {"type": "integer", "minimum": 0, TOKEN_ID_MARKER: True}
TokenId = Annotated[int, Meta(extra_json_schema=TOKEN_ID_SCHEMA)]


class ErrorDetail(msgspec.Struct, kw_only=True, frozen=True):
    """OpenAI's error.

    Args:
        type: who has to act: invalid_request_error the client, server_error the operator, ...
        param: the field of the request at fault, such as "messages[0].role".
        code: for programs: "model_not_found", "context_length_exceeded", ...
    """

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every answer that is not a success, and the last event of a stream that breaks."""

    error: ErrorDetail


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """Args:
    cached_tokens: tokens of the prompt whose keys and values were still in the KV cache.
    """

    cached_tokens: int


class Usage(msgspec.Struct, kw_only=True, frozen=True):
    """Tokens of one request; those of several prompts and choices are added up."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET


class StreamOptions(msgspec.Struct, kw_only=True, frozen=True):
    """Args:
    include_usage: send the request's usage in a last chunk without choices.
    continuous_usage_stats: send the usage so far with every chunk.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ModelCard(msgspec.Struct, kw_only=True, frozen=True):
    """A model that requests may name.

    Args:
        created: when this server started, in seconds since 1970.
        max_model_len: most tokens of prompt and output together.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "stageline"
    max_model_len: int


class ModelList(msgspec.Struct, kw_only=True, frozen=True):
    """Every name under which the model answers."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeResponse(msgspec.Struct, kw_only=True, frozen=True):
    """Args:
    token_strs: each token's text, if it was asked for.
    """

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, frozen=True):
    """Token ids to be turned into text, special tokens included."""

    tokens: Annotated[list[TokenId], Meta(extra_json_schema={"maxItems": MAX_DETOKENIZED})]
    model: Annotated[str | None, Meta(description=MODEL_HELP)] = None


class DetokenizeResponse(msgspec.Struct, frozen=True):
    """The tokens' text."""

    prompt: str


class Version(msgspec.Struct, frozen=True):
    """This server's version."""

    version: str


class Health(msgspec.Struct, frozen=True):
    """The pipeline answers: every stage is there and tokens come back."""

    status: Literal["ok"] = "ok"
