"""Compiles definitions into matchers, and knows a matcher's masks. One idea: bounded work, whatever is asked for.

What a definition costs is counted by the library in steps, not in time, so the same ones are refused on every machine.
A compiled definition is kept with its first mask; each completion gets a copy of its own.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from stageline.errors import RequestError
from stageline.grammar.deep_stack import on_a_deep_stack
from stageline.grammar.definition import shortened
from stageline.grammar.mask_pool import WAY_OUT
from stageline.grammar.step import Step
from stageline.pipeline.microbatch import mask_bytes
from stageline.request import GrammarSpec

_MAX_COMPILED = 64

_MOST_TRIALS = 16
"""First tokens that are tried before a grammar is accepted: many that are too complex say so only then."""

_ACCEPTS_NOTHING = "NoExtension"
_NO_SUCH_TOKEN = "Token range end"
_TOO_COMPLEX = ("limit", "fuel", "too big", "too large", "too many", "TooComplex", "Current row has")


def _limits() -> LLParserLimits:
    """Far above what schemas in use need; a mask takes some 50 ms at the very worst."""
    return LLParserLimits(
        initial_lexer_fuel=200_000,
        step_lexer_fuel=100_000,
        step_max_items=20_000,
        max_lexer_states=20_000,
        max_grammar_size=200_000,
        verbose_errors=False,
    )


class Matcher:
    """Where one completion is in its grammar. One thread at a time may use it."""

    def __init__(self, matcher: LLMatcher, num_mask_bytes: int, eos_token_ids: Collection[int]) -> None:
        self._matcher = matcher
        self._eos_token_ids = eos_token_ids
        self._num_mask_bytes = num_mask_bytes

    def mask(self) -> bytes | None:
        """Which tokens may come next, one bit each, token 0 the lowest bit of the first byte; lets other threads run.

        None if none may, because the grammar has become too complex here.
        """
        mask = self._matcher.compute_bitmask()[: self._num_mask_bytes]
        return None if self._matcher.is_error() else mask

    def advance(self, token_id: int) -> Step:
        """Take the next token, which must be one of those allowed."""
        if not self._matcher.consume_token(token_id):
            return Step.FAILED
        if not self._matcher.is_stopped():
            return Step.GOES_ON
        return Step.STOPPED if token_id in self._eos_token_ids else Step.COMPLETE


@dataclass(frozen=True)
class _Compiled:
    """`matcher` is never advanced: copies of it are."""

    matcher: LLMatcher
    first_mask: bytes


class GrammarCompiler:
    """For one model. May be used from several threads.

    Args:
        tokenizer_json: gives the tokenizer in the form of tokenizer.json; asked for when the first grammar comes.
        vocab_size: the model's; masks have as many bits, in whole words.
        eos_token_ids: what may come where a grammar is complete.
    """

    def __init__(self, tokenizer_json: Callable[[], str], vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[str, _Compiled] = OrderedDict()

    def check(self, spec: GrammarSpec) -> None:
        """Raises: RequestError, naming the field, if it is none, is too complex, or accepts nothing."""
        self._get(spec)

    def new_matcher(self, spec: GrammarSpec) -> tuple[Matcher, bytes]:
        """A matcher at the grammar's beginning, and its mask there. Raises: RequestError, as `check` does."""
        compiled = self._get(spec)
        matcher = Matcher(compiled.matcher.deep_copy(), mask_bytes(self._vocab_size), self._eos_token_ids)
        return matcher, compiled.first_mask

    def _get(self, spec: GrammarSpec) -> _Compiled:
        with self._lock:
            compiled = self._compiled.get(spec.definition)
            if compiled is not None:
                self._compiled.move_to_end(spec.definition)
                return compiled
            tokenizer = self._tokenizer = self._tokenizer or self._make_tokenizer()
        # Not under the lock: a grammar that takes long must not keep others waiting.
        compiled = on_a_deep_stack(lambda: _compile(spec, tokenizer, mask_bytes(self._vocab_size)))
        with self._lock:
            self._compiled[spec.definition] = compiled
            while len(self._compiled) > _MAX_COMPILED:
                self._compiled.popitem(last=False)
        return compiled

    def _make_tokenizer(self) -> LLTokenizer:
        body = self._tokenizer_json()
        eos_token_ids = self._eos_token_ids or None
        try:
            return LLTokenizer(body, n_vocab=self._vocab_size, eos_token=eos_token_ids)
        except ValueError:
            # It has tokens beyond the model's vocabulary; their bits are cut off.
            return LLTokenizer(body, eos_token=eos_token_ids)


def _compile(spec: GrammarSpec, tokenizer: LLTokenizer, num_mask_bytes: int) -> _Compiled:
    matcher = LLMatcher(tokenizer, spec.definition, log_level=0, limits=_limits())
    _refuse_failed(spec, matcher)
    mask = matcher.compute_bitmask()[:num_mask_bytes]
    _refuse_failed(spec, matcher)
    for token_id in _some_tokens(mask):
        trial = matcher.deep_copy()
        trial.consume_token(token_id)
        _refuse_failed(spec, trial)
    return _Compiled(matcher, mask)


def _refuse_failed(spec: GrammarSpec, matcher: LLMatcher) -> None:
    if matcher.is_error():
        raise RequestError(f"{spec.field} cannot be used: {_reason(matcher)}", spec.field)


def _some_tokens(mask: bytes) -> list[int]:
    """All that the mask allows, or as many of them as are worth trying, from the first to the last."""
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
    allowed: list[int] = np.flatnonzero(bits).tolist()
    if len(allowed) <= _MOST_TRIALS:
        return allowed
    return [allowed[place * (len(allowed) - 1) // (_MOST_TRIALS - 1)] for place in range(_MOST_TRIALS)]


def _reason(matcher: LLMatcher) -> str:
    """The library's words in one line, unless they are for those who call it."""
    words = matcher.get_error().replace("<non-verbose/>", "")
    if words.startswith(_ACCEPTS_NOTHING):
        return "it accepts nothing: no text could ever match it"
    if _NO_SUCH_TOKEN not in words and any(word in words for word in _TOO_COMPLEX):
        return f"it is too complex; {WAY_OUT}"
    return shortened(words)
