"""How much a client may send: refused by what its headers say, and never read beyond the limit.

One idea: a body is read in one place, into memory that is bounded before it is filled, and decoded in one step into the
struct that the route wants.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from stageline.server.errors import ApiError, api_error_of_decoding, bad_request, error_response
from stageline.server.unknown_fields import UnknownFields

MAX_HEADERS = 200
_Wanted = TypeVar("_Wanted")
_unknown_fields = UnknownFields()


class LimitHeaders:
    """Middleware: refuses too many headers, too long ones, too long bodies and compressed ones, before a body is read.

    Args:
        max_header_bytes: names and values of all headers together.
    """

    def __init__(self, app: ASGIApp, max_header_bytes: int, max_body_bytes: int) -> None:
        self._app = app
        self._max_header_bytes = max_header_bytes
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        error = self._refusal(scope["headers"]) if scope["type"] == "http" else None
        if error is None:
            await self._app(scope, receive, send)
            return
        # The body that follows is not read: the connection cannot be used again.
        error.headers["Connection"] = "close"
        await error_response(error)(scope, receive, send)

    def _refusal(self, headers: list[tuple[bytes, bytes]]) -> ApiError | None:
        if len(headers) > MAX_HEADERS:
            return ApiError(431, f"the request has {len(headers)} headers; send at most {MAX_HEADERS}")
        num_bytes = sum(len(name) + len(value) for name, value in headers)
        if num_bytes > self._max_header_bytes:
            return ApiError(431, f"the headers have {num_bytes} bytes; send at most {self._max_header_bytes}")
        for name, value in headers:
            if name == b"content-length" and not self._is_acceptable(value):
                return too_large(self._max_body_bytes)
            if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
                return ApiError(415, "compressed bodies are not accepted; send it without Content-Encoding")
        return None

    def _is_acceptable(self, content_length: bytes) -> bool:
        # Python refuses to read thousands of digits.
        is_number = content_length.isdigit() and len(content_length) <= 20
        return is_number and int(content_length) <= self._max_body_bytes


def too_large(max_body_bytes: int) -> ApiError:
    message = f"the body is larger than the {max_body_bytes} bytes that are accepted (--max-body-bytes)"
    return ApiError(413, message, code="too_large")


async def read_body(request: Request, max_body_bytes: int) -> bytes:
    """Raises: ApiError 413 as soon as more has come than is accepted."""
    body = bytearray()
    try:
        async for piece in request.stream():
            body += piece
            if len(body) > max_body_bytes:
                error = too_large(max_body_bytes)
                error.headers["Connection"] = "close"
                raise error
    except ClientDisconnect as error:
        raise bad_request("the connection was closed before the body was complete", None) from error
    return bytes(body)


async def decode_body(request: Request, decoder: msgspec.json.Decoder[_Wanted], max_body_bytes: int) -> _Wanted:
    """The request's body as a struct. Raises: ApiError, naming the field at fault."""
    _check_content_type(request)
    body = await read_body(request, max_body_bytes)
    if not body:
        raise bad_request("the body is empty; send a JSON object", None, "invalid_json")
    try:
        body.decode()  # the decoder looks at the strings that it keeps only
        decoded = decoder.decode(body)
        if isinstance(decoded, msgspec.Struct):
            _unknown_fields.look_for(request.url.path, body, decoded.__struct_encode_fields__)
        return decoded
    except UnicodeDecodeError as error:
        message = f"the body is not UTF-8: {error.reason} at byte {error.start}"
        raise bad_request(message, None, "invalid_json") from error
    except msgspec.DecodeError as error:
        raise api_error_of_decoding(error, body) from error
    except RecursionError as error:
        raise bad_request("the body is nested too deeply", None, "invalid_json") from error


def _check_content_type(request: Request) -> None:
    """JSON, or nothing said, as simple clients do. A form of another web page cannot send either without asking."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind and kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(415, f"the body is of type {kind[:100]!r}; send application/json")
