"""How much text a template's filters and string methods are going to make, asked of the meter before they make it."""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Mapping
from typing import Any

from stageline.checkpoint.template_meter import LimitReached, RenderMeter, check_width

_MAX_DIGITS = 4300  # Python's own limit for decimal texts; others, such as hexadecimal, have none
_MAX_SEPARATOR_CHARS = 16
_JSON_ESCAPE_CHARS = 6  # "\u00e9"
_NUMBER = re.compile(r"\d+")


def check_printf(meter: RenderMeter, layout: str, arguments: Any) -> None:
    """`layout % arguments`. Raises: LimitReached."""
    values = list(arguments.values()) if isinstance(arguments, Mapping) else arguments
    values = list(values) if isinstance(values, list | tuple) else [values]
    widths = [int(digits[:9]) for digits in _NUMBER.findall(layout)]
    for width in widths:
        check_width(width)
    if "*" in layout:
        for value in values:
            check_width(value)
    largest = max((meter.text_size(value) for value in values), default=0)
    meter.require(len(layout) + sum(widths) + layout.count("%") * largest)


def check_format(meter: RenderMeter, layout: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """`layout.format(*args, **kwargs)`. Raises: LimitReached."""
    largest = max((meter.text_size(value) for value in (*args, *kwargs.values())), default=0)
    size = len(layout)
    for _, field, spec, _ in string.Formatter().parse(layout):
        if spec and "{" in spec:
            raise LimitReached("it used a format whose width is another field")
        widths = [int(digits[:9]) for digits in _NUMBER.findall(spec or "")]
        for width in widths:
            check_width(width)
        size += sum(widths) + (largest if field is not None else 0)
    meter.require(size)


def _text_of(meter: RenderMeter, value: Any) -> str:
    """As text, once there is known to be room for it; markup stays what it is."""
    if isinstance(value, str):
        return value
    meter.require(meter.text_size(value))
    return str(value)


def _check_widths(meter: RenderMeter, value: Any, *args: Any, **kwargs: Any) -> Any:
    for argument in (*args, *kwargs.values()):
        check_width(argument)
    return _check_text(meter, value)


def _check_text(meter: RenderMeter, value: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(value, str):
        meter.require(meter.text_size(value))
    return value


def _check_replace(
    meter: RenderMeter, value: Any, old: str = "", new: str = "", count: Any = None, **kwargs: Any
) -> str:
    text = _text_of(meter, value)
    num_found = text.count(str(old)) if isinstance(old, str) else 0
    meter.require(len(text) + num_found * len(_text_of(meter, new)))
    return text


def _check_join(meter: RenderMeter, value: Any, d: Any = "", attribute: Any = None) -> Any:
    parts = list(meter.stepping(value))
    meter.require(sum(meter.text_size(part) for part in parts) + len(parts) * len(_text_of(meter, d)))
    return parts


def _check_indent(meter: RenderMeter, value: Any, width: Any = 4, *args: Any, **kwargs: Any) -> str:
    check_width(width)
    text = _text_of(meter, value)
    meter.require(len(text) + (text.count("\n") + 1) * (width if isinstance(width, int) else len(str(width))))
    return text


def _check_json(meter: RenderMeter, value: Any, *args: Any, **kwargs: Any) -> Any:
    indent, separators = kwargs.get("indent"), kwargs.get("separators")
    for option in (*args, indent, *(separators or ())):
        if isinstance(option, str) and len(option) > _MAX_SEPARATOR_CHARS:
            raise LimitReached(f"it used a separator of more than {_MAX_SEPARATOR_CHARS} characters")
    check_width(indent)
    for option in args:
        check_width(option)
    widths = [option for option in (*args, indent) if isinstance(option, int) and not isinstance(option, bool)]
    widest = max([*widths, _MAX_SEPARATOR_CHARS if indent else 0])
    meter.require(_JSON_ESCAPE_CHARS * meter.text_size(value, indent=widest))
    return value


def _check_int(meter: RenderMeter, value: Any, *args: Any, **kwargs: Any) -> Any:
    if isinstance(value, str) and len(value) > _MAX_DIGITS:
        raise LimitReached(f"it read a number of more than {_MAX_DIGITS} digits")
    return value


def _check_sum(meter: RenderMeter, value: Any, *args: Any, **kwargs: Any) -> Any:
    return meter.stepping(value)


def _check_printf_filter(meter: RenderMeter, value: Any, *args: Any, **kwargs: Any) -> str:
    text = _text_of(meter, value)
    check_printf(meter, text, kwargs or args)
    return text


_TEXT_FILTERS = (
    *("capitalize", "e", "escape", "forceescape", "lower", "safe", "string", "title", "trim", "truncate"),
    *("upper", "urlencode", "wordcount"),
)

# Filter -> what to ask before it is called; it gives the value to call it with.
FILTER_CHECKS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(_TEXT_FILTERS, _check_text),
    **dict.fromkeys(("batch", "center", "round", "slice"), _check_widths),
    "format": _check_printf_filter,
    "indent": _check_indent,
    "int": _check_int,
    "join": _check_join,
    "replace": _check_replace,
    "sum": _check_sum,
    "tojson": _check_json,
}


def _check_replace_method(meter: RenderMeter, receiver: str, *args: Any) -> tuple[Any, ...]:
    _check_replace(meter, receiver, *args)
    return args


def _check_join_method(meter: RenderMeter, receiver: str, *args: Any) -> tuple[Any, ...]:
    return tuple(_check_join(meter, parts, receiver) for parts in args)


def _check_width_method(meter: RenderMeter, receiver: str, *args: Any) -> tuple[Any, ...]:
    for argument in args:
        check_width(argument)
    return args


# Method of str -> what to ask before it is called; it gives the arguments to call it with.
METHOD_CHECKS: dict[str, Callable[..., tuple[Any, ...]]] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _check_width_method),
    "join": _check_join_method,
    "replace": _check_replace_method,
}
