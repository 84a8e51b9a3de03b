"""Small parts of the HTTP API: bytes of tokens, prompts, limits, keys and origins, without a model."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import httpx
import msgspec
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from stageline.checkpoint.token_pieces import piece_bytes
from stageline.errors import (
    EngineLost,
    EngineSilent,
    NotReady,
    QueueFull,
    RequestError,
    RequestOverdue,
    WorkerLost,
)
from stageline.outputs import Logprob
from stageline.server import unknown_fields
from stageline.server.auth import RequireKey
from stageline.server.errors import FieldNames, api_error_of, api_error_of_decoding, error_event
from stageline.server.limits import LimitHeaders
from stageline.server.logprobs import LOWEST_LOGPROB, completion_logprobs, prompt_logprobs
from stageline.server.prompts import parse_prompts
from stageline.server.protocol_chat import ChatCompletionRequest
from stageline.server.streaming import until_disconnect
from stageline.server.unknown_fields import UnknownFields


@pytest.mark.parametrize(
    ("piece", "expected"),
    [("<0xE2>", b"\xe2"), ("ĠðŁĺ", b" \xf0\x9f\x98"), ("Ċ", b"\n"), ("▁é", "▁é".encode()), ("", b"")],
)
def test_a_piece_has_the_bytes_that_it_spells(piece: str, expected: bytes) -> None:
    assert piece_bytes(piece) == expected


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_a_prompt_is_a_text_or_ids_or_several(prompt: Any, expected: list[Any]) -> None:
    assert parse_prompts(prompt) == expected


def test_impossible_tokens_have_a_logprob_that_json_can_hold() -> None:
    described = {5: Logprob(-math.inf, 9, "x"), 6: Logprob(-0.1, 1, "y")}
    shown = completion_logprobs([5], [described], 3)
    assert shown.token_logprobs == [LOWEST_LOGPROB]
    assert shown.text_offset == [3]
    [first, second] = prompt_logprobs([None, described])
    assert first is None and second is not None
    assert second["5"].logprob == LOWEST_LOGPROB


@pytest.mark.parametrize(
    ("error", "status", "retries"),
    [
        (RequestError("no", "n"), 400, False),
        (QueueFull("full", retry_after_s=0.2), 429, True),
        (NotReady("loading", retry_after_s=2.5), 503, True),
        (WorkerLost(1, "killed", "Traceback: secrets"), 500, False),
        (EngineLost("gone"), 500, False),
        (EngineSilent("silent"), 503, True),
        (RequestOverdue("late"), 504, False),
        (ValueError("secrets of the server"), 500, False),
        (RecursionError(), 400, False),
    ],
)
def test_errors_have_their_status_and_tell_no_secrets(error: Exception, status: int, retries: bool) -> None:
    told = api_error_of(error)
    assert told.status == status
    assert ("Retry-After" in told.headers) == retries
    assert all(value.isdigit() and int(value) >= 1 for value in told.headers.values())
    assert b"secrets" not in error_event(told)


def test_an_error_names_the_field_as_the_request_has_it() -> None:
    error = api_error_of(RequestError("too many", "logprobs"), FieldNames({"logprobs": "top_logprobs"}))
    assert error.detail.param == "top_logprobs"


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        (b'{"model": "m"}', "messages", "missing"),
        (b'{"model": "m", "messages": [{"role": "x"}]}', "messages[0].role", "developer, system, user"),
        (b'{"model": "m", "messages": [], "n": "1"}', "n", "expected `integer | null`, got `string`"),
        (b'{"model": "m", "messages": [], "logit_bias": {"1": "x"}}', "logit_bias[...]", "number"),
        (b'{"model": "m", "stop": "\\udead"}', None, "surrogate"),
        (b"{", None, "not valid JSON"),
    ],
)
def test_what_cannot_be_decoded_is_told_in_terms_of_json(body: bytes, param: str | None, words: str) -> None:
    with pytest.raises(msgspec.DecodeError) as refused:
        msgspec.json.decode(body, type=ChatCompletionRequest)
    error = api_error_of_decoding(refused.value, body)
    assert (error.status, error.param) == (400, param)
    assert words in str(error)


async def _hello(_request: Request) -> Response:
    return Response("hello")


def _ask(middleware: Middleware, headers: dict[str, str], path: str = "/x", root: str = "") -> httpx.Response:
    app = Starlette(routes=[Route("/x", _hello), Route("/health", _hello)], middleware=[middleware])

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app, root_path=root)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.get(root + path, headers=headers)

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({f"x-{n}": "y" for n in range(150)}, 200),
        ({f"x-{n}": "y" for n in range(300)}, 431),
        ({"x": "y" * 9000}, 431),
        ({"content-length": "2000"}, 413),
        ({"content-length": "9" * 5000}, 413),
        ({"content-encoding": "gzip"}, 415),
        ({"content-encoding": "identity"}, 200),
    ],
)
def test_headers_alone_decide_what_is_not_read(headers: dict[str, str], status: int) -> None:
    answer = _ask(Middleware(LimitHeaders, 8000, 1000), headers)
    assert answer.status_code == status
    assert status == 200 or answer.headers["connection"] == "close"


@pytest.mark.parametrize("root", ["", "/llm"])
def test_below_a_root_path_the_same_routes_are_open(root: str) -> None:
    middleware = Middleware(RequireKey, ["secret"])
    assert _ask(middleware, {}, "/health", root).status_code == 200
    assert _ask(middleware, {}, "/x", root).status_code == 401
    assert _ask(middleware, {"Authorization": "Bearer secret"}, "/x", root).status_code == 200


def test_work_is_over_before_its_reader_is_forgotten() -> None:
    """What the work holds is given back when `until_disconnect` returns, not some time later."""
    given_back: list[str] = []

    async def work() -> str:
        try:
            await asyncio.Event().wait()
            return "done"
        finally:
            await asyncio.sleep(0)
            given_back.append("given back")

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    assert asyncio.run(until_disconnect(receive, work())) is None
    assert given_back == ["given back"]


def test_work_that_is_done_gives_its_result() -> None:
    async def work() -> str:
        return "done"

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    assert asyncio.run(until_disconnect(receive, work())) == "done"


def test_an_unknown_field_is_told_once_with_the_one_that_was_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(unknown_fields.logger, "warning", lambda message, *words: told.append(message % words))
    fields, known = UnknownFields(most=3), ChatCompletionRequest.__struct_encode_fields__
    body = b'{"messages": [], "max_token": 5, "store": true, "top_k": 1, "x\\n": {"a": 1}}'
    for _ in range(3):
        fields.look_for("/chat", body, known)
    assert told == [
        "a request to /chat has the field 'max_token', which is not known and ignored (told once); "
        "did its client mean max_tokens?",
        "a request to /chat has the field 'x\\n', which is not known and ignored (told once)",
    ]
    fields.look_for("/chat", msgspec.json.encode({f"name {number}": 1 for number in range(9)}), known)
    assert len(told) == 3, "clients cannot fill the log"
