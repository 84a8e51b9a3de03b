"""/v1/responses: OpenAI's newer way to ask for an answer. Nothing is kept between requests.

One idea: the request is turned into a chat request (`responses_input.py`), answered as one, and its answer told as
items and events (`responses_answer.py`).
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from dataclasses import replace

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from stageline.outputs import OutputKind
from stageline.server.chat import fields_of, plan_chat
from stageline.server.chat_answer import ChatPlan
from stageline.server.errors import JSON, ApiError, api_error_of, client_left
from stageline.server.generation import TokenCount, check_in_time, last_output, opened
from stageline.server.limits import decode_body
from stageline.server.operations import Operation
from stageline.server.request_record import record_of
from stageline.server.responses_answer import ResponseBuilder, whole_response
from stageline.server.responses_input import chat_request_of, naming_items, renamed
from stageline.server.responses_protocol import ModelResponse, ResponseEvent, ResponsesRequest
from stageline.server.routing import endpoint
from stageline.server.state import ServerState
from stageline.server.streaming import EventStream, until_disconnect

_decoder = msgspec.json.Decoder(ResponsesRequest)
OPERATIONS = [
    Operation(
        "POST",
        "/v1/responses",
        "Answer a conversation, as items",
        request=ResponsesRequest,
        answer=ModelResponse,
        event=ResponseEvent,
        tag="generation",
        example={"input": "What is the capital of France?", "max_output_tokens": 32},
    )
]


def routes(state: ServerState) -> list[Route]:
    return [Route("/v1/responses", endpoint(state, create_response), methods=["POST"])]


async def create_response(state: ServerState, http: Request) -> Response:
    request = await decode_body(http, _decoder, state.config.max_body_bytes)
    chat_request = chat_request_of(request)
    with naming_items(fields_of(chat_request)):
        plan = await plan_chat(state, chat_request)
        plan = replace(plan, head=replace(plan.head, id=f"resp_{uuid.uuid4().hex}"))
        count = TokenCount(record_of(http.scope), len(plan.prompt_token_ids))
        if request.is_streamed:
            return EventStream(response_events(state, request, plan, count), ending=b"")
        answer = await until_disconnect(http.receive, complete_response(state, request, plan, count))
    return client_left() if answer is None else Response(msgspec.json.encode(answer), media_type=JSON)


async def complete_response(
    state: ServerState, request: ResponsesRequest, plan: ChatPlan, count: TokenCount
) -> ModelResponse:
    """The whole response. Raises: what `opened` does, and ApiError 504."""
    opening = opened(state, plan.head.id, [plan.prompt_token_ids], plan.params, plan.request, OutputKind.FINAL_ONLY)
    async with opening as [outputs]:
        output = await last_output(state, outputs)
    count.add(output)
    return whole_response(state, request, plan, count, output.outputs)


async def response_events(
    state: ServerState, request: ResponsesRequest, plan: ChatPlan, count: TokenCount
) -> AsyncGenerator[bytes, None]:
    """The response as pieces of a stream; once it has begun, what goes wrong is told by an event.

    Raises: ApiError, before it has begun.
    """
    builder = ResponseBuilder(state, request, plan, count)
    has_begun = False
    try:
        opening = opened(state, plan.head.id, [plan.prompt_token_ids], plan.params, plan.request, OutputKind.DELTA)
        async with opening as [outputs]:
            has_begun = True
            yield builder.beginning()
            async for output in outputs:
                check_in_time(state, output)
                count.add(output)
                [completion] = output.outputs
                if events := builder.take(completion):
                    yield events
    except Exception as error:
        told: ApiError = renamed(api_error_of(error, fields_of(plan.request)))
        if not has_begun:
            raise told from error
        yield builder.failure(told)
