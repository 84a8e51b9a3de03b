"""/v1/completions: prompts in, continuations out, whole or as a stream.

One idea: several prompts are several requests of the engine; choice j of prompt i has the index i * n + j, and how the
parts are put together is in `completion_answer.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from stageline.outputs import OutputKind, RequestOutput
from stageline.sampling import MAX_N, SamplingParams, UpTo
from stageline.server.completion_answer import CompletionPlan, CompletionStream, PlannedPrompt, whole_answer
from stageline.server.errors import JSON, FieldNames, bad_request, client_left, naming
from stageline.server.generation import Outputs, TokenCount, check_in_time, interleaved, last_output, opened
from stageline.server.limits import decode_body
from stageline.server.operations import Operation
from stageline.server.prompts import decode_tokens, encode_text, parse_prompts
from stageline.server.protocol import MAX_COMPLETIONS
from stageline.server.protocol_completions import Completion, CompletionRequest
from stageline.server.protocol_sampling import sampling_params, structured_field_names
from stageline.server.request_record import record_of
from stageline.server.routing import endpoint
from stageline.server.state import AnswerHead, ServerState
from stageline.server.streaming import DONE, EventStream, until_disconnect

# OpenAI's, and SamplingParams' own.
_DEFAULT_MAX_TOKENS = UpTo(16)
_decoder = msgspec.json.Decoder(CompletionRequest)
OPERATIONS = [
    Operation(
        "POST",
        "/v1/completions",
        "Continue prompts",
        request=CompletionRequest,
        answer=Completion,
        event=Completion,
        tag="generation",
        example={"prompt": "The capital of France is", "max_tokens": 8},
    )
]


def routes(state: ServerState) -> list[Route]:
    return [Route("/v1/completions", endpoint(state, create_completion), methods=["POST"])]


async def create_completion(state: ServerState, http: Request) -> Response:
    request = await decode_body(http, _decoder, state.config.max_body_bytes)
    fields = FieldNames({"prompt_token_ids": "prompt", **structured_field_names(request)})
    with naming(fields):
        plan = await plan_completion(state, request)
        num_prompt_tokens = sum(len(prompt.token_ids) for prompt in plan.prompts)
        count = TokenCount(record_of(http.scope), num_prompt_tokens, counts_output=not plan.is_only_scored)
        if request.is_streamed:
            return EventStream(completion_events(state, plan, count), fields)
        answer = await until_disconnect(http.receive, complete(state, plan, count))
    return client_left() if answer is None else Response(msgspec.json.encode(answer), media_type=JSON)


async def complete(state: ServerState, plan: CompletionPlan, count: TokenCount) -> Completion:
    """The whole answer. Raises: what `opened` does, and ApiError 504."""
    prompts = [prompt.token_ids for prompt in plan.prompts]
    opening = opened(state, plan.head.id, prompts, plan.params, plan.request, OutputKind.FINAL_ONLY)
    async with opening as streams:
        outputs = await _finished(state, streams)
    for place, output in enumerate(outputs):
        count.add(output, place)
    return whole_answer(state, plan, outputs, count)


async def completion_events(
    state: ServerState, plan: CompletionPlan, count: TokenCount
) -> AsyncGenerator[bytes, None]:
    """The answer as pieces of a stream. Raises, before the first or later, as `complete` does."""
    prompts = [prompt.token_ids for prompt in plan.prompts]
    opening = opened(state, plan.head.id, prompts, plan.params, plan.request, OutputKind.DELTA)
    num_unfinished = len(prompts)
    async with opening as streams:
        stream = CompletionStream(state, plan, count)
        async for place, output in interleaved(streams):
            check_in_time(state, output)
            count.add(output, place)
            events = stream.take(place, output)
            num_unfinished -= output.is_finished
            if num_unfinished == 0:
                events += stream.ending() + DONE
            if events:
                yield events


async def plan_completion(state: ServerState, request: CompletionRequest) -> CompletionPlan:
    """Raises: ApiError or RequestError for whatever can be known to be wrong before the engine hears of it."""
    head = AnswerHead.new(state, "cmpl", state.check_model(request.model))
    if request.suffix:
        raise bad_request("suffix is not supported: the model continues texts, it does not fill gaps", "suffix")
    params = _params(state, request)
    prompts = parse_prompts(request.prompt)
    # More than MAX_N is the fault of n alone, and refused as such with all that is wrong with parameters.
    if params.n <= MAX_N and len(prompts) * params.n > MAX_COMPLETIONS:
        asked = f"{len(prompts)} prompts with {params.n} choices each are {len(prompts) * params.n} completions"
        raise bad_request(f"{asked}; ask for at most {MAX_COMPLETIONS} with one request", "prompt")
    planned = []
    for index, prompt in enumerate(prompts):
        field = "prompt" if len(prompts) == 1 else f"prompt[{index}]"
        if isinstance(prompt, str):
            token_ids = await encode_text(state, prompt, request.add_special_tokens is not False, field)
            planned.append(PlannedPrompt(token_ids, prompt if request.echo else ""))
        else:
            # One that does not fit is refused by the engine: its text would be made for nobody.
            is_shown = bool(request.echo) and len(prompt) < state.llm.max_model_len
            text = await decode_tokens(state, prompt, field) if is_shown else ""
            planned.append(PlannedPrompt(prompt, text))
    return CompletionPlan(request, head, planned, params)


def _params(state: ServerState, request: CompletionRequest) -> SamplingParams:
    max_tokens = _DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    # The engine always generates; of an answer without tokens, the one is thrown away.
    params = sampling_params(request, state.llm.default_sampling_params(), max_tokens or 1, request.logprobs)
    if request.echo and request.logprobs is not None:
        params = msgspec.structs.replace(params, prompt_logprobs=max(request.logprobs, request.prompt_logprobs or 0))
    best_of = request.best_of
    if best_of is None or best_of == params.n:
        return params
    if not params.n <= best_of <= MAX_N:
        raise bad_request(f"best_of is {best_of}; it must be between n, which is {params.n}, and {MAX_N}", "best_of")
    if request.is_streamed:
        raise bad_request("best_of above n cannot be streamed: which are the best is known at the end", "best_of")
    params.validate(state.llm.spec.vocab_size)
    return msgspec.structs.replace(params, n=best_of, logprobs=params.logprobs or 0)


async def _finished(state: ServerState, streams: Sequence[Outputs]) -> list[RequestOutput]:
    """The whole output of each. The first that fails ends the others."""
    if len(streams) == 1:
        return [await last_output(state, streams[0])]
    tasks = [asyncio.ensure_future(last_output(state, stream)) for stream in streams]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
