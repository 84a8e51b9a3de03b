"""Answers taken apart: content, reasoning and tool calls, found while the text comes.

Text comes in any pieces, in the middle of markers and of JSON. What is certain goes out at once; what may still become
a marker or a call is held back; what began like a call and is none goes out as content.
"""

from __future__ import annotations

from collections.abc import Sequence

from stageline.server.answer_parsing.call_writer import CallWriter
from stageline.server.answer_parsing.deltas import AnswerDelta, AnswerParser, ToolCallDelta
from stageline.server.answer_parsing.forced_calls import (
    check_tools,
    function_names,
    structured_outputs_of_tool_choice,
)
from stageline.server.answer_parsing.reasoning import PlainParser, ReasoningParser
from stageline.server.answer_parsing.style import REASONING_STYLES, TOOL_STYLES, AnswerStyle, choose_answer_style
from stageline.server.answer_parsing.tool_parsers import named_parser, required_parser
from stageline.server.protocol_chat import NamedToolChoice, Tool, ToolChoice

__all__ = [
    "AnswerDelta",
    "AnswerParser",
    "AnswerStyle",
    "ToolCallDelta",
    "check_tools",
    "choose_answer_style",
    "make_answer_parser",
    "structured_outputs_of_tool_choice",
]


def make_answer_parser(
    style: AnswerStyle,
    tools: Sequence[Tool] | None = None,
    tool_choice: ToolChoice | None = None,
    *,
    prompt: str = "",
    is_parallel: bool = True,
    has_form: bool = False,
) -> AnswerParser:
    """For the text of one answer.

    Args:
        tools, tool_choice: of the request; they have passed `check_tools`.
        prompt: how it ends decides whether the answer begins in the middle of reasoning.
        is_parallel: False gives at most one call.
        has_form: the answer was made to have a form (structured output) from its first token on; it has no reasoning.
    """
    writer = CallWriter(function_names(tools), is_parallel, style.new_call_id)
    if isinstance(tool_choice, NamedToolChoice):
        return named_parser(writer, tool_choice.function.name)
    if tool_choice == "required":
        return required_parser(writer)
    parser: AnswerParser = PlainParser()
    if tools and tool_choice != "none" and style.tool_parser in TOOL_STYLES:
        parser = TOOL_STYLES[style.tool_parser].make_parser(writer)
    marks = REASONING_STYLES.get(style.reasoning_parser)
    if marks is None or has_form:
        return parser
    return ReasoningParser(marks.opening, marks.closing, prompt.rstrip().endswith(marks.opening), parser)
