"""How a request wants its tokens chosen.

`SamplingParams` is what a user writes (the field names are those of vLLM and OpenAI). `SamplerSpec` is the part of it
that the last stage needs, as token ids and numbers only: it travels with the microbatch that introduces the request.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from stageline.errors import RequestError

MAX_LOGPROBS = 20
MAX_N = 128
MAX_SEED = 2**63 - 1
# Divided by less than this, logits leave float32's range; such a temperature is greedy for every purpose.
GREEDY_BELOW_TEMPERATURE = 1e-5
# The same for a penalty that logits are divided by. All smaller ones say the same: always what was there before.
LEAST_REPETITION_PENALTY = 1e-6


class UpTo(int):
    """As many tokens as this, or as fit: a `max_tokens` that is nobody's explicit wish, as every default is."""


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True):
    """What an answer must look like: exactly one of the fields says so.

    Args:
        json: a JSON schema, as an object or as text.
        regex: a regular expression that the whole answer matches, in the syntax of Rust's regex crate.
        choice: the answer is one of these texts.
        grammar: a context-free grammar in the syntax of Lark, or as GBNF (`root ::= ...`).
        json_object: the answer is a JSON object.
        disable_any_whitespace: JSON without line breaks and spaces that carry no meaning.
    Raises: RequestError, naming the field, from `validate`; whether a schema or a grammar can be used is found out by
        `stageline.grammar`.
    """

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False

    @property
    def kind(self) -> str:
        """The name of the field that is given, once `validate` has passed."""
        return next(name for name in _KINDS_OF_STRUCTURE if getattr(self, name) not in (None, False))

    def validate(self) -> None:
        """Check that one field is given, and its type."""
        given = [name for name in _KINDS_OF_STRUCTURE if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            raise RequestError(
                f"structured_outputs has {' and '.join(given) if given else 'none of its fields'}; give exactly one of "
                f"{', '.join(_KINDS_OF_STRUCTURE)}",
                "structured_outputs",
            )
        field, value = f"structured_outputs.{given[0]}", getattr(self, given[0])
        kind = _KINDS_OF_STRUCTURE[given[0]]
        if not isinstance(value, kind):
            raise RequestError(f"{field} is of type {type(value).__name__}; it must be {_in_words(kind)}", field)
        if self.choice is not None:
            if not self.choice:
                raise RequestError(f"{field} is empty; name at least one text", field)
            for text in self.choice:
                if not isinstance(text, str):
                    raise RequestError(f"{field} holds {text!r}; every entry must be a text", field)


_KINDS_OF_STRUCTURE: dict[str, tuple[type, ...]] = {
    "json": (dict, str),
    "regex": (str,),
    "choice": (list,),
    "grammar": (str,),
    "json_object": (bool,),
}


def _in_words(kinds: tuple[type, ...]) -> str:
    words = {dict: "an object", str: "a text", list: "a list of texts", bool: "true or false"}
    return " or ".join(words[kind] for kind in kinds)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """What a user asks of the sampler.

    Args:
        n: independent completions of the same prompt.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: keep the k likeliest tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of likeliest tokens whose probabilities sum to at least this, in (0, 1].
        min_p: keep tokens at least this fraction as likely as the likeliest, in [0, 1].
        seed: same seed, prompt and parameters give the same tokens, whatever else is in the batch.
        repetition_penalty: above 1 discourages tokens of the prompt and the output; multiplicative on logits.
        presence_penalty: subtracted once from the logit of every token already generated.
        frequency_penalty: subtracted per occurrence from the logit of every token already generated.
        logit_bias: added to the logits of these token ids.
        logprobs: return the log-probability of each chosen token and of this many likeliest ones.
        prompt_logprobs: the same for the prompt's tokens.
        stop: strings that end the completion.
        stop_token_ids: token ids that end the completion.
        include_stop_str_in_output: keep the stop string or stop token in the text.
        min_tokens: end-of-sequence and stop tokens cannot be chosen before this many tokens.
        max_tokens: end after this many tokens; None (none on the command line) means up to the model's length. A
            number that does not fit behind the prompt is refused; of the default, as much is taken as fits.
        ignore_eos: go on past the model's end-of-sequence token.
        allowed_token_ids: only these may be chosen.
        bad_words: strings whose last token is never chosen when the tokens before it match.
        skip_special_tokens: leave special tokens out of the text.
        structured_outputs: what the answer must look like.

    Raises: RequestError, naming the field, from `validate`.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    max_tokens: int | None = UpTo(16)
    ignore_eos: bool = False
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputs | None = None

    @property
    def stop_strings(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)

    def validate(self, vocab_size: int) -> None:
        """Check every field; raise RequestError naming the first that is wrong."""
        _check_type("n", self.n, int)
        _check_range("n", self.n, 1, MAX_N)
        _check_number("temperature", self.temperature, 0.0, 100.0)
        _check_type("top_k", self.top_k, int)
        if self.top_k < -1:
            raise RequestError(f"top_k is {self.top_k}; give a positive count, or 0 or -1 for all tokens", "top_k")
        _check_number("top_p", self.top_p, -math.inf, math.inf)
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top_p is {self.top_p}; it must be above 0 and at most 1", "top_p")
        _check_number("min_p", self.min_p, 0.0, 1.0)
        _check_number("repetition_penalty", self.repetition_penalty, 0.0, 100.0)
        if self.repetition_penalty == 0.0:
            raise RequestError("repetition_penalty is 0; it must be above 0 (1 switches it off)", "repetition_penalty")
        _check_number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _check_type("seed", self.seed, int)
            _check_range("seed", self.seed, -MAX_SEED - 1, MAX_SEED)
        self._validate_lengths()
        self._validate_token_ids(vocab_size)
        self._validate_strings()
        for field in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(value := getattr(self, field), bool):
                raise RequestError(f"{field} is {value!r}; it must be true or false", field)
        if self.structured_outputs is not None:
            if not isinstance(self.structured_outputs, StructuredOutputs):
                raise RequestError(
                    f"structured_outputs is {self.structured_outputs!r}; give StructuredOutputs(...)",
                    "structured_outputs",
                )
            self.structured_outputs.validate()

    def _validate_lengths(self) -> None:
        for field in ("logprobs", "prompt_logprobs"):
            value = getattr(self, field)
            if value is not None:
                _check_type(field, value, int)
                _check_range(field, value, 0, MAX_LOGPROBS)
        _check_type("min_tokens", self.min_tokens, int)
        _check_range("min_tokens", self.min_tokens, 0, None)
        if self.max_tokens is None:
            return
        _check_type("max_tokens", self.max_tokens, int)
        _check_range("max_tokens", self.max_tokens, 1, None)
        if self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}, above max_tokens {self.max_tokens}; lower one or raise the other",
                "min_tokens",
            )

    def _validate_token_ids(self, vocab_size: int) -> None:
        if self.logit_bias is not None:
            _check_type("logit_bias", self.logit_bias, dict)
        for token_id, bias in (self.logit_bias or {}).items():
            _check_token_id("logit_bias", token_id, vocab_size)
            _check_number("logit_bias", bias, -100.0, 100.0)
        for field in ("stop_token_ids", "allowed_token_ids"):
            for entry in _entries(field, getattr(self, field)):
                _check_token_id(field, entry, vocab_size)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError("allowed_token_ids is empty; name some tokens or leave it out", "allowed_token_ids")

    def _validate_strings(self) -> None:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        for field, strings in (("stop", stop), ("bad_words", self.bad_words)):
            for string in _entries(field, strings):
                if not isinstance(string, str) or not string:
                    raise RequestError(f"{field} holds {string!r}; every entry must be a non-empty string", field)


def _entries(field: str, value: object) -> list[object]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise RequestError(f"{field} is {value!r}; it must be a list", field)
    return value


def _check_type(field: str, value: object, kind: type) -> None:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise RequestError(f"{field} is {value!r}; it must be of type {kind.__name__}", field)


def _check_range(field: str, value: int, lowest: int, highest: int | None) -> None:
    if value < lowest or (highest is not None and value > highest):
        wanted = f"at least {lowest}" if highest is None else f"between {lowest} and {highest}"
        raise RequestError(f"{field} is {value}; it must be {wanted}", field)


def _check_number(field: str, value: object, lowest: float, highest: float) -> None:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise RequestError(f"{field} is {value!r}; it must be a finite number", field)
    if not lowest <= value <= highest:
        raise RequestError(f"{field} is {value}; it must be between {lowest:g} and {highest:g}", field)


def _check_token_id(field: str, token_id: object, vocab_size: int) -> None:
    if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < vocab_size:
        raise RequestError(f"{field} holds token id {token_id!r}; the vocabulary has ids 0 to {vocab_size - 1}", field)


class SamplerSpec(msgspec.Struct, frozen=True, array_like=True):
    """What the last stage needs to choose a request's tokens; ids and numbers only.

    Args:
        seed: always set: the user's, or one drawn when the request arrived. With the position of a token it fixes the
            random number used for it, so a token does not depend on the batch or on what was recomputed.
        logit_bias: (token id, bias) pairs.
        num_logprobs, num_prompt_logprobs: -1 when not asked for.
        forbidden_before_min_tokens: end-of-sequence and stop token ids.
        bad_words: token id sequences; the last one is not chosen when those before it are the latest tokens.
    """

    seed: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    num_logprobs: int = -1
    num_prompt_logprobs: int = -1
    min_tokens: int = 0
    forbidden_before_min_tokens: tuple[int, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()

    @property
    def is_plain_greedy(self) -> bool:
        """Nothing but the largest logit is wanted."""
        return self.temperature == 0.0 and not self.changes_logits and self.num_logprobs < 0

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def changes_logits(self) -> bool:
        return bool(
            self.has_penalties or self.logit_bias or self.allowed_token_ids or self.bad_words or self.min_tokens > 0
        )

    @property
    def needs_history(self) -> bool:
        """The sampler must know the tokens so far, not only the logits of the last one."""
        return self.has_penalties or bool(self.bad_words) or self.num_prompt_logprobs >= 0


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities at one position: the chosen token first, then the likeliest ones in falling order.

    Args:
        rank: the chosen token's place among all tokens, 1 for the likeliest.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int
