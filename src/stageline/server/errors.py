"""What a client hears when something goes wrong: OpenAI's error body with the right status, and never a traceback.

One idea: code raises (`ApiError`, or an error of Stageline's own tree) and one table here turns that into an answer,
the same for a plain answer and for the last event of a stream.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from stageline.errors import (
    EngineLost,
    EngineSilent,
    NotReady,
    QueueFull,
    RequestError,
    RequestOverdue,
    WorkerLost,
)
from stageline.server.protocol import ErrorBody, ErrorDetail

logger = logging.getLogger(__name__)

JSON = "application/json"
_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: of HTTP.
        message: what is wrong, with the numbers and the way out.
        param: the field of the request at fault, such as "messages[0].role".
        code: for programs, such as "model_not_found".
        headers: further ones of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = headers or {}

    @property
    def detail(self) -> ErrorDetail:
        kind = _TYPES.get(self.status) or ("invalid_request_error" if self.status < 500 else "server_error")
        return ErrorDetail(message=str(self), type=kind, param=self.param, code=self.code)


@dataclass(frozen=True)
class FieldNames:
    """What a route's fields are called, where the engine calls them something else."""

    names: dict[str, str] = field(default_factory=dict)

    def of(self, engine_field: str) -> str:
        return self.names.get(engine_field, engine_field)


def bad_request(message: str, param: str | None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param, code)


@contextmanager
def naming(fields: FieldNames) -> Iterator[None]:
    """Errors about the engine's fields come out as errors about the request's."""
    try:
        yield
    except RequestError as error:
        raise api_error_of(error, fields) from error


def api_error_of(error: Exception, fields: FieldNames | None = None) -> ApiError:
    """What to answer. Anything that is not the client's doing is logged, and told without its inner details."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        code = "context_length_exceeded" if "prompt and output together" in str(error) else None
        name = (fields or FieldNames()).of(error.field)
        # Names with a dot stand for nothing else in a message; "prompt" is also a word.
        message = str(error).replace(error.field, name) if "." in error.field else str(error)
        return bad_request(message, name, code)
    if isinstance(error, RecursionError):
        return bad_request("the request is nested too deeply", None)
    if isinstance(error, QueueFull | NotReady):
        is_queue = isinstance(error, QueueFull)
        retry = {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
        code = "queue_full" if is_queue else "not_ready"
        return ApiError(429 if is_queue else 503, str(error), code=code, headers=retry)
    if isinstance(error, EngineSilent):
        retry = {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
        return ApiError(503, str(error), code="engine_silent", headers=retry)
    if isinstance(error, RequestOverdue):
        return ApiError(504, f"{error} (--request-timeout-s)", code="timeout")
    if isinstance(error, WorkerLost):
        return ApiError(500, f"stage {error.stage_index} of the pipeline was lost; the server is stopping", code="lost")
    if isinstance(error, EngineLost):
        return ApiError(500, "the engine stopped before the request was answered", code="lost")
    logger.error("a request failed in a way that was not foreseen", exc_info=error)
    return ApiError(500, "the server failed to answer; its log says why", code="internal_error")


def timed_out(timeout_s: float | None) -> ApiError:
    """The engine ended a request because its time was over."""
    limit = "" if timeout_s is None else f" within {timeout_s:g} seconds (--request-timeout-s)"
    return ApiError(504, f"the request was not finished{limit}", code="timeout")


def error_event(error: ApiError) -> bytes:
    """The error as an event of a stream."""
    return b"data: " + msgspec.json.encode(ErrorBody(error.detail)) + b"\n\n"


def error_response(error: ApiError) -> Response:
    """The error as a whole answer."""
    body = msgspec.json.encode(ErrorBody(error.detail))
    return Response(body, error.status, {**error.headers}, media_type=JSON)


def client_left() -> Response:
    """For logs and counters only: nobody is there to read it. The status is what proxies write for this."""
    return Response(status_code=499)


async def on_http_exception(request: Request, exception: Exception) -> Response:
    """Of the router: no such path, or not with this method."""
    assert isinstance(exception, HTTPException)
    path = request.url.path
    if exception.status_code == 404:
        message = f"there is no {path}; /openapi.json lists what there is"
    elif exception.status_code == 405:
        allowed = (exception.headers or {}).get("Allow", "")
        message = f"{path} does not answer {request.method}; use {allowed}"
    else:
        message = exception.detail
    return error_response(ApiError(exception.status_code, message, headers=dict(exception.headers or {})))


async def on_error(_request: Request, exception: Exception) -> Response:
    """Anything that a route raised."""
    return error_response(api_error_of(exception))


_AT = re.compile(r"^(?P<what>.*) - at `(?P<path>\$.*)`$", re.S)
_MISSING = re.compile(r"^Object missing required field `(?P<name>[^`]+)`$")
_LONE_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_LONGEST_ECHO = 200
_JSON_TYPES = {"int": "integer", "float": "number", "str": "string", "bool": "boolean"}
# The decoder says which value is wrong, and not which are right.
_CHOICES = (
    (re.compile(r"\.role$"), "; a role is developer, system, user, assistant or tool"),
    (re.compile(r"^(response_format|text\.format)\.type$"), "; give text, json_object or json_schema"),
    (re.compile(r"^tools\[\d+\]\.type$"), "; tools are functions: give function"),
)
# In the messages of msgspec, which names Python's types in backticks.
_TYPE_NAME = re.compile(r"\b(?:int|float|str|bool)\b(?=[^`]*`(?:[^`]*`[^`]*`)*[^`]*$)")


def api_error_of_decoding(error: msgspec.DecodeError, body: bytes) -> ApiError:
    """Why a body is no request, in terms of its fields."""
    if not isinstance(error, msgspec.ValidationError):
        return bad_request(f"the body is not valid JSON: {_malformed(str(error), body)}", None, "invalid_json")
    text, path = str(error), "$"
    if found := _AT.match(text):
        text, path = found["what"], found["path"]
    if missing := _MISSING.match(text):
        path, text = f"{path}.{missing['name']}", "is required but missing"
        if path == "$.model":
            text += "; /v1/models lists the names"
    param = path.removeprefix("$").removeprefix(".") or None
    text = _TYPE_NAME.sub(lambda name: _JSON_TYPES.get(name[0], name[0]), text[:_LONGEST_ECHO])
    text += next((words for place, words in _CHOICES if place.search(param or "")), "")
    return bad_request(f"{param or 'the body'}: {text[0].lower()}{text[1:]}", param)


def _malformed(text: str, body: bytes) -> str:
    if _LONE_SURROGATE.search(body):
        return "a string holds half of a surrogate pair (\\ud800 to \\udfff), which is no character"
    return text.removeprefix("JSON is malformed: ")
