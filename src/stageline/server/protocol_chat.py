"""Requests and answers of /v1/chat/completions, as OpenAI writes them, and the fields that users of vLLM add."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from stageline.sampling import MAX_LOGPROBS
from stageline.server.protocol import MAX_MESSAGES, Usage, between, output_tokens
from stageline.server.protocol_sampling import GenerationRequest

Role = Literal["developer", "system", "user", "assistant", "tool"]
FinishReason = Literal["stop", "length", "tool_calls", "content_filter", "function_call"]


class ContentPart(msgspec.Struct, kw_only=True):
    """A piece of a message. Only text is understood: images, sounds and files are refused by name."""

    type: Annotated[str, Meta(extra_json_schema={"enum": ["text", "refusal"]})]
    text: str | UnsetType = UNSET
    refusal: str | UnsetType = UNSET


class CalledFunction(msgspec.Struct, kw_only=True):
    """Args:
    arguments: a JSON object as text.
    """

    name: str
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True):
    """A call that the model made."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(msgspec.Struct, kw_only=True):
    """A message of a conversation.

    Args:
        content: may be absent in an assistant's message with tool calls.
        tool_call_id: in a tool's message: the call that it answers.
        reasoning_content: an assistant's earlier reasoning, for templates that show it again.
    """

    role: Role
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class FunctionDefinition(msgspec.Struct, kw_only=True):
    """Args:
    parameters: JSON schema of the arguments; None for a function without any.
    """

    name: Annotated[str, Meta(extra_json_schema={"pattern": "^[a-zA-Z0-9_.-]{1,64}$"})]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    """A function that the model may call."""

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(msgspec.Struct, kw_only=True):
    """One of the tools, by its function's name."""

    name: str


class NamedToolChoice(msgspec.Struct, kw_only=True):
    """The model must call this function."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice


class ChatCompletionRequest(GenerationRequest, kw_only=True):
    """A conversation to be answered.

    Args:
        logprobs: describe each token of the answer.
        top_logprobs: with this many of the likeliest tokens at its place.
        max_tokens: older name for max_completion_tokens. Without either, up to the model's length; more than fits is
            refused.
        tool_choice: whether the model may, must or must not call tools.
        parallel_tool_calls: false for at most one call.
        chat_template_kwargs: further variables for the model's chat template, such as enable_thinking.
        add_generation_prompt: let the template begin the assistant's answer.
        continue_final_message: go on with the last message instead of answering it.
        chat_template: refused; it is here to be refused clearly.
        include_reasoning: false leaves the model's reasoning out of the answer.
    """

    messages: Annotated[list[ChatMessage], Meta(extra_json_schema={"minItems": 1, "maxItems": MAX_MESSAGES})]
    max_completion_tokens: Annotated[int | None, output_tokens(1)] = None
    max_tokens: Annotated[int | None, output_tokens(1)] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, between(0, MAX_LOGPROBS)] = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template: Annotated[Any, Meta(extra_json_schema={"type": "null"})] = None


class TopLogprob(msgspec.Struct, kw_only=True, frozen=True):
    """Args:
    token: its text; where it is only a part of a character, with the replacement character.
    bytes: its bytes, which join to text with those of its neighbours.
    """

    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(msgspec.Struct, kw_only=True, frozen=True):
    """The chosen token, and the likeliest ones at its place."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChoiceLogprobs(msgspec.Struct, kw_only=True, frozen=True):
    """Per token of the answer."""

    content: list[TokenLogprob] | None
    refusal: None = None


class PromptLogprob(msgspec.Struct, kw_only=True, frozen=True):
    """Args:
    rank: 1 is the likeliest.
    """

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class AnswerMessage(msgspec.Struct, kw_only=True, frozen=True):
    """The assistant's message.

    Args:
        content: None if it only calls tools.
        reasoning_content: what the model thought before it answered, if it marks that.
    """

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    annotations: list[None] = []
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True, frozen=True):
    """One answer.

    Args:
        stop_reason: present if a stop string or one of stop_token_ids ended it: that string or id.
        token_ids: if return_token_ids was set.
    """

    index: int
    message: AnswerMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: FinishReason
    stop_reason: int | str | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True, frozen=True):
    """All answers to a conversation.

    Args:
        created: seconds since 1970.
        prompt_token_ids, prompt_logprobs: if they were asked for.
    """

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class FunctionDelta(msgspec.Struct, kw_only=True, frozen=True):
    """Args:
    name: in the first delta of a call.
    arguments: the next piece of the JSON text.
    """

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallPiece(msgspec.Struct, kw_only=True, frozen=True):
    """Args:
    index: which call of the answer.
    id, type: in the first delta of a call.
    """

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionDelta | UnsetType = UNSET


class Delta(msgspec.Struct, kw_only=True, frozen=True):
    """What is new in an answer."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallPiece] | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, kw_only=True, frozen=True):
    """One answer's news; see `ChatChoice`."""

    index: int
    delta: Delta
    logprobs: ChoiceLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletionChunk(msgspec.Struct, kw_only=True, frozen=True):
    """An event of a stream.

    Args:
        usage: only if stream_options asks for it; null in all chunks but the last unless continuous_usage_stats is set.
    """

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    system_fingerprint: str
    usage: Usage | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Text, or a conversation, to be turned into tokens. Exactly one of `prompt` and `messages` is given.

    Args:
        add_special_tokens: the tokenizer's own, such as a beginning-of-sequence token. Without it: true for a prompt,
            and false for messages, whose template writes them.
        return_token_strs: give each token's text, too.
    """

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage] | None, Meta(extra_json_schema={"minItems": 1})] = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
