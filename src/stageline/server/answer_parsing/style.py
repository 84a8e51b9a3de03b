"""How a model writes its answers: which parser finds its tool calls, and which its reasoning.

One idea: the chat template shows it. It writes earlier calls and reasoning back into the prompt with the same markers
that the model uses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, Protocol

from stageline.errors import ConfigError
from stageline.server.answer_parsing.call_writer import CallWriter, mistral_call_id, openai_call_id
from stageline.server.answer_parsing.deltas import AnswerParser
from stageline.server.answer_parsing.pythonic import pythonic_parser
from stageline.server.answer_parsing.tool_parsers import hermes_parser, llama3_json_parser, mistral_parser

AUTO, NONE = "auto", "none"


@dataclass(frozen=True)
class ToolStyle:
    """A way to write tool calls.

    Args:
        make_parser: finds them in an answer's content.
        markers: what must be in the text to find them.
        signs: what a chat template of this style contains.
    """

    make_parser: Callable[[CallWriter], AnswerParser]
    markers: tuple[str, ...] = ()
    signs: tuple[str, ...] = ()
    new_call_id: Callable[[], str] = openai_call_id


@dataclass(frozen=True)
class ReasoningStyle:
    """A way to mark reasoning, with a text before and one after it."""

    opening: str
    closing: str


# In the order in which a template is asked for their signs.
TOOL_STYLES: Mapping[str, ToolStyle] = MappingProxyType(
    {
        "mistral": ToolStyle(mistral_parser, ("[TOOL_CALLS]",), ("[TOOL_CALLS]",), mistral_call_id),
        "hermes": ToolStyle(hermes_parser, ("<tool_call>", "</tool_call>"), ("<tool_call>",)),
        "pythonic": ToolStyle(pythonic_parser, (), ("func_name1(", "<|python_start|>")),
        "llama3_json": ToolStyle(llama3_json_parser, (), ("<|python_tag|>", '{"name": function name, "parameters"')),
    }
)
REASONING_STYLES: Mapping[str, ReasoningStyle] = MappingProxyType(
    {
        "think": ReasoningStyle("<think>", "</think>"),
        "mistral": ReasoningStyle("[THINK]", "[/THINK]"),
    }
)
# Names by which other servers know the same styles.
TOOL_ALIASES = MappingProxyType(
    {"qwen": "hermes", "qwen3": "hermes", "llama3": "llama3_json", "llama4_pythonic": "pythonic"}
)
REASONING_ALIASES = MappingProxyType({"qwen3": "think", "deepseek_r1": "think"})
_MODELS_THAT_THINK = ("deepseek-r1", "qwq")


@dataclass(frozen=True)
class AnswerStyle:
    """Args:
    tool_parser, reasoning_parser: names of `TOOL_STYLES` and `REASONING_STYLES`, or "none".
    has_special_tool_markers, has_special_reasoning_markers: the markers are special tokens of the model, and in the
        text only if those are not skipped.
    """

    tool_parser: str = NONE
    reasoning_parser: str = NONE
    has_special_tool_markers: bool = False
    has_special_reasoning_markers: bool = False

    def needs_special_tokens(self, has_tools: bool) -> bool:
        """An answer's text must be made with skip_special_tokens off, for its markers to be found."""
        return self.has_special_reasoning_markers or (has_tools and self.has_special_tool_markers)

    @property
    def new_call_id(self) -> Callable[[], str]:
        style = TOOL_STYLES.get(self.tool_parser)
        return openai_call_id if style is None else style.new_call_id


class StyleSettings(Protocol):
    """What of the server's configuration matters here."""

    @property
    def tool_call_parser(self) -> str: ...
    @property
    def reasoning_parser(self) -> str: ...


class StyleTokenizer(Protocol):
    """What of the tokenizer matters here."""

    @property
    def chat_template_sources(self) -> Sequence[str]: ...
    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


def choose_answer_style(tokenizer: StyleTokenizer, settings: StyleSettings, model_names: Sequence[str]) -> AnswerStyle:
    """What the operator asked for; where that is "auto", what the chat template shows.

    Raises: ConfigError for the name of no style.
    """
    tools = resolve_name(settings.tool_call_parser, "tool", "--tool-call-parser")
    reasoning = resolve_name(settings.reasoning_parser, "reasoning", "--reasoning-parser")
    templates = "\n".join(tokenizer.chat_template_sources)
    if tools == AUTO:
        tools = _tool_style_of(templates)
    if reasoning == AUTO:
        reasoning = _reasoning_style_of(templates, model_names)
    tool_markers = TOOL_STYLES[tools].markers if tools in TOOL_STYLES else ()
    marks = REASONING_STYLES.get(reasoning)
    return AnswerStyle(
        tool_parser=tools,
        reasoning_parser=reasoning,
        has_special_tool_markers=_are_special(tokenizer, tool_markers),
        has_special_reasoning_markers=_are_special(tokenizer, (marks.opening, marks.closing) if marks else ()),
    )


def resolve_name(name: str, kind: Literal["tool", "reasoning"], flag: str) -> str:
    """The name of a style, "auto" or "none". Raises: ConfigError."""
    known, aliases = (TOOL_STYLES, TOOL_ALIASES) if kind == "tool" else (REASONING_STYLES, REASONING_ALIASES)
    if name in (AUTO, NONE) or name in known:
        return name
    if name in aliases:
        return aliases[name]
    raise ConfigError(f"{flag} {name} is not known; give one of {AUTO}, {NONE}, {', '.join((*known, *aliases))}")


def _tool_style_of(templates: str) -> str:
    for name, style in TOOL_STYLES.items():
        if any(sign in templates for sign in style.signs):
            return name
    # A template without tools is told of them in this style (`prompt_tools.py`); one with a style of its own is not.
    return NONE if "tools" in templates else "hermes"


def _reasoning_style_of(templates: str, model_names: Sequence[str]) -> str:
    for name, style in REASONING_STYLES.items():
        if style.opening in templates or style.closing in templates:
            return name
    is_known = any(known in name.lower() for known in _MODELS_THAT_THINK for name in model_names)
    return "think" if is_known else NONE


def _are_special(tokenizer: StyleTokenizer, markers: Sequence[str]) -> bool:
    """Some marker disappears when special tokens are skipped."""
    return any(
        marker not in tokenizer.decode(tokenizer.encode(marker, add_special_tokens=False)) for marker in markers
    )
