"""Command-line flags derived from `SamplingParams`: names, types and help are those of its fields and docstring."""

from __future__ import annotations

import argparse
import re
import typing
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec

from stageline.config.flags import FlagField, add_flag, help_text, scalar_kind
from stageline.sampling import SamplingParams, StructuredOutputs

# One seed for everything, the engine's --seed; structured outputs have a flag for each of their kinds.
_NOT_FLAGS = ("seed", "structured_outputs")


def add_sampling_flags(
    parser: argparse.ArgumentParser, defaults: Mapping[str, Any] | None = None, skip: Collection[str] = ()
) -> None:
    """Add one flag per field of `SamplingParams`.

    Args:
        defaults: the command's own defaults by field; other fields keep the model's.
        skip: fields that the command sets itself.
    """
    defaults = defaults or {}
    group = parser.add_argument_group(
        "sampling", "The model's generation config, if it has one, goes before the defaults named here."
    )
    annotations = typing.get_type_hints(SamplingParams)
    described = _field_help(SamplingParams.__doc__ or "")
    for field in msgspec.structs.fields(SamplingParams):
        if field.name in _NOT_FLAGS or field.name in skip:
            continue
        shown = FlagField(
            name=field.name,
            kind=scalar_kind(annotations[field.name]) or str,
            default=defaults.get(field.name, field.default),
            help=described.get(field.name, ""),
        )
        # A flag that was not given leaves no trace, so that it can be told from one that repeats the default.
        default = defaults.get(field.name, argparse.SUPPRESS)
        if field.name in _SPECIAL_FLAGS:
            _add_special_flag(group, shown, default)
        else:
            add_flag(group, shown, default=default)
    _add_structure_flags(parser)


def sampling_params_from_args(args: argparse.Namespace, base: SamplingParams) -> SamplingParams:
    """`base`, changed by the flags that were given; the engine validates the result."""
    names = set(SamplingParams.__struct_fields__) - {"seed"}
    return msgspec.structs.replace(base, **{name: value for name, value in vars(args).items() if name in names})


def check_sampling_flags(args: argparse.Namespace) -> None:
    """Refuse, before a model is loaded, what no model could do; token ids are checked later, against the vocabulary.

    Raises: RequestError.
    """
    params = sampling_params_from_args(args, SamplingParams())
    ids = dict.fromkeys(("logit_bias", "stop_token_ids", "allowed_token_ids"))
    # `ignore_eos` may still be undecided.
    msgspec.structs.replace(params, ignore_eos=False, **ids).validate(vocab_size=1)


def _add_structure_flags(parser: argparse.ArgumentParser) -> None:
    """What the answer must look like; at most one of them."""
    group = parser.add_argument_group("structured output").add_mutually_exclusive_group()
    for flag, metavar, kind, text in (
        ("--json-schema", "FILE|JSON", _json_schema, "the answer keeps to this JSON schema; {} is any JSON"),
        ("--regex", "PATTERN", _regex, "the whole answer matches this regular expression"),
        ("--grammar", "FILE", _grammar, "the answer keeps to the grammar in this file, in Lark's syntax or as GBNF"),
    ):
        group.add_argument(
            flag, dest="structured_outputs", metavar=metavar, type=kind, default=argparse.SUPPRESS, help=text
        )


def _json_schema(text: str) -> StructuredOutputs:
    return StructuredOutputs(json=text if text.lstrip().startswith("{") else _file_text(text))


def _regex(text: str) -> StructuredOutputs:
    return StructuredOutputs(regex=text)


def _grammar(path: str) -> StructuredOutputs:
    return StructuredOutputs(grammar=_file_text(path))


def _file_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise argparse.ArgumentTypeError(f"cannot read {path}: {reason}") from None


def _add_special_flag(group: argparse._ArgumentGroup, field: FlagField, default: Any) -> None:
    metavar, note, options = _SPECIAL_FLAGS[field.name]
    group.add_argument(
        "--" + field.name.replace("_", "-"),
        dest=field.name,
        metavar=metavar,
        default=default,
        help=f"{help_text(field)} {note}".rstrip(),
        **options,
    )


def _token_ids(text: str) -> list[int]:
    try:
        return [int(item) for item in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of token ids such as 1,2,3") from None


def _logit_bias(text: str) -> dict[int, float]:
    try:
        pairs = [item.split(":") for item in text.split(",")]
        return {int(token_id): float(bias) for token_id, bias in pairs}
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of ID:BIAS such as 42:-5,7:1.5") from None


def _count_or_none(text: str) -> int | None:
    if text.lower() == "none":
        return None
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number of tokens nor none") from None


# Flags that are more than one plain value.
_SPECIAL_FLAGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "max_tokens": ("N", "", {"type": _count_or_none}),
    "stop": ("TEXT", "(may be repeated)", {"action": "append"}),
    "bad_words": ("TEXT", "(may be repeated)", {"action": "append"}),
    "stop_token_ids": ("ID,ID,...", "", {"type": _token_ids}),
    "allowed_token_ids": ("ID,ID,...", "", {"type": _token_ids}),
    "logit_bias": ("ID:BIAS,...", "", {"type": _logit_bias}),
}


def _field_help(docstring: str) -> dict[str, str]:
    """The texts of a docstring's Args section by name; a line indented deeper goes on with the one before."""
    _, _, section = docstring.partition("Args:\n")
    section = section.partition("\n\n")[0]
    entries = re.findall(r"^ {8}(\w+): (.*(?:\n {12}.*)*)", section, flags=re.MULTILINE)
    return {name: " ".join(text.split()).rstrip(".") for name, text in entries}
