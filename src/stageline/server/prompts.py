"""Prompts of requests, as token ids.

One idea: a prompt that cannot fit is refused by its length in bytes, before seconds are spent on turning it into
tokens; and what takes long is done in a thread, so that other requests' tokens go out meanwhile.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from stageline.checkpoint.chat_template import ObjectOrText
from stageline.errors import RequestError
from stageline.server.answer_parsing.prompt_tools import tools_as_text
from stageline.server.errors import bad_request
from stageline.server.protocol import MAX_MESSAGES, MAX_PROMPTS
from stageline.server.protocol_chat import ChatMessage, ContentPart, Tool, ToolCall
from stageline.server.state import ServerState

# Decoding tokens below this size is over sooner than a thread would have begun.
_LONG_TEXT = 20_000
_CONTENT_KINDS = {"text", "refusal"}


def parse_prompts(prompt: Any) -> list[str | list[int]]:
    """The prompts of a completion request: a text, token ids, or a list of either. Raises: ApiError."""
    if isinstance(prompt, str):
        return [_non_empty(prompt, "prompt")]
    if not isinstance(prompt, list):
        raise bad_request("prompt must be a text, a list of token ids, or a list of either", "prompt")
    if not prompt:
        raise bad_request("prompt is an empty list; give at least one prompt", "prompt")
    if _are_token_ids(prompt):
        return [prompt]
    if len(prompt) > MAX_PROMPTS:
        raise bad_request(f"prompt holds {len(prompt)} prompts; give at most {MAX_PROMPTS}", "prompt")
    is_text = isinstance(prompt[0], str)
    for index, one in enumerate(prompt):
        field = f"prompt[{index}]"
        if is_text and not isinstance(one, str):
            raise bad_request(f"{field} is no text, but prompt[0] is; give prompts of one kind", field)
        if not is_text and not (isinstance(one, list) and _are_token_ids(one)):
            raise bad_request(f"{field} is no list of token ids; give integers only", field)
        _non_empty(one, field)
    return list(prompt)


def _are_token_ids(values: list[Any]) -> bool:
    return all(isinstance(value, int) and not isinstance(value, bool) for value in values)


def _non_empty(prompt: Any, field: str) -> Any:
    if not prompt:
        raise bad_request(f"{field} is empty; give at least one token", field)
    return prompt


async def encode_text(state: ServerState, text: str, add_special_tokens: bool, field: str) -> list[int]:
    """Raises: ApiError if the text cannot fit into the model's length, however it is cut into tokens."""
    longest_bytes = state.longest_prompt_bytes
    num_bytes = len(text.encode())
    if num_bytes > longest_bytes:
        raise bad_request(
            f"the prompt has {num_bytes} bytes; prompt and output together may have {state.llm.max_model_len} tokens, "
            f"which is at most {longest_bytes} bytes",
            field,
            "context_length_exceeded",
        )
    return await state.llm.encode(text, add_special_tokens)


async def decode_tokens(state: ServerState, token_ids: list[int], field: str) -> str:
    """The tokens' text, special tokens included. Raises: ApiError for an id that the model does not have."""
    highest = state.llm.spec.vocab_size - 1
    for token_id in token_ids:
        if not 0 <= token_id <= highest:
            raise bad_request(f"{field} holds token id {token_id}; the model has ids 0 to {highest}", field)
    decode = state.llm.tokenizer.decode
    if len(token_ids) < _LONG_TEXT:
        return decode(token_ids, skip_special_tokens=False)
    return await asyncio.to_thread(decode, token_ids, skip_special_tokens=False)


async def render_chat(
    state: ServerState,
    messages: list[ChatMessage],
    tools: list[Tool] | None,
    template_kwargs: dict[str, Any],
    add_generation_prompt: bool | None,
    continue_final_message: bool,
) -> str:
    """The conversation as the model's template writes it. Raises: ApiError or RequestError, naming the message."""
    if continue_final_message and add_generation_prompt:
        raise bad_request(
            "continue_final_message and add_generation_prompt are both true; an answer either goes on or begins",
            "continue_final_message",
        )
    described = [template_tool(tool) for tool in tools or ()]
    plain = tools_as_text(template_messages(messages), described, state.llm.tokenizer.chat_template_sources)
    begins_answer = not continue_final_message if add_generation_prompt is None else add_generation_prompt
    render = state.llm.tokenizer.apply_chat_template
    if described:
        template_kwargs = {**template_kwargs, "tools": described}
    try:
        # In a thread however short it is: a template may make much of little.
        text = await asyncio.to_thread(render, plain, begins_answer, **template_kwargs)
    except TypeError as error:
        raise RequestError(f"chat_template_kwargs cannot be used: {error}", "chat_template_kwargs") from error
    return _without_ending(text, plain[-1]) if continue_final_message else text


def template_messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as chat templates expect them: texts instead of parts, arguments as objects. Raises: ApiError."""
    if not messages:
        raise bad_request("messages is empty; give at least one message", "messages")
    if len(messages) > MAX_MESSAGES:
        raise bad_request(f"messages holds {len(messages)} messages; give at most {MAX_MESSAGES}", "messages")
    return [_template_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _template_message(message: ChatMessage, field: str) -> dict[str, Any]:
    may_be_empty = message.role == "assistant"
    if message.content is None and not may_be_empty:
        raise bad_request(f"{field}.content is missing; give a text", f"{field}.content")
    plain: dict[str, Any] = {
        # Templates know no developer: OpenAI calls system messages so since its reasoning models.
        "role": "system" if message.role == "developer" else message.role,
        "content": _text(message.content, f"{field}.content"),
    }
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            plain[name] = value
    if message.tool_calls:
        calls = enumerate(message.tool_calls)
        plain["tool_calls"] = [template_call(call, f"{field}.tool_calls[{place}]") for place, call in calls]
    return plain


def template_call(call: ToolCall, field: str) -> dict[str, Any]:
    """Raises: ApiError if the arguments are no JSON object."""
    try:
        arguments = msgspec.json.decode(call.function.arguments or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        where = f"{field}.function.arguments"
        raise bad_request(f"{where} must be a JSON object as text: {error}", where) from error
    function = {"name": call.function.name, "arguments": ObjectOrText(arguments)}
    return {"id": call.id, "type": "function", "function": function}


def template_tool(tool: Tool) -> dict[str, Any]:
    function = tool.function
    described: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        described["description"] = function.description
    described["parameters"] = function.parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": described}


def _text(content: str | list[ContentPart] | None, field: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for index, part in enumerate(content):
        where = f"{field}[{index}]"
        if part.type not in _CONTENT_KINDS:
            raise bad_request(f"{where} is of type {part.type[:100]!r}; this model takes text only", f"{where}.type")
        text = part.text if part.type == "text" else part.refusal
        if not isinstance(text, str):
            raise bad_request(f"{where}.{part.type} is missing; give a text", f"{where}.{part.type}")
        texts.append(text)
    return "\n".join(texts)


def _without_ending(rendered: str, final_message: dict[str, Any]) -> str:
    """The text up to the end of the last message's content, so that the model goes on with it."""
    content = str(final_message["content"])
    place = rendered.rfind(content.strip())
    if not content.strip() or place < 0:
        raise bad_request(
            "continue_final_message is set, but the chat template changes the last message's content, or it is empty",
            "continue_final_message",
        )
    begun = content.lstrip()
    kept = begun if rendered.startswith(begun, place) else content.strip()
    return rendered[: place + len(kept)]
