"""What the commands do before a model runs: open it, read prompts, make sure that results can be written.

The engine is imported only when a model is opened, so `--help` and a mistyped flag answer at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stageline.config import environment
from stageline.config.engine_config import EngineConfig
from stageline.errors import ConfigError

if TYPE_CHECKING:
    from stageline.engine.llm import LLM

OpenLLM = Callable[[EngineConfig], "LLM"]
# argparse gives what `add_subparsers` returns no public name.
SubParsers = Any


def open_llm(config: EngineConfig) -> LLM:
    """Start the engine and its stages."""
    from stageline.engine.llm import LLM

    return LLM.from_config(config)


def add_command(commands: SubParsers, name: str, summary: str, usage: str, example: str) -> argparse.ArgumentParser:
    """A subcommand's parser, with its help ending in an example."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        usage=usage,
        epilog=example,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    return parser


def read_prompts(path: str) -> list[str]:
    """The non-empty lines of a UTF-8 file, or of standard input for "-". Raises: ConfigError."""
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--prompt-file {path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--prompt-file {path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    prompts = [line for line in text.splitlines() if line.strip()]
    if not prompts:
        raise ConfigError(f"--prompt-file {path} holds no prompt; give one prompt per line")
    return prompts


def written(flag: str, path: str, write: Callable[[], object]) -> bool:
    """Whether `write` could write the file of `flag`; if not, a line on stderr says why."""
    try:
        write()
    except OSError as error:
        print(f"stageline: error: {flag} {path} cannot be written: {error.strerror or error}", file=sys.stderr)
        return False
    return True


def newest_simulation() -> Path:
    """Where the timeline of the newest `stageline plan --simulate` is kept."""
    return environment.cache_directory() / "newest-simulation.json"


def check_can_write(flag: str, path: str | None) -> None:
    """Refuse a result file that could not be written, before the run that it is for. Raises: ConfigError."""
    if path is None:
        return
    target = Path(path)
    folder = target.parent
    if target.is_dir() or not folder.is_dir():
        raise ConfigError(f"{flag} {path} cannot be written: it must be a file in an existing directory")
    if not os.access(target if target.exists() else folder, os.W_OK):
        raise ConfigError(f"{flag} {path} cannot be written: permission denied")
