"""Finds JSON schemas whose values could never come to an end, such as an object that must hold another of its kind.

One idea: a schema is a grammar's rule, and what its values must hold are the rule's parts
(`stageline.grammar.productive`). A schema is refused only for what is certain: keywords that are not looked at here are
taken for satisfied.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from stageline.grammar.productive import Alternatives, ending

Schema = dict[str, Any]


def accepts_nothing_finite(root: Schema) -> bool:
    """Whether it is certain that no value that satisfies this schema is finite."""
    rules: dict[str, Alternatives] = {}
    pending = [root]
    while pending:
        schema = pending.pop()
        if _name(schema) in rules:
            continue
        if "$id" in schema and schema is not root:
            return False  # what "#" means differs from here on
        needed = list(_needed(schema, root))
        choices = [part for key in ("anyOf", "oneOf") if (part := _choice(schema, key)) is not None]
        groups = [Alternatives([[_name(one)] for one in choice]) for choice in choices]
        rules[_name(schema)] = Alternatives([[*map(_name, needed), *groups]])
        pending += needed
        pending += [one for choice in choices for one in choice]
    return _name(root) not in ending(rules)


def _name(schema: Schema) -> str:
    """All of them are parts of one schema, and live as long."""
    return str(id(schema))


def _choice(schema: Schema, key: str) -> list[Schema] | None:
    """The schemas of which one has to be satisfied, unless there are others that any value satisfies."""
    choice = schema.get(key)
    if "$ref" in schema or not isinstance(choice, list) or not choice:
        return None
    return choice if all(isinstance(one, dict) for one in choice) else None


def _needed(schema: Schema, root: Schema) -> Iterator[Schema]:
    """The schemas that a part of each value, or the value itself, has to satisfy."""
    if "$ref" in schema:
        # In older drafts, what stands beside it means nothing.
        found = _target(schema["$ref"], root)
        if found is not None:
            yield found
        return
    if isinstance(every := schema.get("allOf"), list):
        yield from (one for one in every if isinstance(one, dict))
    if schema.get("type") in ("object", ["object"]):
        yield from _needed_properties(schema)
    elif schema.get("type") in ("array", ["array"]):
        yield from _needed_items(schema)


def _needed_properties(schema: Schema) -> Iterator[Schema]:
    properties, required = schema.get("properties"), schema.get("required")
    if isinstance(properties, dict) and isinstance(required, list):
        for name in dict.fromkeys(entry for entry in required if isinstance(entry, str)):
            if isinstance(found := properties.get(name), dict):
                yield found


def _needed_items(schema: Schema) -> Iterator[Schema]:
    least, first, others = schema.get("minItems"), schema.get("prefixItems"), schema.get("items")
    if not isinstance(least, int):
        return
    first = first if isinstance(first, list) else []
    yield from (one for one in first[: max(0, least)] if isinstance(one, dict))
    if least > len(first) and isinstance(others, dict):
        yield others


def _target(reference: Any, root: Schema) -> Schema | None:
    """The part of the schema that a reference such as "#/$defs/node" means; None if it is none."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    place: Any = root
    for part in unquote(reference).removeprefix("#").split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(place, list) and key.isascii() and key.isdigit() and len(key) < 10 and int(key) < len(place):
            place = place[int(key)]
        elif isinstance(place, dict):
            place = place.get(key)
        else:
            return None
    anchor = reference[1:] and not reference.startswith("#/")
    return place if isinstance(place, dict) and not anchor else None
