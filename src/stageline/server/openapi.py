"""/openapi.json: what the server takes and gives, written by the structs that take and give it (OpenAPI 3.1).

One idea: nothing is described twice. Schemas come from the structs, paths from the list beside each module's routes.
"""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import stageline
from stageline.server.errors import JSON
from stageline.server.operations import BODY_ERRORS, Operation
from stageline.server.protocol import OUTPUT_TOKENS_MARKER, TOKEN_ID_MARKER, ErrorBody
from stageline.server.routing import endpoint
from stageline.server.state import ServerState

OPERATIONS = [
    Operation("GET", "/openapi.json", "This description", tag="server", answer=dict[str, Any]),
    Operation("GET", "/", "Where to go from here", tag="server", answer_type="text/plain", is_open=True),
    Operation("GET", "/docs", "This description as a page", tag="server", answer_type="text/html"),
]
_REF = "#/components/schemas/{name}"
_RETRY_AFTER = {"Retry-After": {"description": "Seconds until it may succeed", "schema": {"type": "integer"}}}
# Any request, whatever its path.
_ERRORS_OF_ALL = (431, 500, 503)
_STREAM_HELP = "Server-sent events, if `stream` is true. If the answer breaks off, the last event but one is an error."


def routes(state: ServerState, operations: Sequence[Operation]) -> list[Route]:
    """Args:
    operations: all that the server has, besides those of this module.
    """
    body = msgspec.json.encode(describe(state, [*operations, *OPERATIONS]))

    async def show(_state: ServerState, _http: Request) -> Response:
        return Response(body, media_type=JSON)

    return [Route("/openapi.json", endpoint(state, show), methods=["GET"])]


def describe(state: ServerState, operations: Sequence[Operation]) -> dict[str, Any]:
    """The whole document."""
    used = [(one.request, one.answer, one.other_answer, one.event) for one in operations]
    types = [kind for kinds in used for kind in kinds if _is_struct(kind)]
    kinds = list(dict.fromkeys([ErrorBody, *types]))
    references, components = msgspec.json.schema_components(kinds, ref_template=_REF)
    schema_of = dict(zip(kinds, references, strict=True))
    for component in components.values():
        _name_the_models(component, state.model_names)
    _bound(components, TOKEN_ID_MARKER, state.llm.spec.vocab_size - 1)
    _bound(components, OUTPUT_TOKENS_MARKER, state.llm.max_model_len - 1)
    needs_key = bool(state.config.api_key)
    paths: dict[str, dict[str, Any]] = {}
    for one in operations:
        paths.setdefault(one.path, {})[one.method.lower()] = _operation(one, schema_of, state, needs_key)
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "Stageline",
            "version": stageline.__version__,
            "description": "OpenAI's HTTP API on a pipeline of stages. Unknown fields of a request are ignored, and "
            "the server's log names each once; a field that is null counts as absent.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": state.config.root_path or "/"}],
        "paths": paths,
        "components": {"schemas": components},
    }
    if needs_key:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return document


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _name_the_models(component: dict[str, Any], names: Sequence[str]) -> None:
    """A request can name these models only; an answer shows the name that was asked for."""
    model = component.get("properties", {}).get("model")
    if model is None:
        return
    if "anyOf" in model:
        model["anyOf"] = [{"enum": list(names)} if one == {"type": "string"} else one for one in model["anyOf"]]
    else:
        model["enum"] = list(names)


def _bound(schema: Any, marker: str, highest: int) -> None:
    if isinstance(schema, list):
        for one in schema:
            _bound(one, marker, highest)
    elif isinstance(schema, dict):
        if schema.pop(marker, False):
            schema["maximum"] = highest
        for one in schema.values():
            _bound(one, marker, highest)


def _operation(
    one: Operation, schema_of: dict[Any, dict[str, Any]], state: ServerState, needs_key: bool
) -> dict[str, Any]:
    described: dict[str, Any] = {
        "operationId": _operation_id(one),
        "summary": one.summary,
        "tags": [one.tag],
        "responses": {"200": _success(one, schema_of)},
    }
    errors = set(_ERRORS_OF_ALL) | set(one.errors) | (set(BODY_ERRORS) if one.request is not None else set())
    if needs_key and not one.is_open:
        errors.add(401)
        described["security"] = [{"key": []}]
    for status in sorted(errors):
        described["responses"][str(status)] = _error(status, schema_of[ErrorBody])
    if one.request is not None:
        content: dict[str, Any] = {"schema": {**schema_of[one.request], **one.request_rule}}
        if one.example:
            content["example"] = {"model": state.model_names[0], **one.example}
        described["requestBody"] = {"required": True, "content": {JSON: content}}
    parameters: list[dict[str, Any]] = [{"name": p.name, "in": "query", "schema": {**p.schema}} for p in one.query]
    if "{model}" in one.path:
        names = {"enum": list(state.model_names)}
        parameters.append({"name": "model", "in": "path", "required": True, "schema": names})
    if parameters:
        described["parameters"] = parameters
    return described


def _operation_id(one: Operation) -> str:
    words = one.path.replace("{", "by/").replace("}", "").replace(".", "/").split("/")
    return "_".join([one.method.lower(), *(word for word in words if word)])


def _success(one: Operation, schema_of: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    if one.answer_type != JSON:
        return {"description": "Done", "content": {one.answer_type: {"schema": {"type": "string"}}}}
    schema = schema_of.get(one.answer, {"type": "object"})
    if one.other_answer is not None:
        schema = {"anyOf": [schema, schema_of[one.other_answer]]}
    content: dict[str, Any] = {JSON: {"schema": schema}}
    if one.event is not None:
        content["text/event-stream"] = {"schema": _event_schema(schema_of[one.event], schema_of[ErrorBody])}
    return {"description": "Done", "content": content}


def _event_schema(news: dict[str, Any], error: dict[str, Any]) -> dict[str, Any]:
    """Of one event: OpenAPI has no word for a sequence of them before 3.2, and its readers take this one."""
    data = {
        "type": "string",
        "anyOf": [
            {"const": "[DONE]"},
            {"contentMediaType": JSON, "contentSchema": {"anyOf": [news, error]}},
        ],
    }
    return {"type": "object", "description": _STREAM_HELP, "required": ["data"], "properties": {"data": data}}


def _error(status: int, schema: dict[str, Any]) -> dict[str, Any]:
    described: dict[str, Any] = {"description": HTTPStatus(status).phrase, "content": {JSON: {"schema": schema}}}
    if status in (429, 503):
        described["headers"] = _RETRY_AFTER
    return described
