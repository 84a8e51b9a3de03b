"""From what a user asks (text, parameters) to what the engine generates (tokens, numbers), or a refusal with a reason.

One idea: everything that can be wrong with a request is found here, before the engine hears of it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol

import msgspec

from stageline.checkpoint.generation_defaults import GenerationDefaults
from stageline.checkpoint.model_spec import ModelSpec
from stageline.errors import RequestError
from stageline.grammar.compiler import GrammarCompiler
from stageline.grammar.definition import define
from stageline.request import EngineRequest, GrammarSpec
from stageline.sampling import (
    GREEDY_BELOW_TEMPERATURE,
    LEAST_REPETITION_PENALTY,
    MAX_SEED,
    SamplerSpec,
    SamplingParams,
    StructuredOutputs,
    UpTo,
)

MAX_PRIORITY = 2**31


class DecodeStream(Protocol):
    """Turns one completion's tokens into text as they come."""

    def step(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is incomplete."""
        ...

    def finish(self, token_ids: Sequence[int] = ()) -> str:
        """The text of the last tokens, and what is left when no more will come."""
        ...


class Tokenizer(Protocol):
    """What the engine needs of a tokenizer (`stageline.checkpoint.tokenizer`)."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def token_text(self, token_id: int) -> str: ...

    def serialized(self) -> str: ...

    def new_decode_stream(self, skip_special_tokens: bool, prompt_token_ids: list[int]) -> DecodeStream: ...


class InputProcessor:
    """Checks requests and turns each into one engine request per completion.

    Args:
        max_model_len: most tokens of prompt and output together.
        tokenizer: also what grammars are compiled for.
        default_seed: where the seeds of requests that bring none come from.
        generation_defaults: what the checkpoint recommends for requests without parameters.
    """

    def __init__(
        self,
        spec: ModelSpec,
        tokenizer: Tokenizer,
        max_model_len: int,
        default_seed: int,
        generation_defaults: GenerationDefaults,
    ) -> None:
        self._spec = spec
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._seeds = random.Random(default_seed)
        self._defaults = generation_defaults
        self.grammars = GrammarCompiler(lambda: tokenizer.serialized(), spec.vocab_size, spec.eos_token_ids)

    def default_params(self) -> SamplingParams:
        """What a request without parameters gets: the checkpoint's recommendation, our defaults where it is silent."""
        defaults, ours = self._defaults, SamplingParams()
        return SamplingParams(
            temperature=ours.temperature if defaults.temperature is None else defaults.temperature,
            top_k=ours.top_k if defaults.top_k is None else defaults.top_k,
            top_p=ours.top_p if defaults.top_p is None else defaults.top_p,
            min_p=ours.min_p if defaults.min_p is None else defaults.min_p,
            repetition_penalty=(
                ours.repetition_penalty if defaults.repetition_penalty is None else defaults.repetition_penalty
            ),
            max_tokens=ours.max_tokens if defaults.max_new_tokens is None else UpTo(defaults.max_new_tokens),
        )

    def process(
        self,
        request_id: str,
        prompt: str | list[int],
        params: SamplingParams | None,
        arrival_s: float,
        priority: int = 0,
        cache_salt: str = "",
        deadline_s: float | None = None,
    ) -> list[EngineRequest]:
        """Check one request.

        Args:
            request_id: the completions are called "R", or "R-0", "R-1", ... if there are several.
            prompt: text, or token ids that are taken as they are.
            params: None for `default_params()`.
            priority, cache_salt, deadline_s: see `EngineRequest`.
        Returns: one engine request per completion, `params.n` of them.
        Raises: RequestError, naming the field at fault.
        """
        params = self.default_params() if params is None else params
        params.validate(self._spec.vocab_size)
        if type(priority) is not int or not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
            raise RequestError(f"priority is {priority!r}; it must be an integer of at most {MAX_PRIORITY}", "priority")
        prompt_token_ids = self._prompt_token_ids(prompt)
        grammar = None if params.structured_outputs is None else self._grammar(params.structured_outputs)
        max_tokens = self._max_tokens(len(prompt_token_ids), params.max_tokens)
        eos_token_ids = () if params.ignore_eos else self._spec.eos_token_ids
        stop_token_ids = tuple(dict.fromkeys(params.stop_token_ids or ()))
        sampler = self._sampler(params, tuple(dict.fromkeys(eos_token_ids + stop_token_ids)))
        return [
            EngineRequest(
                request_id=request_id if params.n == 1 else f"{request_id}-{index}",
                prompt_token_ids=prompt_token_ids,
                sampler=_for_completion(sampler, index, self._seeds.getrandbits(63) if params.seed is None else None),
                max_tokens=max_tokens,
                eos_token_ids=eos_token_ids,
                stop_token_ids=stop_token_ids,
                arrival_s=arrival_s,
                priority=priority,
                cache_salt=cache_salt,
                deadline_s=deadline_s,
                grammar=grammar,
                num_completions=0 if index else params.n,
            )
            for index in range(params.n)
        ]

    def _max_tokens(self, num_prompt_tokens: int, asked: int | None) -> int:
        room_tokens = self._max_model_len - num_prompt_tokens
        if asked is None or isinstance(asked, UpTo):
            return room_tokens if asked is None else min(int(asked), room_tokens)
        if asked > room_tokens:
            raise RequestError(
                f"max_tokens is {asked} for a prompt of {num_prompt_tokens} tokens, and prompt and output together may "
                f"have {self._max_model_len}; ask for at most {room_tokens}, or leave it out",
                "max_tokens",
            )
        return asked

    def _prompt_token_ids(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            field, token_ids = "prompt", self._encoded(prompt)
        elif isinstance(prompt, list | tuple):
            field, token_ids = "prompt_token_ids", list(prompt)
        else:
            raise RequestError(
                f"the prompt is of type {type(prompt).__name__}; give a text or a list of token ids", "prompt"
            )
        if not token_ids:
            raise RequestError("the prompt is empty; give at least one token", field)
        for token_id in token_ids:
            if type(token_id) is not int or not 0 <= token_id < self._spec.vocab_size:
                raise RequestError(
                    f"the prompt holds token id {token_id!r}; the model has ids 0 to {self._spec.vocab_size - 1}", field
                )
        longest = self._max_model_len - 1
        if len(token_ids) > longest:
            can_be_raised = self._max_model_len < self._spec.max_position_embeddings
            raise RequestError(
                f"the prompt has {len(token_ids)} tokens, and prompt and output together may have "
                f"{self._max_model_len}; shorten it to at most {longest} tokens"
                + (" or raise --max-model-len" if can_be_raised else ""),
                field,
            )
        return token_ids

    def _grammar(self, asked: StructuredOutputs) -> GrammarSpec:
        """Compiled here once, so that what the engine gets can be compiled."""
        spec = define(asked)
        self.grammars.check(spec)
        return spec

    def _encoded(self, prompt: str) -> list[int]:
        """Token ids; none for an empty text, also where the tokenizer would put a special token before it."""
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"the prompt is no Unicode text: {error.reason} at {error.start}", "prompt") from error
        return self._tokenizer.encode(prompt) if prompt else []

    def _sampler(self, params: SamplingParams, end_token_ids: tuple[int, ...]) -> SamplerSpec:
        """The part the last stage needs, for the first completion; a missing seed is 0."""
        # Beyond the model's length and vocabulary they say nothing more, and a message's numbers have 64 bits.
        min_tokens = min(params.min_tokens, self._max_model_len) if end_token_ids else 0
        return SamplerSpec(
            seed=params.seed or 0,
            temperature=0.0 if params.temperature < GREEDY_BELOW_TEMPERATURE else params.temperature,
            top_k=min(max(params.top_k, 0), self._spec.vocab_size),
            top_p=params.top_p,
            min_p=params.min_p,
            repetition_penalty=max(params.repetition_penalty, LEAST_REPETITION_PENALTY),
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            logit_bias=tuple((params.logit_bias or {}).items()),
            num_logprobs=-1 if params.logprobs is None else params.logprobs,
            num_prompt_logprobs=-1 if params.prompt_logprobs is None else params.prompt_logprobs,
            min_tokens=min_tokens,
            forbidden_before_min_tokens=end_token_ids if min_tokens else (),
            allowed_token_ids=tuple(dict.fromkeys(params.allowed_token_ids or ())),
            bad_words=tuple(self._bad_word_token_ids(params.bad_words or [])),
        )

    def _bad_word_token_ids(self, bad_words: list[str]) -> list[tuple[int, ...]]:
        """Each word as it is written at the start of a text and, unless that covers it, after a space."""
        sequences: list[tuple[int, ...]] = []
        for word in bad_words:
            bare = tuple(self._tokenizer.encode(word.lstrip(), add_special_tokens=False))
            spaced = tuple(self._tokenizer.encode(" " + word.lstrip(), add_special_tokens=False))
            sequences += [tokens for tokens in (bare, spaced) if tokens]
            if bare and spaced[-len(bare) :] == bare:
                sequences.pop()
        return list(dict.fromkeys(sequences))


def _for_completion(sampler: SamplerSpec, index: int, drawn_seed: int | None) -> SamplerSpec:
    """The sampler of one of a request's completions; only the first describes the prompt they share."""
    seed = sampler.seed + index if drawn_seed is None else drawn_seed
    if seed > MAX_SEED:
        seed -= 2 * (MAX_SEED + 1)  # the one after the highest is the lowest
    num_prompt_logprobs = sampler.num_prompt_logprobs if index == 0 else -1
    return msgspec.structs.replace(sampler, seed=seed, num_prompt_logprobs=num_prompt_logprobs)
