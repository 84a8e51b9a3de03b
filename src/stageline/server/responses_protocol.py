"""Requests, answers and events of /v1/responses, as OpenAI writes them.

One idea: of OpenAI's many kinds of items, the structs know those of text and function calls. Others are refused by the
name of their type.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from stageline.sampling import MAX_LOGPROBS, MAX_SEED
from stageline.server.protocol import (
    MAX_CACHE_SALT_CHARS,
    MAX_MESSAGES,
    MODEL_HELP,
    at_least,
    between,
    output_tokens,
)
from stageline.server.protocol_chat import TokenLogprob
from stageline.server.protocol_sampling import MAX_PRIORITY

MAX_METADATA = 16
MAX_METADATA_KEY_CHARS, MAX_METADATA_VALUE_CHARS = 64, 512
LOGPROBS_INCLUDED = "message.output_text.logprobs"

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed"]
_TEXT_KINDS = ["input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal"]
_NULL_ONLY = Meta(extra_json_schema={"type": "null"})


class InputPart(msgspec.Struct, kw_only=True):
    """A piece of an item's text. Images, sounds and files are refused by name."""

    type: Annotated[str, Meta(extra_json_schema={"enum": _TEXT_KINDS})]
    text: str | None = None
    refusal: str | None = None


# What an item of each type needs, for the schema; `responses_input.py` words the refusals.
_PART_RULES = [
    {"properties": {"type": {"enum": _TEXT_KINDS[:-1]}, "text": {"type": "string"}}, "required": ["type", "text"]},
    {"properties": {"type": {"const": "refusal"}, "refusal": {"type": "string"}}, "required": ["type", "refusal"]},
]
Part = Annotated[InputPart, Meta(extra_json_schema={"anyOf": _PART_RULES})]


class InputItem(msgspec.Struct, kw_only=True):
    """One turn, or a part of one: a message, a function call that the model made, its result, or earlier reasoning.

    Args:
        type: absent for a message.
        role, content: of a message; `content` also of reasoning.
        call_id: of a call and of its result.
        name, arguments: of a call.
        output: of a result.
        summary: of reasoning.
    """

    type: str | None = None
    role: Literal["assistant", "developer", "system", "user"] | None = None
    content: str | list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None
    summary: list[Part] | None = None
    id: str | None = None
    status: str | None = None


_TEXT_SCHEMA = {"anyOf": [{"type": "string"}, {"type": "array"}]}
_ITEM_RULES = [
    {
        "properties": {"type": {"enum": ["message", None]}, "role": {"type": "string"}, "content": _TEXT_SCHEMA},
        "required": ["role", "content"],
    },
    {
        "properties": {
            "type": {"const": "function_call"},
            "call_id": {"type": "string"},
            "name": {"type": "string"},
            "arguments": {"type": "string"},
        },
        "required": ["type", "call_id", "name", "arguments"],
    },
    {
        "properties": {
            "type": {"const": "function_call_output"},
            "call_id": {"type": "string"},
            "output": _TEXT_SCHEMA,
        },
        "required": ["type", "call_id", "output"],
    },
    {"properties": {"type": {"const": "reasoning"}}, "required": ["type"]},
]
Item = Annotated[InputItem, Meta(extra_json_schema={"anyOf": _ITEM_RULES})]


class FunctionTool(msgspec.Struct, kw_only=True):
    """A function that the model may call; `parameters` is the JSON schema of its arguments."""

    type: Literal["function"]
    name: Annotated[str, Meta(extra_json_schema={"pattern": "^[a-zA-Z0-9_.-]{1,64}$"})]
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class FunctionChoice(msgspec.Struct, kw_only=True, tag_field="type", tag="function"):
    """The model must call this function."""

    name: str


class AllowedTool(msgspec.Struct, kw_only=True):
    """One of the tools, by its name."""

    type: Literal["function"]
    name: str


class AllowedTools(msgspec.Struct, kw_only=True, tag_field="type", tag="allowed_tools"):
    """The model may (auto) or must (required) call these tools, of all that are declared."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Meta(min_length=1)]


Choice = Literal["none", "auto", "required"] | FunctionChoice | AllowedTools


class TextFormat(msgspec.Struct, kw_only=True):
    """The form that the answer must have. `name` and `schema` are for the type json_schema."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | UnsetType = UNSET
    schema: dict[str, Any] | UnsetType = UNSET
    description: str | UnsetType | None = UNSET
    strict: bool | UnsetType | None = UNSET


class TextSettings(msgspec.Struct, kw_only=True):
    """Args:
    verbosity: accepted; models of this server know no such thing.
    """

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningSettings(msgspec.Struct, kw_only=True):
    """Args:
    effort: given to the chat template as `reasoning_effort`.
    summary: accepted; reasoning is given as it is.
    """

    effort: str | None = None
    summary: str | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """A conversation to be answered, as items. Unknown fields are ignored.

    Args:
        instructions: a system message before all others.
        include: "message.output_text.logprobs" describes each token of the answer.
        store: accepted; responses are not kept in any case.
        safety_identifier, prompt_cache_key, service_tier, max_tool_calls: accepted; they say nothing to this server.
        previous_response_id, background, conversation, prompt: refused, for they need responses to be kept.
        chat_template_kwargs: further variables for the model's chat template, such as enable_thinking.
        priority: lower is served earlier.
        cache_salt: prompts share cached keys and values with those of the same salt only.
    """

    model: Annotated[str, Meta(description=MODEL_HELP)]
    input: (
        Annotated[str, Meta(extra_json_schema={"minLength": 1})]
        | Annotated[list[Item], Meta(extra_json_schema={"minItems": 1, "maxItems": MAX_MESSAGES})]
    )
    instructions: str | None = None
    stream: bool | None = None
    max_output_tokens: Annotated[int | None, output_tokens(1)] = None
    temperature: Annotated[float | None, between(0, 100)] = None
    top_p: Annotated[float | None, Meta(extra_json_schema={"exclusiveMinimum": 0, "maximum": 1})] = None
    tools: list[FunctionTool] | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    metadata: Annotated[dict[str, str] | None, Meta(extra_json_schema={"maxProperties": MAX_METADATA})] = None
    truncation: Literal["auto", "disabled"] | None = None
    store: bool | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    max_tool_calls: Annotated[int, Meta(ge=1)] | None = None
    previous_response_id: Annotated[Any, _NULL_ONLY] = None
    conversation: Annotated[Any, _NULL_ONLY] = None
    prompt: Annotated[Any, _NULL_ONLY] = None
    background: Annotated[bool | None, Meta(extra_json_schema={"enum": [False, None]})] = None

    top_k: Annotated[int | None, at_least(-1)] = None
    min_p: Annotated[float | None, between(0, 1)] = None
    presence_penalty: Annotated[float | None, between(-2, 2)] = None
    frequency_penalty: Annotated[float | None, between(-2, 2)] = None
    repetition_penalty: Annotated[
        float | None, Meta(extra_json_schema={"exclusiveMinimum": 0, "maximum": 100})
    ] = None
    seed: Annotated[int | None, between(-MAX_SEED - 1, MAX_SEED)] = None
    chat_template_kwargs: dict[str, Any] | None = None
    priority: Annotated[int | None, between(-MAX_PRIORITY, MAX_PRIORITY)] = None
    cache_salt: Annotated[str | None, Meta(extra_json_schema={"maxLength": MAX_CACHE_SALT_CHARS})] = None

    @property
    def is_streamed(self) -> bool:
        return bool(self.stream)

    @property
    def includes_logprobs(self) -> bool:
        return self.include is not None and LOGPROBS_INCLUDED in self.include


class OutputText(msgspec.Struct, kw_only=True, frozen=True, tag_field="type", tag="output_text"):
    """Args:
    logprobs: of each token, if they were asked for.
    """

    text: str
    annotations: list[None] = []
    logprobs: list[TokenLogprob] = []


class ReasoningText(msgspec.Struct, kw_only=True, frozen=True, tag_field="type", tag="reasoning_text"):
    """What the model thought."""

    text: str


class OutputMessage(msgspec.Struct, kw_only=True, frozen=True, tag_field="type", tag="message"):
    """What the model says."""

    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class FunctionCall(msgspec.Struct, kw_only=True, frozen=True, tag_field="type", tag="function_call"):
    """A call that the model makes.

    Args:
        call_id: what its result refers to.
        arguments: a JSON object as text.
    """

    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


class ReasoningItem(msgspec.Struct, kw_only=True, frozen=True, tag_field="type", tag="reasoning"):
    """What the model thought before it answered, if it marks that."""

    id: str
    status: ItemStatus
    summary: list[None] = []
    content: list[ReasoningText]


OutputItem = OutputMessage | FunctionCall | ReasoningItem


class InputTokensDetails(msgspec.Struct, kw_only=True, frozen=True):
    """Args:
    cached_tokens: whose keys and values were still in the KV cache.
    """

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, kw_only=True, frozen=True):
    """Args:
    reasoning_tokens: of the reasoning's text, cut into tokens again.
    """

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, kw_only=True, frozen=True):
    """Tokens of one response."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct, frozen=True):
    """Why a response ended early."""

    reason: Literal["max_output_tokens"]


class ResponseError(msgspec.Struct, frozen=True):
    """Why a response failed."""

    code: Literal["server_error"]
    message: str


class TextSettingsShown(msgspec.Struct, kw_only=True, frozen=True):
    """`TextSettings` with what was left out."""

    format: TextFormat
    verbosity: Literal["low", "medium", "high"]


class ModelResponse(msgspec.Struct, kw_only=True, frozen=True):
    """An answer, with what was asked for.

    Args:
        created_at, completed_at: seconds since 1970; the latter is None unless its status is completed.
        usage: None until it ends.
    """

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None
    status: ResponseStatus
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: None = None
    reasoning: ReasoningSettings
    store: Literal[False] = False
    background: Literal[False] = False
    temperature: float
    text: TextSettingsShown
    tool_choice: Choice
    tools: list[FunctionTool]
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    top_logprobs: int
    service_tier: Literal["default"] = "default"
    max_tool_calls: int | None
    safety_identifier: str | None
    prompt_cache_key: str | None
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None = None
    user: str | None
    metadata: dict[str, str]


EventType = Literal[
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.reasoning_text.delta",
    "response.reasoning_text.done",
    "response.content_part.done",
    "response.function_call_arguments.delta",
    "response.function_call_arguments.done",
    "response.output_item.done",
    "response.completed",
    "response.incomplete",
    "response.failed",
    "error",
]


class ResponseEvent(msgspec.Struct, kw_only=True, frozen=True):
    """One event of a stream; its type decides which fields it has.

    Args:
        sequence_number: 0 for the first event, and one more for each further one.
        output_index: the item's place in the response's output.
        content_index: the part's place in the item's content.
    """

    type: EventType
    sequence_number: int
    response: ModelResponse | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    part: OutputText | ReasoningText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    logprobs: list[TokenLogprob] | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    code: str | UnsetType | None = UNSET
    message: str | UnsetType = UNSET
    param: str | UnsetType | None = UNSET
