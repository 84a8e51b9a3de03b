"""`stageline chat`: a conversation in the terminal, token by token.

Ctrl-C stops the answer that is being written, which stays in the conversation as far as it came; another one leaves.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING

from stageline.cli.opening import OpenLLM, SubParsers, add_command, open_llm
from stageline.cli.sampling_flags import add_sampling_flags, check_sampling_flags, sampling_params_from_args
from stageline.config.flags import add_engine_flags, engine_config_from_args
from stageline.errors import RequestError
from stageline.sampling import SamplingParams

if TYPE_CHECKING:
    from stageline.engine.llm import LLM

_USAGE = "stageline chat MODEL [--system TEXT] [-pp STAGES] [options]"
_EXAMPLE = """in the conversation:
  /reset   forget the conversation
  /exit    leave; Ctrl-D does too
  Ctrl-C   stop the answer; leave when there is none

example:
  stageline chat ./SmolLM2-135M-Instruct -pp 2 --system "You answer in one sentence."
"""
_COMMANDS = "/reset forgets the conversation, /exit leaves"


def add_parser(commands: SubParsers) -> None:
    parser = add_command(commands, "chat", "talk to a model in the terminal", _USAGE, _EXAMPLE)
    parser.add_argument("--system", metavar="TEXT", help="the system message that opens the conversation")
    add_engine_flags(parser)
    add_sampling_flags(parser, defaults={"max_tokens": None}, skip=("n", "logprobs", "prompt_logprobs"))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, open_llm: OpenLLM = open_llm) -> int:
    config = engine_config_from_args(args)
    check_sampling_flags(args)
    with open_llm(config) as llm:
        params = sampling_params_from_args(args, llm.default_sampling_params())
        conversation = Conversation(llm, params, args.system)
        is_terminal = sys.stdin.isatty()
        if is_terminal:
            _enable_line_editing()
            print(f"{_COMMANDS}, Ctrl-C stops an answer.")
        _converse(conversation, "> " if is_terminal else "")
    return 0


class Conversation:
    """The messages so far, and the next answer to them."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None = None) -> None:
        self._llm = llm
        self._params = params
        self._opening = [{"role": "system", "content": system}] if system else []
        self.messages: list[dict[str, str]] = list(self._opening)

    def reset(self) -> None:
        self.messages = list(self._opening)

    def answer(self, text: str, is_stopped: Callable[[], bool]) -> Iterator[str]:
        """Say `text`; yields the answer piece by piece until it ends or `is_stopped()`.

        Raises: RequestError, for instance if the conversation has become too long; it then stays as it was before.
        """
        asked = [*self.messages, {"role": "user", "content": text}]
        answer = ""
        with contextlib.closing(self._llm.stream_chat(asked, self._params)) as outputs:
            for output in outputs:
                answer += output.outputs[0].new_text
                yield output.outputs[0].new_text
                if is_stopped():
                    break
        self.messages = [*asked, {"role": "assistant", "content": answer}]


def _converse(conversation: Conversation, prompt: str) -> None:
    while True:
        line = _read_line(prompt)
        if line is None:
            return
        if line in ("/exit", "/quit"):
            return
        if line == "/reset":
            conversation.reset()
        elif line.startswith("/"):
            print(f"unknown command {line.split()[0]}: {_COMMANDS}", file=sys.stderr)
        elif line:
            _print_answer(conversation, line)


def _read_line(prompt: str) -> str | None:
    """What was typed; None at the end of the input."""
    try:
        return input(prompt).strip()
    except (EOFError, KeyboardInterrupt) as end:
        if prompt:
            print()
        if isinstance(end, KeyboardInterrupt):
            raise
        return None


def _print_answer(conversation: Conversation, text: str) -> None:
    try:
        with _StopOnInterrupt() as stop:
            for piece in conversation.answer(text, stop.is_stopped):
                print(piece, end="", flush=True)
    except RequestError as error:
        print(f"stageline: error: {error}; /reset forgets the conversation", file=sys.stderr)
    else:
        print()


class _StopOnInterrupt:
    """While entered, the first Ctrl-C only sets a flag, so the engine is not cut off half-way; the second raises."""

    def __init__(self) -> None:
        self._is_stopped = False

    def is_stopped(self) -> bool:
        return self._is_stopped

    def __enter__(self) -> _StopOnInterrupt:
        self._previous = signal.signal(signal.SIGINT, self._on_interrupt)
        return self

    def __exit__(self, *exc_info: object) -> None:
        signal.signal(signal.SIGINT, self._previous)

    def _on_interrupt(self, signum: int, frame: FrameType | None) -> None:
        if self._is_stopped:
            raise KeyboardInterrupt
        self._is_stopped = True


def _enable_line_editing() -> None:
    """Arrow keys and history in `input`, where Python was built with readline."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401
