"""What the engine checks of a request that came over a socket, so that no client can send what would end a stage.

A client has checked the user's words already, and in better ones (`stageline.engine.input_processor`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from stageline.errors import RequestError
from stageline.request import EngineRequest
from stageline.sampling import MAX_LOGPROBS, MAX_SEED, SamplerSpec


def check_engine_request(request: EngineRequest, vocab_size: int) -> None:
    """Raises: RequestError for the first number that no stage could work with."""
    _check_ids("prompt_token_ids", request.prompt_token_ids, vocab_size)
    _check_ids("stop_token_ids", (*request.stop_token_ids, *request.eos_token_ids), vocab_size)
    if request.max_tokens < 1:
        raise RequestError(f"max_tokens is {request.max_tokens}; it must be at least 1", "max_tokens")
    for name, time_s in ("arrival_s", request.arrival_s), ("deadline_s", request.deadline_s):
        if time_s is not None and not math.isfinite(time_s):
            raise RequestError(f"{name} is {time_s}; it must be a finite number", name)
    _check_sampler(request.sampler, vocab_size)


def _check_sampler(sampler: SamplerSpec, vocab_size: int) -> None:
    _check_ids("logit_bias", [token_id for token_id, _ in sampler.logit_bias], vocab_size)
    _check_ids("stop_token_ids", sampler.forbidden_before_min_tokens, vocab_size)
    _check_ids("allowed_token_ids", sampler.allowed_token_ids, vocab_size)
    for word in sampler.bad_words:
        _check_ids("bad_words", word, vocab_size)
        if not word:
            raise RequestError("bad_words holds an empty word", "bad_words")
    if not 0 <= sampler.top_p <= 1 or not 0 <= sampler.min_p <= 1:
        raise RequestError(f"top_p is {sampler.top_p}, min_p is {sampler.min_p}; both must be between 0 and 1", "top_p")
    numbers = {
        "temperature": sampler.temperature,
        "repetition_penalty": sampler.repetition_penalty,
        "presence_penalty": sampler.presence_penalty,
        "frequency_penalty": sampler.frequency_penalty,
    }
    for name, value in [*numbers.items(), *(("logit_bias", bias) for _, bias in sampler.logit_bias)]:
        if not math.isfinite(value):
            raise RequestError(f"{name} is {value}; it must be a finite number", name)
    for name, value in ("num_logprobs", sampler.num_logprobs), ("num_prompt_logprobs", sampler.num_prompt_logprobs):
        if not -1 <= value <= MAX_LOGPROBS:
            raise RequestError(f"{name} is {value}; it must be between -1 and {MAX_LOGPROBS}", name)
    if not -MAX_SEED - 1 <= sampler.seed <= MAX_SEED:
        raise RequestError(f"seed is {sampler.seed}; it must fit 64 bits", "seed")


def _check_ids(field: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise RequestError(f"{field} holds token id {token_id}; the model has ids 0 to {vocab_size - 1}", field)
