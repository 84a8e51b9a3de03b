"""Structured output through real pipelines: answers are what was asked for at every depth; others are untouched."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import msgspec
import pytest

from stageline import LLM, SamplingParams, StructuredOutputs
from stageline.engine.core import EngineCore
from stageline.errors import RequestError
from stageline.outputs import RequestOutput
from tests.pipeline.failing import SETTINGS
from tests.tiny_models import TinyModel

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
COMPACT_SCHEMA = StructuredOutputs(json=SCHEMA, disable_any_whitespace=True)
PHONE = StructuredOutputs(regex="[0-9]{3}-[0-9]{4}")
CHOICE = StructuredOutputs(choice=["yes", "no", "perhaps"])
SUM = StructuredOutputs(grammar='start: NUM ("+" NUM)+ "="\nNUM: /[0-9]{1,2}/')

# No first token can tell that this is too much.
TOO_MUCH_LATER = StructuredOutputs(
    json={
        "type": "object",
        "properties": {
            "kind": {"enum": ["a", "b"]},
            "inner": {"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(600)}},
        },
        "required": ["kind", "inner"],
    },
    disable_any_whitespace=True,
)


def greedy(structure: StructuredOutputs | None, max_tokens: int = 100, **fields: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, structured_outputs=structure, **fields)


def check(structure: StructuredOutputs | None, text: str) -> None:
    if structure is COMPACT_SCHEMA:
        jsonschema.validate(json.loads(text), SCHEMA)
    elif structure is PHONE:
        assert re.fullmatch(r"\d{3}-\d{4}", text)
    elif structure is CHOICE:
        assert text in ("yes", "no", "perhaps")
    elif structure is SUM:
        assert re.fullmatch(r"\d{1,2}(\+\d{1,2})+=", text)


PROMPTS = ["A person as JSON:", "My number is", "Is the sky blue?", "One and one is", "Once upon a time", "Numbers:"]
STRUCTURES = [COMPACT_SCHEMA, PHONE, CHOICE, None, None, SUM]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TinyModel().write(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module", params=["in_process", "multi_process"])
def llm(tiny: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    num_stages = 1 if request.param == "in_process" else 2
    with LLM(
        str(tiny), pipeline_parallel_size=num_stages, distributed_executor_backend=request.param, **SETTINGS
    ) as opened:
        yield opened


def generate(llm: LLM, prompts: list[str], params: list[SamplingParams]) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_answers_of_a_real_model_keep_to_their_structure_and_do_not_depend_on_the_depth(smollm2_gguf: Path) -> None:
    params = [greedy(structure, 60 if structure else 16) for structure in STRUCTURES]
    found = []
    for num_stages, backend in ((1, "in_process"), (2, "multi_process"), (3, "multi_process")):
        with LLM(
            str(smollm2_gguf),
            pipeline_parallel_size=num_stages,
            distributed_executor_backend=backend,
            max_model_len=256,
            bind_cores=False,
        ) as llm:
            outputs = generate(llm, PROMPTS, params)
            for structure, output in zip(STRUCTURES, outputs, strict=True):
                if structure in (None, SUM):
                    continue  # a sum may go on
                assert output.outputs[0].finish_reason == "stop"
                check(structure, output.outputs[0].text)
            found.append(tokens(outputs))
    assert found[0] == found[1] == found[2]


def test_rows_without_a_grammar_have_the_tokens_they_have_on_their_own(llm: LLM) -> None:
    free = [place for place, structure in enumerate(STRUCTURES) if structure is None]
    alone = generate(llm, [PROMPTS[place] for place in free], [greedy(None, 30) for _ in free])
    mixed = generate(llm, PROMPTS, [greedy(structure, 30) for structure in STRUCTURES])
    assert [tokens(mixed)[place] for place in free] == tokens(alone)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_any_model_at_any_temperature_keeps_to_the_structure(llm: LLM, temperature: float) -> None:
    """A random model, with the rules that also change logits: the structure wins over each of them."""
    params = [
        SamplingParams(
            temperature=temperature,
            seed=1,
            n=2,
            max_tokens=150,
            structured_outputs=structure,
            min_tokens=50,
            repetition_penalty=1.1,
            allowed_token_ids=[1, 2, 3],
            logit_bias={5: 10.0},
            top_p=0.9,
            top_k=30,
        )
        for structure in (COMPACT_SCHEMA, PHONE, CHOICE)
    ]
    outputs = generate(llm, PROMPTS[:3], params)
    for structure, output in zip(STRUCTURES, outputs, strict=False):
        for completion in output.outputs:
            assert completion.finish_reason == "stop"
            check(structure, completion.text)


def test_a_complete_structure_ends_the_answer_also_where_the_end_of_sequence_is_ignored(llm: LLM) -> None:
    endless = StructuredOutputs(regex="[ab]{2}[ab]*")
    params = [greedy(PHONE, ignore_eos=True), greedy(endless, 40, ignore_eos=True, skip_special_tokens=False)]
    [phone, open_ended] = generate(llm, ["x", "y"], params)
    assert phone.outputs[0].finish_reason == "stop" and len(phone.outputs[0].token_ids) == 8
    assert re.fullmatch("[ab]{2,40}", open_ended.outputs[0].text)


def test_log_probabilities_are_of_the_logits_before_the_mask(llm: LLM) -> None:
    [output] = generate(llm, ["x"], [greedy(PHONE, logprobs=3)])
    [free] = generate(llm, ["x"], [greedy(None, 1, logprobs=3)])
    assert output.outputs[0].logprobs is not None and free.outputs[0].logprobs is not None
    first, unmasked = output.outputs[0].logprobs[0], free.outputs[0].logprobs[0]
    for token_id, described in unmasked.items():
        assert first[token_id].logprob == pytest.approx(described.logprob, abs=1e-4)


def test_stop_strings_end_an_answer_before_its_structure_does(llm: LLM) -> None:
    [output] = generate(llm, ["x"], [greedy(PHONE, stop=["-"])])
    assert re.fullmatch(r"\d{3}", output.outputs[0].text)
    assert output.outputs[0].stop_reason == "-"


def test_what_cannot_be_compiled_is_refused_before_anything_is_generated(llm: LLM) -> None:
    with pytest.raises(RequestError) as caught:
        generate(llm, ["x"], [greedy(StructuredOutputs(json={"type": "objekt"}))])
    assert caught.value.field == "structured_outputs.json"


@pytest.mark.parametrize("n", [1, 2])
def test_a_grammar_that_exceeds_its_limits_within_an_answer_fails_its_request_alone(llm: LLM, n: int) -> None:
    alone = generate(llm, ["y"], [greedy(None, 40, ignore_eos=True)])
    with llm.stream("y", greedy(None, 40, ignore_eos=True)) as other:
        with pytest.raises(RequestError, match=r"exceeded the limits of a grammar after \d+ token") as caught:
            generate(llm, ["x"], [greedy(TOO_MUCH_LATER, n=n)])
        assert caught.value.field == "structured_outputs.json"
        with pytest.raises(RequestError, match=r"^prompt 2 of 2: structured_outputs.json exceeded"):
            generate(llm, ["x", "x"], [greedy(None, 400, ignore_eos=True), greedy(TOO_MUCH_LATER, n=n)])
        with pytest.raises(RequestError), llm.stream("x", greedy(TOO_MUCH_LATER, n=n)) as failing:
            for output in failing:
                assert all(completion.finish_reason is None for completion in output.outputs)
        [*_, last] = other
    assert tokens([last]) == tokens(alone)
    assert not llm._frontend._outputs.has_unfinished and not llm._frontend._failures
    check(PHONE, generate(llm, ["x"], [greedy(PHONE)])[0].outputs[0].text)


def test_a_stream_gives_a_structured_answer_in_pieces(llm: LLM) -> None:
    texts = [output.outputs[0].text for output in llm.stream("x", greedy(PHONE))]
    assert len(texts) == 8 and re.fullmatch(r"\d{3}-\d{4}", texts[-1])


def test_a_grammar_that_an_engine_cannot_compile_ends_its_request_alone(llm: LLM) -> None:
    """As a client might send it that has checked nothing."""
    core: EngineCore = llm._core
    good = llm._inputs.process("good", "x", greedy(PHONE), 0.0)[0]
    assert good.grammar is not None
    bad = msgspec.structs.replace(
        good, request_id="bad", grammar=msgspec.structs.replace(good.grammar, definition="nonsense")
    )
    core.add(good)
    core.add(bad)
    ends = {}
    while core.has_work:
        ends |= {update.request_id: update.finish_reason for update in core.step() if update.finish_reason}
    assert ends == {"good": "stop", "bad": "error"}
