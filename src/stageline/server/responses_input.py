"""A request for a response, as the chat request that means the same.

One idea: there is one way from a conversation to an answer, that of /v1/chat/completions. Here items become messages,
and errors about messages become errors about items.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
from msgspec import UNSET

from stageline.errors import RequestError
from stageline.server.errors import ApiError, FieldNames, api_error_of, bad_request
from stageline.server.protocol_chat import (
    CalledFunction,
    ChatCompletionRequest,
    ChatMessage,
    FunctionDefinition,
    NamedFunction,
    NamedToolChoice,
    Tool,
    ToolCall,
    ToolChoice,
)
from stageline.server.protocol_sampling import JsonSchemaFormat, ResponseFormat
from stageline.server.responses_protocol import (
    MAX_METADATA,
    MAX_METADATA_KEY_CHARS,
    MAX_METADATA_VALUE_CHARS,
    AllowedTools,
    FunctionChoice,
    InputItem,
    InputPart,
    ResponsesRequest,
    TextFormat,
)

_TEXT_KINDS = {"input_text", "output_text", "text", "reasoning_text", "summary_text"}
_SAME_NAME = (
    "model", "temperature", "top_p", "stream", "parallel_tool_calls", "user", "top_k", "min_p", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "seed", "chat_template_kwargs", "priority", "cache_salt",
)  # fmt: skip
# How a chat request calls what a request for a response calls otherwise.
_FIELD_NAMES = [
    (re.compile(r"\btools\[(\d+)\]\.function\b"), r"tools[\1]"),
    (re.compile(r"\btool_choice\.function\b"), "tool_choice"),
    (re.compile(r"\bresponse_format\.json_schema\b"), "text.format"),
    (re.compile(r"\bresponse_format\b"), "text.format"),
    (re.compile(r"\bmax_(?:completion_)?tokens\b"), "max_output_tokens"),
    (re.compile(r"\bmessages\b"), "input"),
]


def chat_request_of(request: ResponsesRequest) -> ChatCompletionRequest:
    """Raises: ApiError for what has no counterpart, naming the item."""
    _refuse_what_needs_a_store(request)
    _check_metadata(request.metadata)
    tools, choice = _tools_of(request)
    same = {name: value for name in _SAME_NAME if (value := getattr(request, name)) is not None}
    return ChatCompletionRequest(
        **same,
        messages=messages_of(request),
        max_completion_tokens=request.max_output_tokens,
        tools=tools,
        tool_choice=choice,
        response_format=_format_of(request.text.format if request.text else None),
        reasoning_effort=request.reasoning.effort if request.reasoning else None,
        logprobs=request.includes_logprobs or None,
        top_logprobs=request.top_logprobs if request.includes_logprobs else None,
    )


def _refuse_what_needs_a_store(request: ResponsesRequest) -> None:
    for name in ("previous_response_id", "conversation", "prompt"):
        if getattr(request, name) is not None:
            raise bad_request(
                f"{name} is given, but this server keeps nothing between requests; send all of it in input",
                name,
            )
    if request.background:
        raise bad_request("background is true, but this server keeps no responses; stream one instead", "background")


def _check_metadata(metadata: dict[str, str] | None) -> None:
    if metadata is None:
        return
    if len(metadata) > MAX_METADATA:
        raise bad_request(f"metadata has {len(metadata)} entries; give at most {MAX_METADATA}", "metadata")
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY_CHARS or len(value) > MAX_METADATA_VALUE_CHARS:
            raise bad_request(
                f"metadata has an entry of {len(key)} and {len(value)} characters; keys may have "
                f"{MAX_METADATA_KEY_CHARS}, values {MAX_METADATA_VALUE_CHARS}",
                "metadata",
            )


# ---- items ----


def messages_of(request: ResponsesRequest) -> list[ChatMessage]:
    """The conversation. Raises: ApiError, naming the item."""
    if not request.input:
        raise bad_request("input is empty; give a text or at least one item", "input")
    if isinstance(request.input, str):
        messages = [ChatMessage(role="user", content=request.input)]
    else:
        messages = _messages_of_items(request.input)
    if not request.instructions:
        return messages
    if messages[0].role in ("system", "developer") and isinstance(messages[0].content, str):
        # Most templates take a system message in the first place only.
        first = ChatMessage(role="system", content=f"{request.instructions}\n\n{messages[0].content}")
        return [first, *messages[1:]]
    return [ChatMessage(role="system", content=request.instructions), *messages]


def _messages_of_items(items: Sequence[InputItem]) -> list[ChatMessage]:
    """A call belongs to the assistant's message before it, reasoning to the one after it."""
    messages: list[ChatMessage] = []
    reasoning: str | None = None
    for index, item in enumerate(items):
        field = f"input[{index}]"
        kind = item.type or "message"
        for name in ("content", "output", "summary"):
            _text_of(getattr(item, name) or "", f"{field}.{name}")  # also where this kind of item has no such field
        if kind == "reasoning":
            reasoning = _text_of(item.content or item.summary or "", f"{field}.content") or None
        elif kind == "function_call":
            if not (messages and messages[-1].role == "assistant"):
                messages.append(ChatMessage(role="assistant", reasoning_content=reasoning))
                reasoning = None
            messages[-1].tool_calls = [*(messages[-1].tool_calls or ()), _call_of(item, field)]
        elif kind == "function_call_output":
            output = _required_text(item.output, f"{field}.output")
            call_id = _required(item.call_id, f"{field}.call_id")
            messages.append(ChatMessage(role="tool", content=output, tool_call_id=call_id))
        elif kind == "message":
            _required(item.role, f"{field}.role")
            content = _required_text(item.content, f"{field}.content")
            messages.append(ChatMessage(role=item.role or "user", content=content))
            if item.role == "assistant":
                messages[-1].reasoning_content, reasoning = reasoning, None
        else:
            raise bad_request(
                f"{field}.type is {kind[:100]!r}; items are message, function_call, function_call_output or reasoning",
                f"{field}.type",
            )
    if not messages:
        raise bad_request("input holds no message; give at least one", "input")
    return messages


def _call_of(item: InputItem, field: str) -> ToolCall:
    name, arguments = _required(item.name, f"{field}.name"), _required(item.arguments, f"{field}.arguments")
    try:
        msgspec.json.decode(arguments or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        where = f"{field}.arguments"
        raise bad_request(f"{where} must be a JSON object as text: {error}", where) from error
    function = CalledFunction(name=name, arguments=arguments)
    return ToolCall(id=_required(item.call_id, f"{field}.call_id"), function=function)


def _required(value: str | None, field: str) -> str:
    if value is None:
        raise _missing(field)
    return value


def _missing(field: str) -> ApiError:
    return bad_request(f"{field} is required but missing", field)


def _required_text(content: str | list[InputPart] | None, field: str) -> str:
    if content is None:
        raise _missing(field)
    return _text_of(content, field)


def _text_of(content: str | Sequence[InputPart], field: str) -> str:
    if isinstance(content, str):
        return content
    texts = []
    for index, part in enumerate(content):
        where = f"{field}[{index}]"
        if part.type not in _TEXT_KINDS and part.type != "refusal":
            raise bad_request(f"{where}.type is {part.type[:100]!r}; this model takes text only", f"{where}.type")
        name = "refusal" if part.type == "refusal" else "text"
        texts.append(_required(part.refusal if part.type == "refusal" else part.text, f"{where}.{name}"))
    return "\n".join(texts)


# ---- tools and form ----


def _tools_of(request: ResponsesRequest) -> tuple[list[Tool] | None, ToolChoice | None]:
    tools = [_tool_of(index, request) for index in range(len(request.tools or ()))]
    choice = request.tool_choice
    if isinstance(choice, FunctionChoice):
        return tools or None, NamedToolChoice(type="function", function=NamedFunction(name=choice.name))
    if not isinstance(choice, AllowedTools):
        return tools or None, choice
    declared = {tool.function.name for tool in tools}
    for index, allowed in enumerate(choice.tools):
        if allowed.name not in declared:
            where = f"tool_choice.tools[{index}].name"
            raise bad_request(f"{where} is {allowed.name[:100]!r}, which is none of the tools", where)
    names = {allowed.name for allowed in choice.tools}
    return [tool for tool in tools if tool.function.name in names], choice.mode


def _tool_of(index: int, request: ResponsesRequest) -> Tool:
    assert request.tools is not None
    tool = request.tools[index]
    function = FunctionDefinition(
        name=tool.name, description=tool.description, parameters=tool.parameters, strict=tool.strict
    )
    return Tool(type="function", function=function)


def _format_of(form: TextFormat | None) -> ResponseFormat | None:
    if form is None or form.type != "json_schema":
        return None if form is None else ResponseFormat(type=form.type)
    if form.schema is UNSET:
        raise bad_request("text.format.schema is missing; the type json_schema needs it", "text.format.schema")
    name = form.name if isinstance(form.name, str) and form.name else "answer"
    return ResponseFormat(type="json_schema", json_schema=JsonSchemaFormat(name=name, schema=form.schema))


# ---- errors ----


def renamed(error: ApiError) -> ApiError:
    """An error about a chat request, as one about the request for a response that it was made from."""
    message, param = str(error), error.param
    for pattern, ours in _FIELD_NAMES:
        message = pattern.sub(ours, message)
        param = pattern.sub(ours, param) if param is not None else None
    return ApiError(error.status, message, param, error.code, error.headers)


@contextmanager
def naming_items(fields: FieldNames) -> Iterator[None]:
    """Errors about the chat request that a request for a response was made into come out as errors about itself.

    Args:
        fields: what the chat request calls the engine's fields.
    """
    try:
        yield
    except (ApiError, RequestError) as error:
        raise renamed(api_error_of(error, fields)) from error
