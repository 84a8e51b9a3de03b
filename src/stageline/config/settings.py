"""How a setting is written down once: the field of a frozen dataclass, with what its flag and its checks need."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any

from stageline.errors import ConfigError


def setting(
    default: Any,
    help: str,
    *,
    flags: tuple[str, ...] = (),
    choices: tuple[str, ...] = (),
    group: str,
    metavar: str = "",
    is_secret: bool = False,
) -> Any:
    """A config field that is also a flag.

    Args:
        flags: spellings other than `--field-name`, which every setting has.
        group: heading under which `--help` lists it.
        is_secret: not shown where the configuration is.
    """
    metadata = {"help": help, "flags": flags, "choices": choices, "group": group, "metavar": metavar}
    return dataclasses.field(default=default, metadata=metadata, repr=not is_secret)


def flag_of(name: str) -> str:
    """The flag of a setting, for messages."""
    return "--" + name.replace("_", "-")


def at_least(name: str, value: int, lowest: int) -> None:
    """Raises: ConfigError."""
    if not isinstance(value, int) or isinstance(value, bool) or value < lowest:
        raise ConfigError(f"{flag_of(name)} is {value!r}; it must be an integer of at least {lowest}")


def one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raises: ConfigError."""
    if value not in choices:
        raise ConfigError(f"{flag_of(name)} is {value!r}; choose from {', '.join(choices)}")


def check_types(config: Any) -> None:
    """Python code is not checked by a parser of flags. Raises: ConfigError naming the first field of a wrong type."""
    choices = {field.name: field.metadata.get("choices", ()) for field in dataclasses.fields(config)}
    for name, annotation in typing.get_type_hints(type(config)).items():
        value = getattr(config, name)
        if typing.get_origin(annotation) is tuple:
            _check_tuple_of_str(name, value)
            continue
        kinds = typing.get_args(annotation) or (annotation,)
        accepted = (*kinds, int) if float in kinds else kinds
        if isinstance(value, accepted) and (bool in kinds or not isinstance(value, bool)):
            continue
        way_out = _way_out(value, choices[name]) if str in kinds else ""
        names = " or ".join(kind.__name__ for kind in kinds if kind is not types.NoneType)
        raise ConfigError(f"{flag_of(name)} is {value!r}; it must be of type {names}{way_out}")


def _way_out(value: Any, choices: tuple[str, ...]) -> str:
    """What text to give instead of `value`, if that can be known."""
    if choices:
        return f"; choose from {', '.join(choices)}"
    if isinstance(value, int | float):
        return f"; give {str(value)!r}"
    if isinstance(value, list | tuple) and value and all(isinstance(item, int) for item in value):
        return f"; give {','.join(map(str, value))!r}"
    return ""


def _check_tuple_of_str(name: str, value: Any) -> None:
    if not isinstance(value, tuple) or not all(isinstance(item, str) for item in value):
        raise ConfigError(f"{flag_of(name)} is {value!r}; it must be a tuple of str")
