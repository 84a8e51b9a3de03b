"""/v1/chat/completions: a conversation in, answers out, whole or as a stream.

One idea: a request is understood once, into a `ChatPlan`; from there the whole answer and the stream differ only in how
the engine's outputs are put together (`chat_answer.py`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from stageline.checkpoint.chat_template import client_variables
from stageline.outputs import OutputKind
from stageline.server.answer_parsing import check_tools, structured_outputs_of_tool_choice
from stageline.server.chat_answer import ChatPlan, ChatStream, whole_answer
from stageline.server.errors import JSON, FieldNames, bad_request, client_left, naming
from stageline.server.generation import TokenCount, check_in_time, last_output, opened
from stageline.server.limits import decode_body
from stageline.server.operations import Operation
from stageline.server.prompts import encode_text, render_chat
from stageline.server.protocol_chat import ChatCompletion, ChatCompletionChunk, ChatCompletionRequest
from stageline.server.protocol_sampling import sampling_params, structured_field_names
from stageline.server.request_record import record_of
from stageline.server.routing import endpoint
from stageline.server.state import AnswerHead, ServerState
from stageline.server.streaming import DONE, EventStream, until_disconnect

_decoder = msgspec.json.Decoder(ChatCompletionRequest)
FIELDS = FieldNames({"prompt": "messages", "prompt_token_ids": "messages", "logprobs": "top_logprobs"})
OPERATIONS = [
    Operation(
        "POST",
        "/v1/chat/completions",
        "Answer a conversation",
        request=ChatCompletionRequest,
        answer=ChatCompletion,
        event=ChatCompletionChunk,
        tag="generation",
        example={"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 32},
    )
]


def routes(state: ServerState) -> list[Route]:
    return [Route("/v1/chat/completions", endpoint(state, create_chat_completion), methods=["POST"])]


async def create_chat_completion(state: ServerState, http: Request) -> Response:
    request = await decode_body(http, _decoder, state.config.max_body_bytes)
    with naming(fields_of(request)):
        plan = await plan_chat(state, request)
        count = TokenCount(record_of(http.scope), len(plan.prompt_token_ids))
        if request.is_streamed:
            return EventStream(chat_events(state, plan, count), fields_of(request))
        answer = await until_disconnect(http.receive, complete_chat(state, plan, count))
    return client_left() if answer is None else Response(msgspec.json.encode(answer), media_type=JSON)


def fields_of(request: ChatCompletionRequest) -> FieldNames:
    """What this request calls the engine's fields."""
    names = FIELDS.names | structured_field_names(request)
    if request.tools and request.tool_choice not in (None, "none", "auto"):
        names["structured_outputs.json"] = "tools"
    if request.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    return FieldNames(names)


async def complete_chat(state: ServerState, plan: ChatPlan, count: TokenCount) -> ChatCompletion:
    """The whole answer. Raises: what `opened` does, and ApiError 504."""
    opening = opened(
        state, plan.head.id, [plan.prompt_token_ids], plan.params, plan.request, OutputKind.FINAL_ONLY
    )
    async with opening as [outputs]:
        output = await last_output(state, outputs)
    count.add(output)
    return whole_answer(state, plan, output, count)


async def chat_events(state: ServerState, plan: ChatPlan, count: TokenCount) -> AsyncGenerator[bytes, None]:
    """The answer as pieces of a stream. Raises, before the first or later, as `complete_chat` does."""
    opening = opened(state, plan.head.id, [plan.prompt_token_ids], plan.params, plan.request, OutputKind.DELTA)
    async with opening as [outputs]:
        # Not before the engine has taken the request: until then, n may be any number.
        stream = ChatStream(state, plan, count)
        async for output in outputs:
            check_in_time(state, output)
            count.add(output)
            events = stream.take(output)
            if output.is_finished:
                events += stream.ending() + DONE
            if events:
                yield events


async def plan_chat(state: ServerState, request: ChatCompletionRequest) -> ChatPlan:
    """Raises: ApiError or RequestError for whatever can be known to be wrong before the engine hears of it."""
    head = AnswerHead.new(state, "chatcmpl", state.check_model(request.model))
    check_tools(request)
    _refuse_foreign_template(request)
    num_top_logprobs = _num_top_logprobs(request)
    max_tokens = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    params = sampling_params(request, state.llm.default_sampling_params(), max_tokens, num_top_logprobs)
    tools = request.tools if request.tool_choice != "none" else None
    forced = structured_outputs_of_tool_choice(tools, request.tool_choice, request.parallel_tool_calls is not False)
    if forced is not None:
        params = msgspec.structs.replace(params, structured_outputs=forced)
    if state.answer_style.needs_special_tokens(bool(tools)):
        params = msgspec.structs.replace(params, skip_special_tokens=False)
    text = await render_chat(
        state,
        request.messages,
        tools,
        _template_variables(state, request),
        request.add_generation_prompt,
        bool(request.continue_final_message),
    )
    prompt_token_ids = await encode_text(state, text, bool(request.add_special_tokens), "messages")
    return ChatPlan(request, head, text, prompt_token_ids, params, num_top_logprobs)


def _refuse_foreign_template(request: ChatCompletionRequest) -> None:
    if request.chat_template is not None:
        raise bad_request(
            "chat_template is not accepted from clients; the operator gives one with --chat-template", "chat_template"
        )


def _num_top_logprobs(request: ChatCompletionRequest) -> int | None:
    if request.logprobs:
        return request.top_logprobs or 0
    if request.top_logprobs:
        raise bad_request("top_logprobs needs logprobs to be true", "top_logprobs")
    return None


def _template_variables(state: ServerState, request: ChatCompletionRequest) -> dict[str, Any]:
    variables = client_variables(request.chat_template_kwargs or {}, state.llm.tokenizer.special_tokens)
    if request.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", request.reasoning_effort)
    if request.documents is not None:
        variables["documents"] = request.documents
    return variables
