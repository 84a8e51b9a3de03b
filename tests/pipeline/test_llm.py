"""The Python interface over two worker processes: every way of asking gives the tokens of the request alone, and who
stops listening leaves nothing behind.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from stageline import LLM, SamplingParams, StagelineError
from stageline.outputs import RequestOutput
from tests.tiny_models import TinyModel, load_reference, reference_greedy

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
PROMPTS = ["hello", "the sea", "a", "Zürich 日本"]
CONVERSATIONS = [
    [{"role": "user", "content": "hi"}],
    [{"role": "system", "content": "be brief"}, {"role": "user", "content": "who are you?"}],
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TinyModel().write(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(model, pipeline_parallel_size=2, dtype="float32", max_num_seqs=16) as two_stages:
        yield two_stages


@pytest.fixture(scope="module")
def expected(llm: LLM, model: Path) -> dict[str, list[int]]:
    """Greedy tokens by prompt."""
    reference = load_reference(model)
    return {p: reference_greedy(reference, llm.tokenizer.encode(p), 12) for p in PROMPTS}


def _tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


# ---- generate and chat ----


def test_texts_and_token_ids_alone_or_many_give_the_reference_s_tokens(
    llm: LLM, expected: dict[str, list[int]]
) -> None:
    every_way = [*expected.values()]
    as_ids = [llm.tokenizer.encode(prompt) for prompt in PROMPTS]
    assert _tokens(llm.generate(PROMPTS, GREEDY)) == every_way
    assert _tokens(llm.generate(as_ids, GREEDY)) == every_way
    assert _tokens(llm.generate([PROMPTS[0], as_ids[1], PROMPTS[2], as_ids[3]], GREEDY)) == every_way
    assert _tokens(llm.generate(PROMPTS[0], GREEDY)) == every_way[:1]
    assert _tokens(llm.generate(as_ids[0], GREEDY)) == every_way[:1]
    assert llm.generate([], GREEDY) == []


def test_an_output_says_what_was_asked_and_what_came(llm: LLM, expected: dict[str, list[int]]) -> None:
    text, ids = PROMPTS[1], llm.tokenizer.encode(PROMPTS[1])
    by_text, by_ids = llm.generate([text, ids], GREEDY)
    assert (by_text.prompt, by_ids.prompt) == (text, None)
    assert by_text.prompt_token_ids == by_ids.prompt_token_ids == ids
    assert by_text.request_id != by_ids.request_id
    (completion,) = by_text.outputs
    assert by_text.is_finished and completion.index == 0
    assert completion.text == llm.tokenizer.decode(ids + expected[text])[len(text) :]
    assert (completion.finish_reason, completion.stop_reason) == ("length", None)
    assert (by_text.prompt_logprobs, completion.logprobs, completion.cumulative_logprob) == (None, None, None)


def test_parameters_are_for_all_or_one_for_each(llm: LLM, expected: dict[str, list[int]]) -> None:
    each = [SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True) for length in (1, 3, 2, 5)]
    assert _tokens(llm.generate(PROMPTS, each)) == [
        tokens[:length] for tokens, length in zip(expected.values(), (1, 3, 2, 5), strict=True)
    ]
    assert len(llm.generate("hello")[0].outputs[0].token_ids) <= llm.default_sampling_params().max_tokens


def test_times_are_in_order_and_there_is_one_for_every_token(llm: LLM) -> None:
    start_s = llm.clock.now_s()
    (output,) = llm.generate("what takes time?", GREEDY)
    timings = output.outputs[0].timings
    times_s = [start_s, timings.arrival_s, timings.first_scheduled_s, *timings.token_times_s, llm.clock.now_s()]
    assert times_s == sorted(times_s)
    assert len(timings.token_times_s) == 12 and len(timings.inter_token_s) == 11
    assert (timings.first_token_s, timings.finished_s) == (timings.token_times_s[0], timings.token_times_s[-1])
    assert timings.tpot_s(12) == pytest.approx(sum(timings.inter_token_s) / 11)


def test_a_chat_is_its_template_s_tokens_completed(llm: LLM) -> None:
    ids = [llm.tokenizer.encode_chat(conversation) for conversation in CONVERSATIONS]
    answers = llm.chat(CONVERSATIONS, GREEDY)
    assert [answer.prompt_token_ids for answer in answers] == ids
    assert _tokens(answers) == _tokens(llm.generate(ids, GREEDY))
    (alone,) = llm.chat(CONVERSATIONS[0], GREEDY)
    assert alone.outputs[0].token_ids == answers[0].outputs[0].token_ids
    (bare,) = llm.chat(CONVERSATIONS[0], GREEDY, add_generation_prompt=False)
    assert bare.prompt_token_ids == llm.tokenizer.encode_chat(CONVERSATIONS[0], add_generation_prompt=False) != ids[0]


def test_completions_of_one_prompt_are_those_of_consecutive_seeds(llm: LLM) -> None:
    drawn = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True, seed=7)
    (together,) = llm.generate("hello", SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True, seed=7, n=4))
    alone = [
        llm.generate("hello", SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True, seed=7 + index))
        for index in range(4)
    ]
    assert [one.token_ids for one in together.outputs] == [output.outputs[0].token_ids for [output] in alone]
    assert [one.index for one in together.outputs] == [0, 1, 2, 3]
    assert len({tuple(one.token_ids) for one in together.outputs}) == 4
    assert llm.generate("hello", drawn)[0].outputs[0].token_ids == together.outputs[0].token_ids


def test_requests_without_a_seed_differ(llm: LLM) -> None:
    drawn = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    assert len({tuple(tokens) for tokens in _tokens(llm.generate(["hello"] * 5, drawn))}) == 5


def test_a_seed_gives_the_same_tokens_alone_in_a_crowd_and_at_any_depth(llm: LLM, model: Path) -> None:
    seeded = SamplingParams(temperature=0.8, top_p=0.9, top_k=50, seed=42, max_tokens=16, ignore_eos=True)
    crowd = [SamplingParams(temperature=1.0, seed=index, max_tokens=20, ignore_eos=True) for index in range(12)]
    [alone] = _tokens(llm.generate("hello", seeded))
    assert _tokens(llm.generate([*["sea"] * 12, "hello"], [*crowd, seeded]))[-1] == alone
    for num_stages in (1, 3):
        settings = {"dtype": "float32", "distributed_executor_backend": "in_process"}
        with LLM(model, pipeline_parallel_size=num_stages, **settings) as other:
            assert _tokens(other.generate(["hello", "sea"], [seeded, crowd[0]]))[0] == alone


# ---- streams ----


def test_a_stream_grows_piece_by_piece_into_what_generate_gives(llm: LLM) -> None:
    (whole,) = llm.generate(PROMPTS[1], GREEDY)
    outputs = list(llm.stream(PROMPTS[1], GREEDY))
    assert [len(output.outputs[0].token_ids) for output in outputs] == list(range(1, 13))
    assert [output.is_finished for output in outputs] == [False] * 11 + [True]
    for before, after in itertools.pairwise(outputs):
        assert after.outputs[0].text == before.outputs[0].text + after.outputs[0].new_text
    assert outputs[-1].outputs[0].token_ids == whole.outputs[0].token_ids
    assert outputs[-1].outputs[0].text == whole.outputs[0].text


def test_a_chat_s_stream_ends_with_the_chat_s_answer(llm: LLM) -> None:
    *_, last = llm.stream_chat(CONVERSATIONS[1], GREEDY)
    assert last.outputs[0].text == llm.chat(CONVERSATIONS[1], GREEDY)[0].outputs[0].text


def test_a_stream_of_several_completions_tells_them_apart(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=1, n=3, max_tokens=8, ignore_eos=True)
    texts = ["", "", ""]
    for output in llm.stream("hello", params):
        for completion in output.outputs:
            texts[completion.index] += completion.new_text
    assert texts == [completion.text for completion in output.outputs]
    assert texts == [completion.text for completion in llm.generate("hello", params)[0].outputs]


def test_streams_in_turn_and_generate_between_them_disturb_nobody(llm: LLM, expected: dict[str, list[int]]) -> None:
    """One stream runs the engine for the other, whose missed pieces are still new when it looks."""
    first, second = llm.stream(PROMPTS[1], GREEDY), llm.stream(PROMPTS[3], GREEDY)
    new_texts: dict[int, list[str]] = {0: [], 1: []}
    new_texts[0] += [next(first).outputs[0].new_text for _ in range(4)]
    new_texts[1].append(next(second).outputs[0].new_text)
    assert _tokens(llm.generate(PROMPTS[0], GREEDY)) == [expected[PROMPTS[0]]]
    last: dict[int, RequestOutput] = {}
    for index, stream in ((1, second), (0, first)):
        for output in stream:
            new_texts[index].append(output.outputs[0].new_text)
            last[index] = output
    for index, prompt in ((0, PROMPTS[1]), (1, PROMPTS[3])):
        assert last[index].outputs[0].token_ids == expected[prompt]
        assert "".join(new_texts[index]) == last[index].outputs[0].text
    assert list(first) == list(second) == []


def _num_tokens_computed(llm: LLM, prompt: str, num_output_tokens: int) -> int:
    """By the first stage, for everything that runs while a request without a cached beginning runs.

    A short request goes before it, so that no microbatch of earlier requests is in flight any more.
    """
    llm.generate("x", SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True))
    start_s = llm.clock.now_s()
    llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=num_output_tokens, ignore_eos=True))
    spans = llm.spans(start_s)
    return sum(span.num_tokens for span in spans if span.kind == "forward" and span.stage_index == 0)


LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)


@pytest.mark.parametrize("num_outputs_seen", [0, 1, 2, 7])
@pytest.mark.parametrize("way", ["closed", "left", "dropped"])
def test_a_stream_that_is_left_computes_nothing_more(llm: LLM, way: str, num_outputs_seen: int) -> None:
    """Also before its first output was asked for."""
    stream = llm.stream("never ending", LONG)
    for _ in range(num_outputs_seen):
        next(stream)
    if way == "closed":
        stream.close()
        stream.close()
        assert list(stream) == []
    elif way == "left":
        with pytest.raises(KeyError), stream:
            raise KeyError
        assert list(stream) == []
    del stream
    gc.collect()
    prompt = f"{way} {num_outputs_seen}"
    assert _num_tokens_computed(llm, prompt, 20) == len(prompt) + 19


def test_more_streams_than_run_at_once_can_be_closed_in_any_order(llm: LLM, expected: dict[str, list[int]]) -> None:
    streams = [llm.stream(f"stream {index}", LONG) for index in range(40)]
    next(streams[3])
    for stream in [*streams[::2], *streams[1::2]]:
        stream.close()
    assert _num_tokens_computed(llm, "all closed", 10) == len("all closed") + 9
    assert _tokens(llm.generate(PROMPTS, GREEDY)) == [*expected.values()]


def test_a_stop_string_ends_a_request_in_the_engine_too(llm: LLM) -> None:
    letters = {"temperature": 0.0, "ignore_eos": True, "allowed_token_ids": llm.tokenizer.encode("abcdefgh")}
    (plain,) = llm.generate("stop", SamplingParams(max_tokens=10, **letters))
    stop = plain.outputs[0].text[4]
    (stopped,) = llm.generate("stop", SamplingParams(max_tokens=400, stop=stop, **letters))
    assert stopped.outputs[0].text == plain.outputs[0].text[: plain.outputs[0].text.index(stop)]
    assert _num_tokens_computed(llm, "after stop", 10) == len("after stop") + 9


# ---- what the stages record ----


def test_no_stage_waits_for_a_microbatch_before_it_was_announced(llm: LLM) -> None:
    """Before that it is idle: one request alone leaves each stage without work while the other computes."""
    start_s = llm.clock.now_s()
    llm.generate("one at a time", GREEDY)
    llm.generate("and another", GREEDY)
    spans = llm.spans(start_s)
    announced_s = {span.microbatch: span.start_s for span in spans if span.kind == "schedule"}
    waits = [span for span in spans if span.kind == "receive_wait"]
    assert {span.stage_index for span in waits} == {0, 1}
    assert {span.microbatch for span in waits} == set(announced_s)
    for span in waits:
        assert announced_s[span.microbatch] <= span.start_s <= span.end_s


def test_a_closed_engine_says_so(model: Path) -> None:
    llm = LLM(model, distributed_executor_backend="in_process")
    stream = llm.stream("hello", GREEDY)
    next(stream)
    llm.close()
    llm.close()
    for ask in (lambda: llm.generate("hello"), lambda: next(stream)):
        with pytest.raises(StagelineError, match="the engine was closed"):
            ask()
