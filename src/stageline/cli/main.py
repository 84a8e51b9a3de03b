"""The `stageline` command: picks the subcommand and turns what went wrong into one line and an exit status.

Exit status: 0 done; 1 the run failed; 2 the command line, the configuration or a prompt is at fault; 130 interrupted;
141 nobody reads the output any more.
"""

from __future__ import annotations

import argparse
import errno
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from stageline import __version__
from stageline.cli.foreign_flags import without_foreign
from stageline.cli.unknown_flags import describe_unknown
from stageline.errors import ConfigError, RequestError, StagelineError
from stageline.log import open_standard_streams, set_up_logging

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors are ConfigErrors, so that every error of the command looks alike."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """What is unknown is refused by the subcommand it was given to, which can tell whose help to read."""
        known_flags = [flag for action in self._actions for flag in action.option_strings]
        args = self._without_foreign(sys.argv[1:] if args is None else args, known_flags)
        self._refuse_shortened(args, known_flags)
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(describe_unknown(unknown, known_flags))
        return namespace, unknown

    def _without_foreign(self, words: Sequence[str], known_flags: Sequence[str]) -> list[str]:
        """Sorted out before the rest is read: a foreign flag's value would be taken for MODEL."""
        kept, notes, refusals = without_foreign(words, known_flags)
        if refusals:
            self.error("; ".join(refusals))
        for note in notes:
            print(f"stageline: note: {note}", file=sys.stderr)
        return kept

    def _refuse_shortened(self, words: Sequence[str], known_flags: Sequence[str]) -> None:
        """argparse takes -t for -tp even without abbreviations: another program's number of threads would be ranks."""
        for word in words:
            flag = word.partition("=")[0]
            is_short = re.fullmatch(r"-[A-Za-z]\w*", flag) is not None and flag not in known_flags
            if is_short and any(known.startswith(flag) for known in known_flags):
                self.error(describe_unknown([word], known_flags))

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")


def build_parser() -> argparse.ArgumentParser:
    # Imported here, where an early Ctrl-C is already handled.
    from stageline.cli import bench, cache, chat, doctor, generate, join, key, plan, probe, serve, timeline, tune

    parser = CommandParser(
        prog="stageline",
        description="Run large language models through a pipeline of stages.",
        epilog="stageline COMMAND --help tells what each command can do.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"stageline {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (generate, chat, serve, join, bench, tune, plan, timeline, key, cache, probe, doctor):
        command.add_parser(commands)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command line `argv`, by default the process's own. Returns: the exit status; `--help` exits by itself."""
    open_standard_streams()
    try:
        return _run(argv)
    except StagelineError as error:
        print(f"stageline: error: {error}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, ConfigError | RequestError) else EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        _discard_output()
        return EXIT_BROKEN_PIPE
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        _discard_output()
        print("stageline: error: the output cannot be written: no space left", file=sys.stderr)
        return EXIT_FAILED


def _run(argv: list[str] | None) -> int:
    try:
        args = build_parser().parse_args(argv)
        set_up_logging()
        run: Callable[[argparse.Namespace], int] = args.run
        return run(args)
    finally:
        # Flushed here, where a broken pipe is still handled, `--help` included.
        sys.stdout.flush()


def _discard_output() -> None:
    """The interpreter flushes once more when it exits, and would complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
