"""`stageline cache`: the copies of other machines' models that this one keeps, and how to be rid of them."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Sequence
from decimal import Decimal

from stageline.cli.opening import SubParsers, add_command
from stageline.config import environment
from stageline.engine.startup_table import format_bytes
from stageline.errors import ConfigError
from stageline.transfer.kept_models import KeptModel, kept_models, remove, to_remove

_USAGE = "stageline cache [--clear | --keep-bytes SIZE]"
_EXAMPLE = """example:
  stageline cache                       # what is kept, the model used last first
  stageline cache --keep-bytes 50GiB    # remove what was not used for longest, until no more than that is kept
  stageline cache --clear

What a stage has open is never removed; what is removed is fetched again when a stage needs it.
"""
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {f"{letter}i": 2 ** (10 * power) for power, letter in enumerate("kmgt", start=1)}


def add_parser(commands: SubParsers) -> None:
    parser = add_command(commands, "cache", "show or remove weights kept from other machines", _USAGE, _EXAMPLE)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--clear", action="store_true", help="remove all that is not in use")
    what.add_argument(
        "--keep-bytes", metavar="SIZE", help="remove only as much as needed to keep no more than that, such as 50GiB"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    folder = environment.cache_directory() / "models"
    keep_bytes = 0 if args.clear else None if args.keep_bytes is None else parse_size(args.keep_bytes)
    try:
        kept = kept_models(folder)
        if keep_bytes is not None:
            kept = _without(kept, to_remove(kept, keep_bytes))
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror or error}") from None
    total = sum(one.num_bytes for one in kept)
    print(f"{folder}: {format_bytes(total)} of {len(kept)} model{'' if len(kept) == 1 else 's'}")
    for one in kept:
        print(_line(one))
    is_too_much = keep_bytes is not None and total > keep_bytes
    if any(one.is_in_use is None for one in kept):
        note = "the disk knows no locks, so it cannot be told what is in use"
        way_out = "; stop the stages of this machine, and remove what is left by hand" if is_too_much else ""
        print(f"{note}{way_out}", file=sys.stderr)
    elif is_too_much:
        print("more is in use: stop the stages that use it, and type this again", file=sys.stderr)
    return 0


def _without(kept: Sequence[KeptModel], chosen: Sequence[KeptModel]) -> list[KeptModel]:
    removed = [one for one in chosen if remove(one)]
    for one in removed:
        print(f"removed {one.model or one.folder.name}, {format_bytes(one.num_bytes)}", file=sys.stderr)
    return [one for one in kept if one not in removed]


def _line(one: KeptModel) -> str:
    used = "in use" if one.is_in_use else f"used {time.strftime('%Y-%m-%d %H:%M', time.localtime(one.used_s))}"
    return f"  {format_bytes(one.num_bytes):>10}  {used:<21}  {one.model or 'interrupted'}  ({one.folder.name})"


def parse_size(text: str) -> int:
    """Bytes of `50GiB`, `2g` or `1000000`. Raises: ConfigError."""
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*([kmgt]i?|)b?", text.lower(), flags=re.ASCII)
    if match is None:
        raise ConfigError(f"--keep-bytes is {text!r}, which is no size; give one such as 50GiB, or 0")
    # Exact, and without an end: as a float, many digits would be infinite.
    return int(Decimal(match[1]) * _UNITS[match[2]])
