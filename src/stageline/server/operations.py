"""What /openapi.json says of a route. Each module that has routes lists its own beside them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

# What may happen to any request with a body.
BODY_ERRORS = (400, 404, 413, 415, 429, 500, 503, 504)


@dataclass(frozen=True)
class QueryParameter:
    """A parameter after the question mark; it may be left out. `schema` is its JSON schema."""

    name: str
    schema: Mapping[str, Any]


@dataclass(frozen=True)
class Operation:
    """One method of one path.

    Args:
        answer: the body of a success, as JSON; None for text of the type `answer_type`.
        other_answer: what it may be instead, if the request can ask for that.
        query: its parameters after the question mark.
        request_rule: what a request must keep beside its struct's types, as JSON schema.
        event: what an event of a stream holds, if the request can ask for one.
        errors: statuses besides those that every request may get.
        is_open: asked without a key.
        example: a request's body; the model's name is added.
    """

    method: str
    path: str
    summary: str
    tag: str
    request: type[msgspec.Struct] | None = None
    request_rule: Mapping[str, Any] = field(default_factory=dict)
    answer: Any = None
    answer_type: str = "application/json"
    event: Any = None
    errors: tuple[int, ...] = ()
    is_open: bool = False
    other_answer: Any = None
    query: tuple[QueryParameter, ...] = ()
    example: Mapping[str, Any] = field(default_factory=dict)
