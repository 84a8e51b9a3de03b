"""A conversation: it is kept, it can be reset, and Ctrl-C stops the answer, not the program."""

import io
import signal
import sys
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import pytest

from stageline.cli import chat
from stageline.cli.main import build_parser
from stageline.config.engine_config import EngineConfig
from stageline.outputs import RequestOutput
from stageline.sampling import SamplingParams
from tests.unit.fake_llm import FakeLLM


def _chat(monkeypatch: pytest.MonkeyPatch, typed: str, *argv: str, llm: FakeLLM | None = None) -> FakeLLM:
    llm = llm or FakeLLM(EngineConfig(model="m"))
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))

    def open_llm(config: EngineConfig) -> Any:
        return llm

    assert chat.run(build_parser().parse_args(["chat", "m", *argv]), open_llm) == 0
    assert llm.is_closed
    return llm


def _roles_and_texts(messages: list[dict[str, str]]) -> list[str]:
    return [f"{message['role']}: {message['content']}" for message in messages]


def test_piped_lines_are_answered_in_order_and_nothing_else_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _chat(monkeypatch, "hello there\n\nand you\n")
    assert capsys.readouterr().out == "hello there\nand you\n"


def test_the_conversation_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = _chat(monkeypatch, "one two\nthree\n", "--system", "be brief")
    assert _roles_and_texts(llm.calls[1][0]) == [
        "system: be brief", "user: one two", "assistant: one two", "user: three",
    ]  # fmt: skip


def test_reset_keeps_only_the_system_message(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = _chat(monkeypatch, "one\n/reset\ntwo\n", "--system", "be brief")
    assert _roles_and_texts(llm.calls[1][0]) == ["system: be brief", "user: two"]


def test_exit_leaves_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(_chat(monkeypatch, "one\n/exit\ntwo\n").calls) == 1


def test_an_unknown_command_is_not_sent_to_the_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _chat(monkeypatch, "/rest\n").calls == []
    assert "/reset" in capsys.readouterr().err


def test_a_message_that_is_refused_leaves_the_conversation_as_it_was(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = FakeLLM(EngineConfig(model="m"), too_long_words=3)
    _chat(monkeypatch, "one\nfar too many words\ntwo\n", llm=llm)
    assert _roles_and_texts(llm.calls[2][0]) == ["user: one", "assistant: one", "user: two"]
    assert "/reset" in capsys.readouterr().err


@dataclass
class _InterruptedLLM(FakeLLM):
    """Ctrl-C arrives while the second token of the first answer is made, `num_interrupts` times."""

    num_interrupts: int = 1

    def stream_chat(
        self, messages: list[dict[str, str]], params: SamplingParams
    ) -> Generator[RequestOutput, None, None]:
        for number, output in enumerate(super().stream_chat(messages, params)):
            if number == 1 and len(self.calls) == 1:
                for _ in range(self.num_interrupts):
                    signal.raise_signal(signal.SIGINT)
            yield output


def test_ctrl_c_stops_the_answer_and_the_conversation_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = _InterruptedLLM(EngineConfig(model="m"))
    _chat(monkeypatch, "a b c d\nnext one\n", llm=llm)
    assert capsys.readouterr().out == "a b\nnext one\n"
    assert _roles_and_texts(llm.calls[1][0]) == ["user: a b c d", "assistant: a b", "user: next one"]
    assert llm.num_streams_closed == 2


def test_a_second_ctrl_c_leaves_and_closes_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = _InterruptedLLM(EngineConfig(model="m"), num_interrupts=2)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        _chat(monkeypatch, "a b c d\nnext\n", llm=llm)
    assert llm.is_closed and llm.num_streams_closed == 1
    assert signal.getsignal(signal.SIGINT) is before
