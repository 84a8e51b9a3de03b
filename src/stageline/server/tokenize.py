"""/tokenize and /detokenize: texts and conversations as the model's tokens, and back, in vLLM's shapes."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from stageline.checkpoint.chat_template import client_variables
from stageline.server.errors import JSON, bad_request
from stageline.server.limits import decode_body
from stageline.server.operations import Operation
from stageline.server.prompts import decode_tokens, encode_text, render_chat
from stageline.server.protocol import MAX_DETOKENIZED, DetokenizeRequest, DetokenizeResponse, TokenizeResponse
from stageline.server.protocol_chat import TokenizeRequest
from stageline.server.routing import endpoint
from stageline.server.state import ServerState

_tokenize_decoder = msgspec.json.Decoder(TokenizeRequest)
_detokenize_decoder = msgspec.json.Decoder(DetokenizeRequest)
_EITHER = {
    "oneOf": [
        {"required": ["prompt"], "properties": {"prompt": {"type": "string"}, "messages": {"type": "null"}}},
        {"required": ["messages"], "properties": {"messages": {"type": "array"}, "prompt": {"type": "null"}}},
    ]
}
OPERATIONS = [
    Operation(
        "POST",
        "/tokenize",
        "Turn a text or a conversation into tokens",
        request=TokenizeRequest,
        request_rule=_EITHER,
        answer=TokenizeResponse,
        tag="tokens",
        example={"prompt": "The capital of France is"},
    ),
    Operation(
        "POST",
        "/detokenize",
        "Turn tokens into text",
        request=DetokenizeRequest,
        answer=DetokenizeResponse,
        tag="tokens",
        example={"tokens": [1, 2, 3]},
    ),
]


def routes(state: ServerState) -> list[Route]:
    return [
        Route("/tokenize", endpoint(state, tokenize), methods=["POST"]),
        Route("/detokenize", endpoint(state, detokenize), methods=["POST"]),
    ]


async def tokenize(state: ServerState, http: Request) -> Response:
    request = await decode_body(http, _tokenize_decoder, state.config.max_body_bytes)
    state.check_model(request.model or None)
    if (request.prompt is None) == (request.messages is None):
        raise bad_request("give either prompt or messages", "prompt" if request.prompt is None else "messages")
    is_chat = request.messages is not None
    field = "messages" if is_chat else "prompt"
    text = await _text(state, request)
    adds_special = not is_chat if request.add_special_tokens is None else request.add_special_tokens
    tokens = await encode_text(state, text, adds_special, field) if text else []
    texts = [state.llm.tokenizer.token_text(token) for token in tokens] if request.return_token_strs else None
    answer = TokenizeResponse(
        count=len(tokens), max_model_len=state.llm.max_model_len, tokens=tokens, token_strs=texts
    )
    return Response(msgspec.json.encode(answer), media_type=JSON)


async def _text(state: ServerState, request: TokenizeRequest) -> str:
    if request.messages is None:
        assert request.prompt is not None
        return request.prompt
    variables = client_variables(request.chat_template_kwargs or {}, state.llm.tokenizer.special_tokens)
    continues = bool(request.continue_final_message)
    return await render_chat(
        state, request.messages, request.tools, variables, request.add_generation_prompt, continues
    )


async def detokenize(state: ServerState, http: Request) -> Response:
    request = await decode_body(http, _detokenize_decoder, state.config.max_body_bytes)
    state.check_model(request.model or None)
    if len(request.tokens) > MAX_DETOKENIZED:
        raise bad_request(f"tokens holds {len(request.tokens)} tokens; give at most {MAX_DETOKENIZED}", "tokens")
    text = await decode_tokens(state, request.tokens, "tokens")
    return Response(msgspec.json.encode(DetokenizeResponse(prompt=text)), media_type=JSON)
