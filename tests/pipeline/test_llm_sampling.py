"""What sampling parameters promise, through two stages, against rules on the logits of `transformers`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from stageline import LLM, SamplingParams
from stageline.outputs import CompletionOutput, Logprob
from tests.tiny_models import EOS_TOKEN_ID, SPECIAL_TOKENS, TinyModel, load_reference, reference_logits

MAX_MODEL_LEN = 128
PROMPT = "the sea is"
LONG_PROMPT = "a long prompt, " * 5
ELEVEN_BLOCKS = "90112"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TinyModel().write(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def reference(model: Path) -> Any:
    return load_reference(model)


def _start(model: Path, **settings: Any) -> LLM:
    shared = {"dtype": "float32", "distributed_executor_backend": "in_process", "max_model_len": MAX_MODEL_LEN}
    return LLM(model, pipeline_parallel_size=2, **{**shared, **settings})


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with _start(model) as two_stages:
        yield two_stages


def _letters(llm: LLM) -> list[int]:
    """Tokens that are text by themselves."""
    return llm.tokenizer.encode("abcdefghijklmnop")


def _complete(llm: LLM, **params: Any) -> CompletionOutput:
    shared = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True}
    (output,) = llm.generate(PROMPT, SamplingParams(**{**shared, **params}))
    return output.outputs[0]


Rule = Callable[[torch.Tensor, list[int]], None]


def _expected(llm: LLM, reference: Any, rule: Rule, num_tokens: int = 16) -> list[int]:
    """Greedy tokens when `rule` changes each step's logits [vocab], knowing the output so far."""
    prompt = llm.tokenizer.encode(PROMPT)
    output: list[int] = []
    for _ in range(num_tokens):
        logits = reference_logits(reference, prompt + output)[-1].clone()
        rule(logits, output)
        output.append(int(logits.argmax()))
    return output


# ---- how a completion ends ----


@pytest.mark.parametrize("is_included", [False, True])
def test_a_stop_string_ends_the_text_before_or_after_it(llm: LLM, is_included: bool) -> None:
    letters = _letters(llm)
    text = _complete(llm, allowed_token_ids=letters).text
    stop = text[5:7]
    end = text.index(stop) + 2
    stopped = _complete(
        llm, allowed_token_ids=letters, stop=["never", stop], include_stop_str_in_output=is_included
    )
    assert stopped.text == text[: end if is_included else end - 2]
    assert (stopped.finish_reason, stopped.stop_reason, len(stopped.token_ids)) == ("stop", stop, end)


@pytest.mark.parametrize("is_included", [False, True])
def test_a_stop_token_is_the_last_token_and_its_text_only_if_asked_for(llm: LLM, is_included: bool) -> None:
    letters = _letters(llm)
    plain = _complete(llm, allowed_token_ids=letters)
    stop = plain.token_ids[6]
    end = plain.token_ids.index(stop) + 1
    stopped = _complete(
        llm, allowed_token_ids=letters, stop_token_ids=[stop], include_stop_str_in_output=is_included
    )
    assert stopped.token_ids == plain.token_ids[:end]
    assert stopped.text == plain.text[: end if is_included else end - 1]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)


def test_end_of_sequence_ends_a_completion_unless_it_is_ignored(llm: LLM) -> None:
    likely_end = {"logit_bias": {EOS_TOKEN_ID: 100.0}}
    ended = _complete(llm, ignore_eos=False, **likely_end)
    assert (ended.token_ids, ended.text, ended.finish_reason, ended.stop_reason) == ([EOS_TOKEN_ID], "", "stop", None)
    ignored = _complete(llm, max_tokens=5, **likely_end)
    assert (ignored.token_ids, ignored.finish_reason) == ([EOS_TOKEN_ID] * 5, "length")
    assert ignored.text == ""


@pytest.mark.parametrize("min_tokens", [0, 1, 4])
def test_nothing_ends_a_completion_before_min_tokens(llm: LLM, min_tokens: int) -> None:
    """Neither end-of-sequence nor a stop token; both then are the likeliest."""
    stop = _letters(llm)[0]
    for ending in ({EOS_TOKEN_ID: 100.0}, {stop: 100.0}):
        ended = _complete(llm, ignore_eos=False, logit_bias=ending, stop_token_ids=[stop], min_tokens=min_tokens)
        assert ended.token_ids[-1:] == list(ending)
        assert len(ended.token_ids) == min_tokens + 1
        assert not {EOS_TOKEN_ID, stop} & set(ended.token_ids[:-1])


def test_without_max_tokens_a_completion_goes_on_to_the_model_s_length(llm: LLM) -> None:
    completion = _complete(llm, max_tokens=None)
    assert len(completion.token_ids) + len(PROMPT) == MAX_MODEL_LEN
    assert completion.finish_reason == "length"


def test_special_tokens_are_text_only_if_asked_for(llm: LLM) -> None:
    special = llm.tokenizer.encode(SPECIAL_TOKENS[2])
    assert _complete(llm, allowed_token_ids=special, max_tokens=3).text == ""
    shown = _complete(llm, allowed_token_ids=special, max_tokens=3, skip_special_tokens=False)
    assert shown.text == SPECIAL_TOKENS[2] * 3


# ---- which tokens are chosen ----


def test_only_allowed_tokens_are_chosen(llm: LLM, reference: Any) -> None:
    letters = _letters(llm)

    def allow(logits: torch.Tensor, output: list[int]) -> None:
        kept = logits[letters].clone()
        logits.fill_(-torch.inf)
        logits[letters] = kept

    assert _complete(llm, allowed_token_ids=letters).token_ids == _expected(llm, reference, allow)


def test_bad_words_do_not_occur(llm: LLM, reference: Any) -> None:
    letters = _letters(llm)
    text = _complete(llm, allowed_token_ids=letters).text
    words = [text[:3], text[1:3], text[6]]
    sequences = [llm.tokenizer.encode(word) for word in words]

    def forbid(logits: torch.Tensor, output: list[int]) -> None:
        kept = logits[letters].clone()
        logits.fill_(-torch.inf)
        logits[letters] = kept
        for *before, last in sequences:
            if output[len(output) - len(before) :] == before:
                logits[last] = -torch.inf

    completion = _complete(llm, allowed_token_ids=letters, bad_words=words)
    assert not any(word in completion.text for word in words)
    assert completion.token_ids == _expected(llm, reference, forbid)


def test_a_bias_is_added_to_the_logits(llm: LLM, reference: Any) -> None:
    def add(logits: torch.Tensor, output: list[int]) -> None:
        logits[10] += 1.5
        logits[20] -= 50.0
        logits[30] += 2.5

    biased = _complete(llm, logit_bias={10: 1.5, 20: -50.0, 30: 2.5}).token_ids
    assert biased == _expected(llm, reference, add) != _complete(llm).token_ids


@pytest.mark.parametrize(
    "penalties",
    [
        {"repetition_penalty": 1.7},
        {"repetition_penalty": 0.6},
        {"presence_penalty": 2.0},
        {"frequency_penalty": 1.5},
        {"frequency_penalty": -1.5},
        {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.7},
    ],
    ids=str,
)
def test_penalties_are_those_of_the_definition(llm: LLM, reference: Any, penalties: dict[str, float]) -> None:
    prompt = llm.tokenizer.encode(PROMPT)

    def penalise(logits: torch.Tensor, output: list[int]) -> None:
        for token_id in set(prompt + output):
            factor = penalties.get("repetition_penalty", 1.0)
            logits[token_id] = logits[token_id] / factor if logits[token_id] > 0 else logits[token_id] * factor
        for token_id in set(output):
            logits[token_id] -= penalties.get("presence_penalty", 0.0)
            logits[token_id] -= penalties.get("frequency_penalty", 0.0) * output.count(token_id)

    assert _complete(llm, max_tokens=32, **penalties).token_ids == _expected(llm, reference, penalise, 32)


# ---- log-probabilities ----


def _check(known: dict[int, Logprob], logits: torch.Tensor, token_id: int, num_likeliest: int) -> None:
    """One position against the reference's logits [vocab]."""
    wanted = torch.log_softmax(logits.double(), -1)
    likeliest = wanted.argsort(descending=True)[:num_likeliest].tolist()
    assert list(known) == list(dict.fromkeys([token_id, *likeliest]))
    for found_id, found in known.items():
        assert found.logprob == pytest.approx(float(wanted[found_id]), abs=2e-4)
        assert found.rank == 1 + int((wanted > wanted[found_id]).sum())


def test_logprobs_are_the_reference_s_log_softmax_whatever_the_rules(llm: LLM, reference: Any) -> None:
    completion = _complete(llm, logprobs=3, temperature=1.3, seed=3, allowed_token_ids=_letters(llm))
    prompt = llm.tokenizer.encode(PROMPT)
    logits = reference_logits(reference, prompt + completion.token_ids)
    assert completion.logprobs is not None and len(completion.logprobs) == 16
    for place, (token_id, known) in enumerate(zip(completion.token_ids, completion.logprobs, strict=True)):
        _check(known, logits[len(prompt) + place - 1], token_id, 3)
        assert known[token_id].decoded_token == llm.tokenizer.token_text(token_id)
    places = zip(completion.token_ids, completion.logprobs, strict=True)
    assert completion.cumulative_logprob == pytest.approx(sum(known[token_id].logprob for token_id, known in places))


def _check_prompt(llm: LLM, reference: Any, prompt: str, logprobs: list[dict[int, Logprob] | None] | None) -> None:
    token_ids = llm.tokenizer.encode(prompt)
    logits = reference_logits(reference, token_ids)
    assert logprobs is not None and len(logprobs) == len(token_ids)
    assert logprobs[0] is None
    for place, known in enumerate(logprobs[1:], start=1):
        assert known is not None
        _check(known, logits[place - 1], token_ids[place], 2)


@pytest.mark.parametrize(
    "settings",
    [{}, {"prefill_chunk": "7"}, {"max_num_batched_tokens": 5}, {"enable_prefix_caching": False}],
    ids=str,
)
def test_prompt_logprobs_are_the_reference_s_however_the_prompt_was_computed(
    model: Path, reference: Any, settings: dict[str, Any]
) -> None:
    """Chunked or whole; also when all of it is in the prefix cache; beside requests that ask for none."""
    asking = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, prompt_logprobs=2)
    silent = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    with _start(model, **settings) as llm:
        llm.generate(LONG_PROMPT, silent)
        outputs = llm.generate([LONG_PROMPT, PROMPT, LONG_PROMPT + "x", "a"], [asking, silent, asking, asking])
        again = llm.generate(LONG_PROMPT, silent)
    _check_prompt(llm, reference, LONG_PROMPT, outputs[0].prompt_logprobs)
    _check_prompt(llm, reference, LONG_PROMPT + "x", outputs[2].prompt_logprobs)
    assert outputs[1].prompt_logprobs is None
    assert outputs[3].prompt_logprobs == [None]
    assert again[0].outputs[0].token_ids == outputs[0].outputs[0].token_ids
    assert (again[0].outputs[0].timings.num_cached_tokens > 0) == settings.get("enable_prefix_caching", True)


def test_prompt_logprobs_come_once_also_when_memory_forced_the_request_out(model: Path, reference: Any) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True, prompt_logprobs=2, logprobs=1)
    prompts = [f"{index} {LONG_PROMPT}"[:40] for index in range(4)]
    with _start(model, kv_cache_memory=ELEVEN_BLOCKS, prefill_chunk="16") as llm:
        outputs = llm.generate(prompts, params)
    assert any(output.outputs[0].timings.num_preemptions > 0 for output in outputs)
    for prompt, output in zip(prompts, outputs, strict=True):
        _check_prompt(llm, reference, prompt, output.prompt_logprobs)
        (completion,) = output.outputs
        assert completion.logprobs is not None
        assert len(completion.logprobs) == len(completion.token_ids) == 50


def test_completions_share_one_description_of_the_prompt(llm: LLM, reference: Any) -> None:
    params = SamplingParams(temperature=1.0, seed=1, n=3, max_tokens=4, prompt_logprobs=2, ignore_eos=True)
    *_, streamed = llm.stream(PROMPT, params)
    (whole,) = llm.generate(PROMPT, params)
    for output in (streamed, whole):
        _check_prompt(llm, reference, PROMPT, output.prompt_logprobs)
