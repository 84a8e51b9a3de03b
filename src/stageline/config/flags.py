"""Command-line flags, derived from a configuration: name, type, default and help are written once, in its fields."""

from __future__ import annotations

import argparse
import dataclasses
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from stageline.config.cluster_config import ClusterConfig
from stageline.config.engine_config import EngineConfig
from stageline.config.plan_config import PlanConfig
from stageline.config.serve_config import ServeConfig


@dataclass(frozen=True)
class FlagField:
    """What a flag needs to know of the setting behind it.

    Args:
        kind: bool, int, float or str; tuple for several strings.
        help: without the default, unless the text has it already.
        group: the heading in `--help`.
    """

    name: str
    kind: type
    default: Any
    help: str
    flags: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    metavar: str = ""
    group: str = ""


def add_engine_flags(parser: argparse.ArgumentParser, is_model_optional: bool = False) -> None:
    """Add MODEL and one flag per setting of `EngineConfig`, under the headings of their groups."""
    parser.add_argument(
        "model", nargs="?" if is_model_optional else None, metavar="MODEL",
        help="a Hugging Face directory, a GGUF file, or a name on the Hugging Face hub"
    )
    _add_flags(parser, EngineConfig)


def add_serve_flags(parser: argparse.ArgumentParser) -> None:
    """Add one flag per setting of `ServeConfig`, under the headings of their groups."""
    _add_flags(parser, ServeConfig)


def add_cluster_flags(parser: argparse.ArgumentParser, names: Sequence[str] | None = None) -> None:
    """Add one flag per setting of `ClusterConfig`, or for some of them."""
    _add_flags(parser, ClusterConfig, names)


def add_plan_flags(parser: argparse.ArgumentParser) -> None:
    """Add one flag per setting of `PlanConfig`, under the headings of their groups."""
    _add_flags(parser, PlanConfig)


def plan_config_from_args(args: argparse.Namespace) -> PlanConfig:
    """The configuration that the flags of `add_plan_flags` ask for. Raises: ConfigError."""
    return PlanConfig(**{field.name: getattr(args, field.name) for field in dataclasses.fields(PlanConfig)}).check()


def cluster_config_from_args(args: argparse.Namespace) -> ClusterConfig:
    """The configuration that the flags of `add_cluster_flags` ask for. Raises: ConfigError."""
    given = vars(args)
    values = {field.name: given[field.name] for field in dataclasses.fields(ClusterConfig) if field.name in given}
    return ClusterConfig(**values).check()


def engine_config_from_args(args: argparse.Namespace) -> EngineConfig:
    """The configuration that the flags of `add_engine_flags` ask for. Raises: ConfigError."""
    values = {field.name: getattr(args, field.name) for field in dataclasses.fields(EngineConfig)}
    return EngineConfig(**values).check()


def serve_config_from_args(args: argparse.Namespace) -> ServeConfig:
    """The configuration that the flags of `add_serve_flags` ask for. Raises: ConfigError."""
    values = {field.name: getattr(args, field.name) for field in dataclasses.fields(ServeConfig)}
    return ServeConfig(**values).check()


def add_flag(group: argparse._ArgumentGroup, field: FlagField, default: Any = ...) -> None:
    """Add `--field-name`; a bool also gets `--no-field-name`, and one for several strings may be repeated.

    Args:
        default: the parsed value of a flag that is not given, if it is not the default that the help shows.
    """
    spellings = (*field.flags, "--" + field.name.replace("_", "-"))
    options: dict[str, Any] = {"dest": field.name, "default": field.default if default is ... else default}
    if field.kind is bool:
        options["action"] = argparse.BooleanOptionalAction
    elif field.kind is tuple:
        options |= {"action": _Collect, "metavar": field.metavar or _METAVARS[str]}
    elif field.choices:
        options |= {"type": field.kind, "choices": field.choices}
    else:
        options |= {"type": field.kind, "metavar": field.metavar or _METAVARS[field.kind]}
    action = group.add_argument(*spellings, **options)
    # Set afterwards: BooleanOptionalAction would add its own words about the default.
    action.help = help_text(field)


def help_text(field: FlagField) -> str:
    """The field's help with its default, escaped for argparse."""
    text = field.help
    if field.default not in (None, (), "") and "(default" not in text:
        shown = ("on" if field.default else "off") if field.kind is bool else field.default
        text += f" (default: {shown})"
    return text.replace("%", "%%")


def scalar_kind(annotation: Any) -> type | None:
    """bool, int, float or str behind an annotation such as `int | None`; None if it is anything else."""
    if isinstance(annotation, types.UnionType):
        kinds = [kind for kind in typing.get_args(annotation) if kind is not types.NoneType]
        # What may be a number in Python is text on a command line.
        annotation = kinds[0] if len(kinds) == 1 or kinds[0] is str else None
    return annotation if annotation in _METAVARS or annotation is bool else None


_METAVARS: dict[type, str] = {int: "N", float: "X", str: "TEXT"}


class _Collect(argparse.Action):
    """Gathers the values of a flag that is repeated, or given a list with commas, as a tuple."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        found = tuple(value.strip() for value in str(values).split(","))
        setattr(namespace, self.dest, (*getattr(namespace, self.dest), *found))


def _add_flags(parser: argparse.ArgumentParser, config: type, names: Sequence[str] | None = None) -> None:
    groups: dict[str, argparse._ArgumentGroup] = {}
    for field in _fields_of(config):
        if names is not None and field.name not in names:
            continue
        if field.group not in groups:
            groups[field.group] = parser.add_argument_group(field.group)
        add_flag(groups[field.group], field)


def _fields_of(config: type) -> Iterator[FlagField]:
    annotations = typing.get_type_hints(config)
    for field in dataclasses.fields(config):
        if not field.metadata:
            continue
        annotation = annotations[field.name]
        kind = tuple if annotation == tuple[str, ...] else scalar_kind(annotation)
        assert kind is not None, f"{config.__name__}.{field.name}: no flag can be made from {annotation}"
        yield FlagField(name=field.name, kind=kind, default=field.default, **field.metadata)
