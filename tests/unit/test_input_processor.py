"""A request is refused with a reason before the engine hears of it, or becomes exactly what was asked for."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from stageline.checkpoint.generation_defaults import GenerationDefaults
from stageline.checkpoint.model_spec import ModelSpec, RopeSpec
from stageline.engine.input_processor import InputProcessor
from stageline.engine.request_check import check_engine_request
from stageline.errors import RequestError
from stageline.sampling import MAX_SEED, SamplerSpec, SamplingParams, UpTo
from tests.unit.byte_tokenizer import EOS_TOKEN_ID, STOP_TOKEN_ID, VOCAB_SIZE, byte_tokenizer

MAX_MODEL_LEN = 20  # of the model itself
SPEC = ModelSpec(
    family="llama",
    num_layers=1,
    hidden_size=8,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    intermediate_size=8,
    vocab_size=VOCAB_SIZE,
    max_position_embeddings=MAX_MODEL_LEN,
    rms_norm_eps=1e-5,
    rope=RopeSpec(),
    tie_word_embeddings=True,
    eos_token_ids=(EOS_TOKEN_ID,),
)


def _processor(default_seed: int = 0, **defaults: Any) -> InputProcessor:
    return InputProcessor(SPEC, byte_tokenizer(), MAX_MODEL_LEN, default_seed, GenerationDefaults(**defaults))


def _sampler(params: SamplingParams) -> SamplerSpec:
    return _processor().process("R", "hi", params, 0.0)[0].sampler


def test_text_is_encoded_and_token_ids_are_taken_as_they_are() -> None:
    processor = _processor()
    ids = byte_tokenizer().encode("hello")
    for prompt in ("hello", ids):
        (request,) = processor.process("R", prompt, SamplingParams(), 12.5)
        assert (request.request_id, request.prompt_token_ids, request.arrival_s) == ("R", ids, 12.5)


@pytest.mark.parametrize(
    ("prompt", "field", "message"),
    [
        ("", "prompt", "empty"),
        ([], "prompt_token_ids", "empty"),
        ([1, VOCAB_SIZE], "prompt_token_ids", f"{VOCAB_SIZE}.*0 to {VOCAB_SIZE - 1}"),
        ([-1], "prompt_token_ids", "-1"),
        ([1.0], "prompt_token_ids", "1.0"),
        ([True], "prompt_token_ids", "True"),
        ("x" * MAX_MODEL_LEN, "prompt", "20 tokens.*at most 19 tokens$"),
        ([1] * 500, "prompt_token_ids", "500 tokens"),
        ("\ud800", "prompt", "Unicode"),
    ],
)
def test_a_prompt_that_cannot_be_served_is_refused(prompt: str | list[int], field: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        _processor().process("R", prompt, SamplingParams(), 0.0)
    assert caught.value.field == field


def test_only_a_length_below_the_model_s_can_be_raised() -> None:
    shorter = InputProcessor(SPEC, byte_tokenizer(), MAX_MODEL_LEN - 1, 0, GenerationDefaults())
    with pytest.raises(RequestError, match=r"19 tokens.*at most 18 tokens or raise --max-model-len$"):
        shorter.process("R", "x" * 19, SamplingParams(), 0.0)


def test_wrong_parameters_are_refused() -> None:
    with pytest.raises(RequestError, match="temperature"):
        _processor().process("R", "hi", SamplingParams(temperature=-1.0), 0.0)


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens", "expected"),
    [(19, None, 1), (19, UpTo(100), 1), (10, None, 10), (10, 10, 10), (10, UpTo(11), 10), (10, 3, 3)],
)
def test_prompt_and_output_together_never_exceed_the_model_s_length(
    num_prompt_tokens: int, max_tokens: int | None, expected: int
) -> None:
    (request,) = _processor().process("R", [1] * num_prompt_tokens, SamplingParams(max_tokens=max_tokens), 0.0)
    assert request.max_tokens == expected and type(request.max_tokens) is int


@pytest.mark.parametrize(("num_prompt_tokens", "max_tokens"), [(10, 11), (19, 2), (5, 16), (1, 2**64)])
def test_more_output_than_fits_is_refused_with_the_numbers_if_it_was_asked_for(
    num_prompt_tokens: int, max_tokens: int
) -> None:
    asked = f"max_tokens is {max_tokens} for a prompt of {num_prompt_tokens} tokens"
    room = f"have {MAX_MODEL_LEN}; ask for at most {MAX_MODEL_LEN - num_prompt_tokens},"
    with pytest.raises(RequestError, match=f"{asked}, .* {room}"):
        _processor().process("R", [1] * num_prompt_tokens, SamplingParams(max_tokens=max_tokens), 0.0)
    (request,) = _processor().process("R", [1] * 5, SamplingParams(), 0.0)
    assert request.max_tokens == 15, "nobody asked for the default"


def test_several_completions_have_names_and_seeds_of_their_own() -> None:
    requests = _processor().process("R", "hi", SamplingParams(n=3, seed=MAX_SEED, prompt_logprobs=1), 0.0)
    assert [request.request_id for request in requests] == ["R-0", "R-1", "R-2"]
    assert [request.sampler.seed for request in requests] == [MAX_SEED, -MAX_SEED - 1, -MAX_SEED]
    assert [request.sampler.num_prompt_logprobs for request in requests] == [1, -1, -1]
    for request in requests:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(request), type=type(request)) == request
        check_engine_request(request, VOCAB_SIZE)


def test_drawn_seeds_repeat_with_the_engine_s_seed_and_differ_between_requests() -> None:
    def seeds(default_seed: int) -> list[int]:
        processor = _processor(default_seed)
        params = SamplingParams(n=2)
        return [r.sampler.seed for _ in range(5) for r in processor.process("R", "hi", params, 0.0)]

    assert seeds(1) == seeds(1)
    assert len(set(seeds(1)) | set(seeds(2))) == 20


def test_refused_and_seeded_requests_do_not_shift_the_drawn_seeds() -> None:
    processor = _processor()
    with pytest.raises(RequestError):
        processor.process("R", "", SamplingParams(), 0.0)
    processor.process("R", "hi", SamplingParams(seed=3), 0.0)
    after = processor.process("R", "hi", SamplingParams(), 0.0)[0].sampler.seed
    assert after == _processor().process("R", "hi", SamplingParams(), 0.0)[0].sampler.seed


def test_what_ends_a_completion_is_forbidden_before_min_tokens() -> None:
    params = SamplingParams(min_tokens=4, stop_token_ids=[STOP_TOKEN_ID, 5, 5])
    (request,) = _processor().process("R", "hi", params, 0.0)
    assert request.eos_token_ids == (EOS_TOKEN_ID,)
    assert request.stop_token_ids == (STOP_TOKEN_ID, 5)
    assert request.sampler.min_tokens == 4
    assert request.sampler.forbidden_before_min_tokens == (EOS_TOKEN_ID, STOP_TOKEN_ID, 5)


def test_an_ignored_end_of_sequence_neither_ends_nor_is_forbidden() -> None:
    (request,) = _processor().process("R", "hi", SamplingParams(temperature=0, min_tokens=4, ignore_eos=True), 0.0)
    assert request.eos_token_ids == ()
    assert request.sampler.is_plain_greedy


def test_a_request_without_wishes_is_plain_greedy_at_temperature_zero() -> None:
    assert _sampler(SamplingParams(temperature=0.0)).is_plain_greedy
    assert _sampler(SamplingParams(temperature=1e-7)).is_plain_greedy
    assert not _sampler(SamplingParams(temperature=0.1)).is_plain_greedy


def test_every_wish_reaches_the_sampler() -> None:
    params = SamplingParams(
        temperature=0.7,
        top_k=-1,
        top_p=0.9,
        min_p=0.1,
        seed=5,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        logit_bias={3: 1.5},
        logprobs=2,
        prompt_logprobs=0,
        min_tokens=2,
        allowed_token_ids=[7, 7, 9],
    )
    assert _sampler(params) == SamplerSpec(
        seed=5,
        temperature=0.7,
        top_k=0,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=0.3,
        logit_bias=((3, 1.5),),
        num_logprobs=2,
        num_prompt_logprobs=0,
        min_tokens=2,
        forbidden_before_min_tokens=(EOS_TOKEN_ID,),
        allowed_token_ids=(7, 9),
    )


def test_dividing_by_the_smallest_penalty_keeps_logits_within_float32() -> None:
    smallest = _sampler(SamplingParams(repetition_penalty=5e-324)).repetition_penalty
    assert smallest > 0 and 1e6 / smallest < 3e38


class _WordTokenizer:
    """ "ab" is one token with or without a space before it; "cd" is one with, two without; "e" is never joined."""

    _TOKENS: dict[str, list[int]] = {  # noqa: RUF012
        "ab": [1],
        " ab": [2],
        "cd": [3, 4],
        " cd": [5],
        "e": [6],
        " e": [7, 6],
    }

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return self._TOKENS[text]

    def token_text(self, token_id: int) -> str:
        raise NotImplementedError

    def new_decode_stream(self, skip_special_tokens: bool, prompt_token_ids: list[int]) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("word", "expected"),
    [("ab", ((1,), (2,))), (" ab", ((1,), (2,))), ("cd", ((3, 4), (5,))), ("e", ((6,),))],
)
def test_a_bad_word_is_bad_at_the_start_of_a_text_and_after_a_space(
    word: str, expected: tuple[tuple[int, ...], ...]
) -> None:
    processor = InputProcessor(SPEC, _WordTokenizer(), MAX_MODEL_LEN, 0, GenerationDefaults())
    assert processor.process("R", [1], SamplingParams(bad_words=[word]), 0.0)[0].sampler.bad_words == expected


@pytest.mark.parametrize("number", [10**6, 2**64, 10**100])
def test_numbers_beyond_the_model_s_own_reach_the_sampler_as_the_model_s(number: int) -> None:
    params = SamplingParams(top_k=number, min_tokens=number, max_tokens=UpTo(number))
    (request,) = _processor().process("R", "hi", params, 0.0)
    assert (request.sampler.top_k, request.sampler.min_tokens) == (VOCAB_SIZE, MAX_MODEL_LEN)
    assert request.max_tokens == MAX_MODEL_LEN - len(request.prompt_token_ids)
    msgspec.msgpack.encode(request)


def test_a_request_without_parameters_gets_the_checkpoint_s_recommendation() -> None:
    processor = _processor(temperature=0.6, top_k=40, max_new_tokens=7)
    assert processor.default_params() == SamplingParams(temperature=0.6, top_k=40, max_tokens=7)
    (request,) = processor.process("R", "hi", None, 0.0)
    assert (request.sampler.temperature, request.sampler.top_k, request.max_tokens) == (0.6, 40, 7)
    assert _processor().default_params() == SamplingParams()
