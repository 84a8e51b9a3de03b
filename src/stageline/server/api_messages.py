"""What the supervisor and a process that answers HTTP say to each other. Plain data, over the pipes of a child."""

from __future__ import annotations

import msgspec

from stageline.config.engine_config import EngineConfig
from stageline.config.serve_config import ServeConfig
from stageline.engine.messages import EngineLink, ErrorReport


class ApiProcessConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything an API process needs to start.

    Args:
        engine: with the path of the checkpoint that the supervisor has opened as `model`.
        links: one per replica.
        listening_fd: the listening socket, which it inherits.
    """

    serve: ServeConfig
    engine: EngineConfig
    links: list[EngineLink]
    log_level: str
    listening_fd: int


class DrainApi(msgspec.Struct, frozen=True, array_like=True, tag="drain"):
    """Take no new connections, finish what is being answered, leave.

    Args:
        patience_s: what takes longer is cut off.
    """

    patience_s: float


class ReplaceEngine(msgspec.Struct, frozen=True, array_like=True, tag="replace"):
    """A replica's engine was lost, and another one is being started in its place."""

    replica: int
    link: EngineLink


class ApiReady(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The engine answers, and so does it."""


class ApiFailed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """Its last words."""

    error: ErrorReport


class ApiLeft(msgspec.Struct, frozen=True, array_like=True, tag="left"):
    """It has drained.

    Args:
        num_cut_off: connections that were closed before their answer was complete.
    """

    num_cut_off: int


ToApi = DrainApi | ReplaceEngine
FromApi = ApiReady | ApiFailed | ApiLeft
