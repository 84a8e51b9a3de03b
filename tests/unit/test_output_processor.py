"""What a user reads is what the engine's tokens say, cut where it was asked to be cut, in whole characters."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stageline.engine.output_processor import OutputProcessor, ProcessedOutputs
from stageline.errors import InternalError, RequestError
from stageline.outputs import CompletionOutput, OutputKind, RequestOutput
from stageline.request import EngineRequest, RequestFailure, RequestUpdate
from stageline.sampling import SamplerSpec, SamplingParams, TokenLogprobs
from tests.unit.byte_tokenizer import EOS_TOKEN_ID, STOP_TOKEN, STOP_TOKEN_ID, byte_tokenizer

TOKENIZER = byte_tokenizer()
PROMPT_TOKEN_IDS = TOKENIZER.encode("say: ")


@dataclass
class _Clock:
    time_s: float = 50.0

    def now_s(self) -> float:
        return self.time_s


def _engine_request(request_id: str) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=PROMPT_TOKEN_IDS,
        sampler=SamplerSpec(seed=1),
        max_tokens=100,
        eos_token_ids=(EOS_TOKEN_ID,),
        stop_token_ids=(STOP_TOKEN_ID,),
        arrival_s=1.0,
    )


def _update(token_ids: list[int], finish_reason: Any = None, request_id: str = "R", **others: Any) -> RequestUpdate:
    values: dict[str, Any] = {
        "logprobs": [],
        "prompt_logprobs": [],
        "stop_reason": None,
        "time_s": 4.0,
        "first_scheduled_s": 2.0,
        "first_token_s": 3.0,
        "finished_s": None if finish_reason is None else 9.0,
        "num_cached_tokens": 0,
        "num_preemptions": 0,
    }
    return RequestUpdate(
        request_id=request_id, token_ids=token_ids, finish_reason=finish_reason, **{**values, **others}
    )


def _started(params: SamplingParams, **others: Any) -> OutputProcessor:
    processor = OutputProcessor(TOKENIZER, _Clock())
    names = ["R"] if params.n == 1 else [f"R-{index}" for index in range(params.n)]
    requests = [_engine_request(name) for name in names]
    processor.add("R", "say: ", PROMPT_TOKEN_IDS, params, requests, **others)
    return processor


def _only(processed: ProcessedOutputs) -> CompletionOutput:
    (output,) = processed.outputs
    (completion,) = output.outputs
    return completion


def _stream(
    processor: OutputProcessor, text: str, sizes: list[int], end: RequestUpdate
) -> tuple[list[CompletionOutput], list[str]]:
    """Send the text's tokens in updates of these sizes, then the end, until the completion is finished."""
    token_ids = TOKENIZER.encode(text)
    updates, start = [], 0
    for size in sizes:
        updates.append(_update(token_ids[start : start + size]))
        start += size
    completions: list[CompletionOutput] = []
    finished_early: list[str] = []
    for update in [*updates, _update(token_ids[start:]), end]:
        processed = processor.process([update])
        finished_early += processed.finished_early
        completions += [output.outputs[0] for output in processed.outputs]
    return completions, finished_early


@given(text=st.text(max_size=20), sizes=st.lists(st.integers(0, 5), max_size=10))
def test_pieces_make_up_the_text_in_whole_characters(text: str, sizes: list[int]) -> None:
    completions, _ = _stream(_started(SamplingParams()), text, sizes, _update([EOS_TOKEN_ID], "stop"))
    assert completions[-1].text == text
    assert "".join(completion.new_text for completion in completions) == text
    for completion in completions:
        assert text.startswith(completion.text)


def test_an_emoji_over_four_tokens_appears_at_once() -> None:
    processor = _started(SamplingParams())
    ids = TOKENIZER.encode("a😀b")
    assert len(ids) == 6
    texts = [_only(processor.process([_update([token_id])])).text for token_id in ids]
    assert texts == ["a", "a", "a", "a", "a😀", "a😀b"]


@given(
    text=st.text("ab😀", max_size=15),
    stops=st.lists(st.text("ab😀", min_size=1, max_size=3), min_size=1, max_size=3),
    sizes=st.lists(st.integers(0, 5), max_size=10),
    is_included=st.booleans(),
)
def test_a_stop_string_cuts_the_text_wherever_tokens_and_updates_end(
    text: str, stops: list[str], sizes: list[int], is_included: bool
) -> None:
    params = SamplingParams(stop=stops, include_stop_str_in_output=is_included)
    completions, finished_early = _stream(_started(params), text, sizes, _update([EOS_TOKEN_ID], "stop"))
    last = completions[-1]
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    assert last.finish_reason == "stop"
    if not ends:
        assert (last.text, last.stop_reason, finished_early) == (text, None, [])
        return
    end, _, stop = min(ends)
    assert last.text == text[: end if is_included else end - len(stop)]
    assert last.stop_reason == stop
    assert last.token_ids == TOKENIZER.encode(text[:end])
    assert finished_early == ["R"]
    for completion in completions:
        assert last.text.startswith(completion.text), "text was shown and taken back"


def test_what_may_begin_a_stop_string_is_held_back_and_given_out_at_the_end() -> None:
    processor = _started(SamplingParams(stop=["END"]))
    assert _only(processor.process([_update(TOKENIZER.encode("xEN"))])).text == "x"
    assert _only(processor.process([_update([], "length")])).text == "xEN"


def test_a_stop_string_in_the_engine_s_last_update_needs_no_abort() -> None:
    processor = _started(SamplingParams(stop=["END"]))
    processed = processor.process([_update(TOKENIZER.encode("xEND"), "length")])
    completion = _only(processed)
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("x", "stop", "END")
    assert processed.finished_early == []


def test_news_after_a_stop_string_is_ignored() -> None:
    processor = _started(SamplingParams(stop=["END"]))
    processed = processor.process([_update(TOKENIZER.encode("xEND")), _update(TOKENIZER.encode("y"), "length")])
    assert processed.outputs[0].is_finished
    assert _only(processed).text == "x"
    assert processor.process([_update(TOKENIZER.encode("y"), "length")]) == ProcessedOutputs([], [])
    assert not processor.has_unfinished


def test_a_completion_ended_by_a_stop_string_is_timed_by_the_clock() -> None:
    processor = _started(SamplingParams(stop=["END"]))
    completion = _only(processor.process([_update(TOKENIZER.encode("xEND"), num_cached_tokens=4, num_preemptions=1)]))
    assert completion.timings.finished_s == 50.0
    assert completion.timings.ttft_s == 2.0
    assert (completion.timings.num_cached_tokens, completion.timings.num_preemptions) == (4, 1)


@pytest.mark.parametrize(("min_tokens", "expected"), [(0, "a"), (1, "a"), (2, "a.b"), (3, "a.b"), (4, "a.b.c")])
def test_a_stop_string_counts_only_after_min_tokens_tokens(min_tokens: int, expected: str) -> None:
    processor = _started(SamplingParams(stop=["."], min_tokens=min_tokens))
    completions, _ = _stream(processor, "a.b.c", [1] * 5, _update([], "length"))
    assert completions[-1].text == expected


@pytest.mark.parametrize(
    ("is_included", "token_id", "text"),
    [
        (False, STOP_TOKEN_ID, "x"),
        (True, STOP_TOKEN_ID, "x" + STOP_TOKEN),
        (False, EOS_TOKEN_ID, "x"),
        (True, EOS_TOKEN_ID, "x"),
    ],
)
def test_a_stop_token_s_text_is_left_out_unless_asked_for(is_included: bool, token_id: int, text: str) -> None:
    processor = _started(SamplingParams(include_stop_str_in_output=is_included))
    stop_reason = token_id if token_id == STOP_TOKEN_ID else None
    token_ids = [*TOKENIZER.encode("x"), token_id]
    completion = _only(processor.process([_update(token_ids, "stop", stop_reason=stop_reason)]))
    assert (completion.text, completion.token_ids, completion.stop_reason) == (text, token_ids, stop_reason)


def test_a_token_that_could_stop_is_text_when_it_did_not() -> None:
    completion = _only(_started(SamplingParams()).process([_update([STOP_TOKEN_ID], "length")]))
    assert completion.text == STOP_TOKEN


def test_half_a_character_at_the_end_is_marked_not_dropped() -> None:
    completion = _only(_started(SamplingParams()).process([_update(TOKENIZER.encode("😀")[:2], "length")]))
    assert completion.text.strip("\ufffd") == ""
    assert completion.text


def test_special_tokens_are_shown_when_asked_for() -> None:
    processor = _started(SamplingParams(skip_special_tokens=False))
    assert _only(processor.process([_update([EOS_TOKEN_ID], "length")])).text == "<|eos|>"


def test_logprobs_are_by_token_and_sum_up() -> None:
    a, b, c = (TOKENIZER.encode(letter)[0] for letter in "abc")
    described = [
        TokenLogprobs([a, a, b], [math.log(0.5), math.log(0.5), math.log(0.3)], 1),
        TokenLogprobs([c, b, a], [math.log(0.1), math.log(0.4), math.log(0.2)], 5),
    ]
    processor = _started(SamplingParams(logprobs=2))
    completion = _only(processor.process([_update([a, c], "length", logprobs=described)]))
    assert completion.logprobs is not None
    assert completion.cumulative_logprob == pytest.approx(math.log(0.05))
    first, second = completion.logprobs
    assert [(t, one.rank, one.decoded_token) for t, one in first.items()] == [(a, 1, "a"), (b, 2, "b")]
    assert [(t, one.rank, one.decoded_token) for t, one in second.items()] == [(c, 5, "c"), (b, 1, "b"), (a, 2, "a")]
    assert second[b].logprob == math.log(0.4)


def test_no_logprobs_unless_asked_for() -> None:
    completion = _only(_started(SamplingParams()).process([_update([1], "length")]))
    assert completion.logprobs is None
    assert completion.cumulative_logprob is None


def test_tokens_after_a_stop_string_leave_no_logprobs() -> None:
    ids = TOKENIZER.encode("x.y")
    described = [TokenLogprobs([token_id], [-1.0], 1) for token_id in ids]
    completion = _only(_started(SamplingParams(logprobs=0, stop=".")).process([_update(ids, logprobs=described)]))
    assert completion.token_ids == ids[:2]
    assert completion.logprobs is not None
    assert len(completion.logprobs) == 2
    assert completion.cumulative_logprob == -2.0


def test_prompt_logprobs_come_one_per_prompt_token_the_first_unknown() -> None:
    processor = _started(SamplingParams(prompt_logprobs=0))
    runs = [TokenLogprobs([token_id], [-0.5], 1) for token_id in PROMPT_TOKEN_IDS[1:]]
    processor.process([_update([], prompt_logprobs=runs[:2])])
    (output,) = processor.process([_update([1], "length", prompt_logprobs=runs[2:])]).outputs
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert [list(known) for known in output.prompt_logprobs[1:] if known] == [[t] for t in PROMPT_TOKEN_IDS[1:]]


def test_completions_of_one_prompt_come_together_and_it_ends_with_the_last() -> None:
    processor = _started(SamplingParams(n=2, stop=["."]))
    a, dot = TOKENIZER.encode("a.")
    first = processor.process([_update([a], request_id="R-0"), _update([a, dot], request_id="R-1")])
    assert first.finished_early == ["R-1"]
    (output,) = first.outputs
    assert [(c.index, c.text, c.finish_reason) for c in output.outputs] == [(0, "a", None), (1, "a", "stop")]
    assert not output.is_finished
    (output,) = processor.process([_update([a], "length", request_id="R-0")]).outputs
    assert [(c.text, c.finish_reason) for c in output.outputs] == [("aa", "length"), ("a", "stop")]
    assert output.is_finished
    assert not processor.has_unfinished


def test_a_request_that_is_not_streamed_answers_once() -> None:
    processor = _started(SamplingParams(n=2), kind=OutputKind.FINAL_ONLY)
    outputs: list[RequestOutput] = []
    for name in ("R-0", "R-1"):
        outputs += processor.process([_update([1], request_id=name)]).outputs
        outputs += processor.process([_update([2], "length", request_id=name)]).outputs
    (output,) = outputs
    assert [completion.token_ids for completion in output.outputs] == [[1, 2], [1, 2]]
    assert all(completion.new_text == completion.text for completion in output.outputs)


def test_every_token_has_the_time_at_which_the_engine_had_it() -> None:
    processor = _started(SamplingParams(stop=["END"]))
    processor.process([_update(TOKENIZER.encode("xE"), time_s=4.0)])
    processor.process([_update(TOKENIZER.encode("N"), time_s=5.5)])
    completion = _only(processor.process([_update(TOKENIZER.encode("Dz"), time_s=7.5)]))
    assert completion.text == "x"
    assert list(completion.timings.token_times_s) == [4.0, 4.0, 5.5, 7.5]
    assert completion.timings.inter_token_s == [0.0, 1.5, 2.0]


@settings(deadline=None)
@given(
    token_ids=st.lists(st.sampled_from([*TOKENIZER.encode("a é😀"), 200, EOS_TOKEN_ID]), max_size=30),
    sizes=st.lists(st.integers(0, 5), max_size=10),
    finish_reason=st.sampled_from(["stop", "length"]),
    is_included=st.booleans(),
)
def test_text_that_is_decoded_at_the_end_is_the_text_that_was_streamed(
    token_ids: list[int], sizes: list[int], finish_reason: str, is_included: bool
) -> None:
    texts = []
    for kind in OutputKind.CUMULATIVE, OutputKind.FINAL_ONLY:
        processor = _started(SamplingParams(include_stop_str_in_output=is_included), kind=kind)
        start = 0
        for size in sizes:
            processor.process([_update(token_ids[start : start + size])])
            start += size
        texts.append(_only(processor.process([_update(token_ids[start:], finish_reason)])).text)
    assert texts[0] == texts[1]


def test_an_aborted_request_names_what_still_runs_and_is_forgotten() -> None:
    processor = _started(SamplingParams(n=2))
    processor.process([_update([1], "length", request_id="R-0")])
    assert processor.abort("R") == ["R-1"]
    assert processor.abort("R") == []
    assert processor.process([_update([1], request_id="R-1")]) == ProcessedOutputs([], [])
    assert not processor.has_unfinished


def test_outputs_given_before_do_not_change() -> None:
    processor = _started(SamplingParams(logprobs=0))
    described = [TokenLogprobs([1], [-1.0], 1)]
    before = _only(processor.process([_update([1], logprobs=described)]))
    processor.process([_update([1], logprobs=described)])
    assert before.token_ids == [1]
    assert before.logprobs is not None
    assert len(before.logprobs) == 1


@given(
    text=st.text("ab😀.", max_size=15),
    sizes=st.lists(st.integers(0, 5), max_size=10),
    reads=st.lists(st.booleans(), max_size=11),
)
def test_deltas_put_together_are_the_whole_however_late_they_are_read(
    text: str, sizes: list[int], reads: list[bool]
) -> None:
    """Read late from the processor, or merged afterwards: nothing is missing and nothing comes twice."""
    params = SamplingParams(logprobs=0, stop=["."])
    cumulative, delta = _started(params), _started(params, kind=OutputKind.DELTA)
    whole: RequestOutput | None = None
    pieces: list[RequestOutput] = []
    token_ids, start = [*TOKENIZER.encode(text), EOS_TOKEN_ID], 0
    for step, size in enumerate([*sizes, len(token_ids)]):
        new = token_ids[start : start + size]
        start += size
        described = [TokenLogprobs([token_id], [-1.0], 1) for token_id in new]
        update = _update(new, "stop" if step == len(sizes) else None, logprobs=described, time_s=float(step))
        for output in cumulative.process([update]).outputs:
            whole = output
        changes = delta.take([update])
        if changes.request_ids and (reads[step : step + 1] == [True] or not delta.has_unfinished):
            pieces.append(delta.output("R"))
    assert whole is not None and whole.is_finished and pieces[-1].is_finished
    assert not any(piece.is_finished for piece in pieces[:-1])
    merged = pieces[0]
    for piece in pieces[1:]:
        merged = piece.after(merged)
    [expected], [found] = whole.outputs, merged.outputs
    assert "".join(piece.outputs[0].text for piece in pieces) == found.text == found.new_text == expected.text
    assert (found.token_ids, found.logprobs) == (expected.token_ids, expected.logprobs)
    assert (found.finish_reason, found.stop_reason) == (expected.finish_reason, expected.stop_reason)
    assert found.cumulative_logprob == expected.cumulative_logprob
    assert tuple(found.timings.token_times_s) == tuple(expected.timings.token_times_s)


def test_a_delta_has_only_the_completions_that_there_is_news_of() -> None:
    processor = _started(SamplingParams(n=3), kind=OutputKind.DELTA)
    (first,) = processor.process([_update([1], request_id="R-0"), _update([1], request_id="R-2")]).outputs
    (second,) = processor.process([_update([2], request_id="R-1"), _update([], "length", request_id="R-2")]).outputs
    assert [(one.index, one.token_ids) for one in first.outputs] == [(0, [1]), (2, [1])]
    assert [(one.index, one.token_ids) for one in second.outputs] == [(1, [2]), (2, [])]
    assert [(one.index, one.token_ids) for one in second.after(first).outputs] == [(0, [1]), (1, [2]), (2, [1])]
    assert second.outputs[1].finish_reason == "length"


def test_a_completion_that_is_ahead_of_the_prompts_description_waits_for_it() -> None:
    processor = _started(SamplingParams(n=2, prompt_logprobs=0), kind=OutputKind.DELTA)
    runs = [TokenLogprobs([token_id], [-0.5], 1) for token_id in PROMPT_TOKEN_IDS[1:]]
    assert processor.process([_update([1], request_id="R-1")]).outputs == []
    assert processor.process([_update([], request_id="R-0", prompt_logprobs=runs[:2])]).outputs == []
    assert processor.process([_update([2], request_id="R-1")]).outputs == []
    (output,) = processor.process([_update([3], request_id="R-0", prompt_logprobs=runs[2:])]).outputs
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(PROMPT_TOKEN_IDS)
    assert [completion.token_ids for completion in output.outputs] == [[3], [1, 2]]


def test_prompt_logprobs_of_deltas_follow_one_another() -> None:
    processor = _started(SamplingParams(prompt_logprobs=0), kind=OutputKind.DELTA)
    runs = [TokenLogprobs([token_id], [-0.5], 1) for token_id in PROMPT_TOKEN_IDS[1:]]
    (first,) = processor.process([_update([], prompt_logprobs=runs[:2])]).outputs
    (second,) = processor.process([_update([1], "length", prompt_logprobs=runs[2:])]).outputs
    assert first.prompt_logprobs is not None and second.prompt_logprobs is not None
    assert (len(first.prompt_logprobs), len(second.prompt_logprobs)) == (3, len(PROMPT_TOKEN_IDS) - 3)
    merged = second.after(first).prompt_logprobs
    assert merged == first.prompt_logprobs + second.prompt_logprobs
    assert merged[0] is None


@pytest.mark.parametrize(("field", "kind"), [("structured_outputs.regex", RequestError), ("", InternalError)])
def test_a_completion_that_fails_takes_its_request_along_and_tells_nothing_of_it_but_the_error(
    field: str, kind: type[Exception]
) -> None:
    processor = _started(SamplingParams(n=3))
    failed = _update([2], "error", "R-1", failure=RequestFailure("too much", field))
    updates = [_update([1], "length", "R-0"), _update([1], None, "R-2"), failed, _update([1], "length", "R-2")]
    processed = processor.process(updates)
    assert processed.outputs == [] and processed.finished_early == []
    [(request_id, failure)] = processed.failures.items()
    assert request_id == "R" and failure.unfinished == ["R-2"]
    assert isinstance(failure.error, kind) and str(failure.error) == "too much"
    assert not processor.has_unfinished and processor.process(updates) == ProcessedOutputs([], [])
