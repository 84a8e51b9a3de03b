"""Tools that a request declares: checked, and turned into the form of an answer that must call one of them.

One idea: an answer that must be a call is made to be JSON by the sampler, whatever the model's own style. A named
function's answer is its arguments; where any of several may be called, it is an array of names and arguments. Without
line breaks and spaces between them, of which small models, once free to choose, write any number.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Protocol

from stageline.errors import RequestError
from stageline.sampling import StructuredOutputs
from stageline.server.protocol_chat import NamedToolChoice, Tool, ToolChoice

MAX_TOOLS = 128
MAX_CALLS = 16
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_TYPES = {"array", "boolean", "integer", "null", "number", "object", "string"}
# With one of these beside "properties", closing the object could forbid what they allow.
_OPEN_KEYWORDS = {
    *("additionalProperties", "unevaluatedProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref"),
}


class ToolRequest(Protocol):
    """What of a request matters here."""

    @property
    def tools(self) -> list[Tool] | None: ...
    @property
    def tool_choice(self) -> ToolChoice | None: ...


def check_tools(request: ToolRequest) -> None:
    """Raises: RequestError, naming the tool's field, for what no model can be told or made to call."""
    tools, choice = request.tools, request.tool_choice
    if tools is not None and len(tools) > MAX_TOOLS:
        raise RequestError(f"tools holds {len(tools)} tools; give at most {MAX_TOOLS}", "tools")
    places: dict[str, int] = {}
    for index, tool in enumerate(tools or ()):
        field = f"tools[{index}].function"
        name = tool.function.name
        if not _NAME.fullmatch(name):
            raise RequestError(
                f"{field}.name is {name[:100]!r}; use 1 to 64 letters, digits, underscores, dots and dashes",
                f"{field}.name",
            )
        if name in places:
            raise RequestError(f"{field}.name is {name!r}, as that of tools[{places[name]}]", f"{field}.name")
        places[name] = index
        _check_parameters(tool.function.parameters, f"{field}.parameters")
    if not tools and choice not in (None, "none", "auto"):
        raise RequestError("tool_choice asks for a call, but tools is empty; give tools or leave it out", "tool_choice")
    if isinstance(choice, NamedToolChoice) and choice.function.name not in places:
        named = choice.function.name[:100]
        raise RequestError(
            f"tool_choice.function.name is {named!r}; tools has {', '.join(places)}", "tool_choice.function.name"
        )


def _check_parameters(parameters: dict[str, Any] | None, field: str) -> None:
    if not parameters:
        return
    kind = parameters.get("type", "object")
    if kind != "object":
        raise RequestError(f"{field}.type is {str(kind)[:100]!r}; arguments are an object", f"{field}.type")
    properties = parameters.get("properties", {})
    if not isinstance(properties, dict):
        raise RequestError(f"{field}.properties must be an object with a schema per name", f"{field}.properties")
    for name, schema in properties.items():
        where = f"{field}.properties.{name[:100]}"
        if not isinstance(schema, dict | bool):
            raise RequestError(f"{where} must be a JSON schema", where)
        declared = schema.get("type") if isinstance(schema, dict) else None
        kinds = declared if isinstance(declared, list) else [declared]
        if declared is not None and not all(isinstance(one, str) and one in _TYPES for one in kinds):
            raise RequestError(f"{where}.type is {str(declared)[:100]!r}, which is no type of JSON", f"{where}.type")
    required = parameters.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise RequestError(f"{field}.required must be a list of names", f"{field}.required")


def structured_outputs_of_tool_choice(
    tools: Sequence[Tool] | None, choice: ToolChoice | None, is_parallel: bool = True
) -> StructuredOutputs | None:
    """The form of an answer that must call a tool; None if it need not. The tools have passed `check_tools`.

    Args:
        is_parallel: several calls may be made.
    """
    if not tools or choice in (None, "none", "auto"):
        return None
    if isinstance(choice, NamedToolChoice):
        [chosen] = [tool for tool in tools if tool.function.name == choice.function.name]
        return StructuredOutputs(json=arguments_schema(chosen), disable_any_whitespace=True)
    parts = {f"arguments_{index}": arguments_schema(tool) for index, tool in enumerate(tools)}
    calls = [_call_schema(tool.function.name, part) for tool, part in zip(tools, parts, strict=True)]
    schema = {
        "type": "array",
        "minItems": 1,
        "maxItems": MAX_CALLS if is_parallel else 1,
        "items": calls[0] if len(calls) == 1 else {"anyOf": calls},
        "$defs": {part: _moved(arguments, f"#/$defs/{part}") for part, arguments in parts.items()},
    }
    return StructuredOutputs(json=schema, disable_any_whitespace=True)


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """Schema of a tool's arguments. Where it names properties and does not say whether there may be others, there are
    none: a model free to invent some often does.
    """
    parameters = tool.function.parameters
    if not parameters:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    schema = {"type": "object", **parameters}
    if "properties" in schema and not any(keyword in schema for keyword in _OPEN_KEYWORDS):
        schema["additionalProperties"] = False
    return schema


def _call_schema(name: str, part: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/{part}"}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(schema: Any, root: str) -> Any:
    """The schema with its references to itself changed for a place inside another."""
    if isinstance(schema, dict):
        moved = {key: _moved(value, root) for key, value in schema.items()}
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            moved["$ref"] = root + reference[1:]
        return moved
    return [_moved(entry, root) for entry in schema] if isinstance(schema, list) else schema


def function_names(tools: Sequence[Tool] | None) -> list[str]:
    return [tool.function.name for tool in tools or ()]
