"""Finds Lark grammars that can never come to an end, such as `start: "a" start`.

One idea: a rule can end if one of its alternatives needs only rules that can. Growing that set until nothing is added
leaves the rules that cannot. What this file does not understand of Lark's syntax it takes for something that can end:
a grammar is refused only for what is certain, and the compiler has the last word on syntax.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_TOKEN = re.compile(
    r"""
      (?P<skip> //[^\n]* | [ \t\r]+ )
    | (?P<newline> \n\s* )
    | (?P<ending> "(?:[^"\\\n]|\\.)*"i? | /(?:[^/\\\n]|\\.)+/[a-z]* | <[^>\s]*> | \d+ | \.\. | -> \s* \w+ )
    | (?P<special> %[a-z_]+ )
    | (?P<name> [!?]?[_a-zA-Z][\w-]* )
    | (?P<mark> [][(){}|:*+?~,.&=;-] )
    | (?P<other> . )
    """,
    re.VERBOSE | re.DOTALL,
)

# Lines that say nothing about how a rule goes on.
_DIRECTIVE = re.compile(r"^[ \t]*%(?:(?:import|ignore)\b[^\n]*|llguidance\s*\{[^{}]*\})", re.MULTILINE)

_DEEPEST_GROUP = 100


@dataclass
class Alternatives:
    """One of several sequences has to end: per sequence, the names and groups that have to end for it."""

    sequences: list[list[str | Alternatives]] = field(default_factory=lambda: [[]])


def never_ends(lark: str) -> bool:
    """Whether it is certain that no text of the rule `start` is complete."""
    matches = _TOKEN.finditer(_DIRECTIVE.sub("", lark))
    tokens = [(str(match.lastgroup), match.group()) for match in matches if match.lastgroup != "skip"]
    rules = _rules(tokens)
    return rules is not None and "start" in rules and "start" not in ending(rules)


def _rules(tokens: list[tuple[str, str]]) -> dict[str, Alternatives] | None:
    """Every rule's alternatives by its name; None if the grammar uses what is not understood here."""
    rules: dict[str, Alternatives] = {}
    stack: list[Alternatives] = []
    place = 0
    while place < len(tokens):
        kind, text = tokens[place]
        following = tokens[place + 1][1] if place + 1 < len(tokens) else ""
        if kind == "name" and following in (":", ".", "[") and (place == 0 or tokens[place - 1][0] == "newline"):
            end = _end_of_head(tokens, place)
            if end is None:
                return None
            stack = [Alternatives()]
            rules[text.lstrip("!?")] = stack[0]
            place = end
        elif stack and not _take(stack, kind, text, following):
            return None
        place += 1
    return rules


def _end_of_head(tokens: list[tuple[str, str]], place: int) -> int | None:
    """The colon after a rule's name, its attributes and its priority; None if it is not on this line."""
    for end in range(place + 1, len(tokens)):
        if tokens[end][1] == ":":
            return end
        if tokens[end][0] == "newline":
            return None
    return None


def _take(stack: list[Alternatives], kind: str, text: str, following: str) -> bool:
    """Take one token of a rule's body. False if it is not understood."""
    if kind in ("special", "other") or text == ":":
        return False
    if kind in ("ending", "newline"):
        return True
    sequence = stack[-1].sequences[-1]
    may_be_left_out = following in ("?", "*", "{", "~")
    if kind == "name":
        if not may_be_left_out:
            sequence.append(text)
    elif text in "([":
        if len(stack) == _DEEPEST_GROUP:
            return False
        group = Alternatives()
        sequence.append(group)
        stack.append(group)
    elif text in ")]":
        if len(stack) < 2:
            return False
        group = stack.pop()
        if text == "]" or may_be_left_out:
            group.sequences.append([])
    elif text == "|":
        stack[-1].sequences.append([])
    elif text in "&~":
        return text == "~"
    return True


def ending(rules: dict[str, Alternatives]) -> set[str]:
    """Names that can end. An unknown name is taken for one that can: the compiler says what is wrong with it."""
    found: set[str] = set()
    users: dict[str, set[str]] = {name: set() for name in rules}
    for name, body in rules.items():
        for used in _names(body):
            if used in users:
                users[used].add(name)
    queue = dict.fromkeys(rules)
    while queue:
        name = next(iter(queue))
        del queue[name]
        if name not in found and _can_end(rules[name], found, rules):
            found.add(name)
            queue.update(dict.fromkeys(users[name] - found))
    return found


def _names(body: Alternatives) -> set[str]:
    found: set[str] = set()
    bodies = [body]
    while bodies:
        for sequence in bodies.pop().sequences:
            for item in sequence:
                if isinstance(item, str):
                    found.add(item)
                else:
                    bodies.append(item)
    return found


def _can_end(body: Alternatives, ending: set[str], rules: dict[str, Alternatives]) -> bool:
    return any(
        all(
            item in ending or item not in rules if isinstance(item, str) else _can_end(item, ending, rules)
            for item in sequence
        )
        for sequence in body.sequences
    )
