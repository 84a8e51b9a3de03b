"""What this server is: its model, its version, and whether it can answer."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import stageline
from stageline.server.errors import JSON, ApiError, api_error_of
from stageline.server.operations import Operation
from stageline.server.protocol import Health, ModelCard, ModelList, Version
from stageline.server.routing import endpoint
from stageline.server.state import ServerState

OPERATIONS = [
    Operation("GET", "/v1/models", "The names that the model answers to", answer=ModelList, tag="models"),
    Operation("GET", "/v1/models/{model}", "One of them", answer=ModelCard, tag="models", errors=(404,)),
    Operation("GET", "/health", "Whether the pipeline answers", answer=Health, tag="server", is_open=True),
    Operation("GET", "/ping", "The same as /health", answer=Health, tag="server", is_open=True),
    Operation("POST", "/ping", "The same as /health", answer=Health, tag="server", is_open=True),
    Operation("GET", "/version", "This server's version", answer=Version, tag="server"),
]


def routes(state: ServerState) -> list[Route]:
    return [
        Route("/v1/models", endpoint(state, list_models), methods=["GET"]),
        # A name may hold slashes, as those of the hub do.
        Route("/v1/models/{model:path}", endpoint(state, show_model), methods=["GET"]),
        Route("/health", endpoint(state, show_health), methods=["GET"]),
        Route("/ping", endpoint(state, show_health), methods=["GET", "POST"]),
        Route("/version", endpoint(state, show_version), methods=["GET"]),
    ]


async def list_models(state: ServerState, _http: Request) -> Response:
    return _json(ModelList(data=[_card(state, name) for name in state.model_names]))


async def show_model(state: ServerState, http: Request) -> Response:
    return _json(_card(state, state.check_model(str(http.path_params["model"]))))


async def show_health(state: ServerState, _http: Request) -> Response:
    """Of the pipeline, not of this process. Raises: ApiError 503 with the reason."""
    try:
        state.llm.check_health()
    except Exception as error:
        told = api_error_of(error)
        raise ApiError(503, str(told), code=told.code, headers=told.headers) from error
    return _json(Health())


async def show_version(_state: ServerState, _http: Request) -> Response:
    return _json(Version(stageline.__version__))


def _card(state: ServerState, name: str) -> ModelCard:
    llm = state.llm
    return ModelCard(id=name, created=state.started_s, max_model_len=llm.max_model_len)


def _json(answer: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(answer), media_type=JSON)
