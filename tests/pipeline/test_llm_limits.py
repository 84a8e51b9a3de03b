"""What cannot work is refused in one clear message: settings before a process starts, requests before anything is
queued, and the engine goes on as if nothing had been asked.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from stageline import LLM, SamplingParams, StagelineError
from stageline.engine import startup
from stageline.errors import CheckpointError, ConfigError, RequestError
from stageline.sampling import UpTo
from tests.tiny_models import TINY_VOCAB_SIZE, TinyModel, load_reference, reference_greedy

MAX_MODEL_LEN = 96
NUM_BLOCKS = 4
"""Of 16 tokens in the KV cache, fewer than the model's length takes."""

BLOCK_BYTES = 16 * 2 * 2 * 2 * 16 * 4
"""16 tokens, key and value, 2 layers per stage, 2 heads of 16 float32."""

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TinyModel().write(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def reference(model: Path) -> Any:
    return load_reference(model)


def _start(model: str | Path, **settings: Any) -> LLM:
    return LLM(model, **{"pipeline_parallel_size": 2, "dtype": "float32", "max_model_len": MAX_MODEL_LEN, **settings})


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with _start(model) as two_stages:
        yield two_stages


@pytest.fixture(scope="module")
def small_llm(model: Path) -> Iterator[LLM]:
    settings = {"kv_cache_memory": str(NUM_BLOCKS * BLOCK_BYTES), "distributed_executor_backend": "in_process"}
    with _start(model, **settings) as two_stages:
        yield two_stages


# ---- settings ----


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"pipeline_parallel_size": 5}, "5 stages for 4 layers: .* at most 4"),
        ({"pipeline_parallel_size": 0}, "--pipeline-parallel-size is 0; .* at least 1"),
        ({"pp_layer_partition": "2,3"}, "'2,3' sums to 5, but the model has 4 layers; .* 2,2"),
        ({"pp_layer_partition": "4"}, "'4' has 1 entries for 2 stages; .* 2,2"),
        ({"pp_layer_partition": "4,0"}, "'4,0': 0 layers on a stage; .* 2,2"),
        ({"pp_layer_partition": "2,x"}, "'2,x': 'x' is not an integer; .* 2,2"),
        ({"kv_cache_memory": "lots"}, "'lots' is not a size .* or a fraction"),
        ({"kv_cache_memory": "0.1,0.1,0.1"}, "has 3 values for 2 stages; give 1 or 2"),
        ({"kv_cache_memory": "1.5"}, "the fraction 1.5 must be above 0 and at most 1"),
        ({"kv_cache_memory": 0.3}, "--kv-cache-memory is 0.3; .* give '0.3'"),
        ({"dtype": "int8"}, "--dtype is 'int8'; choose from auto, float32"),
        ({"device": "tpu"}, "--device is 'tpu'; choose from auto, cpu, cuda"),
        ({"distributed_executor_backend": "uni"}, "is 'uni'; choose from multi_process, mp, in_process, ray"),
        ({"distributed_executor_backend": "ray"}, "ray works with `stageline serve` only"),
        ({"max_model_len": 513}, "--max-model-len is 513, but the model has 512 positions; ask for at most 512"),
        ({"max_microbatches_in_flight": 1}, "1 for 2 stages; .* give at least 2"),
        ({"block_size": 0}, "--block-size is 0; .* at least 1"),
        ({"max_num_seqs": -1}, "--max-num-seqs is -1; .* at least 1"),
        ({"max_num_batched_tokens": 0}, "--max-num-batched-tokens is 0; .* at least 1"),
        ({"heartbeat_timeout_s": 0.0}, "--heartbeat-timeout-s is 0.0; it must be at least 0.1"),
        ({"threads_per_stage": 4096}, r"--threads-per-stage is 4096, but there are \d+ CPU cores; give at most \d+"),
        ({"chat_template": "no/such/file"}, "--chat-template no/such/file does not exist"),
        ({"tokenizer": "no/such/file"}, "--tokenizer no/such/file does not exist"),
    ],
    ids=str,
)
def test_a_setting_that_cannot_work_is_refused_before_a_process_starts(
    model: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], words: str
) -> None:
    _refuse_processes(monkeypatch)
    with pytest.raises(ConfigError, match=words) as refused:
        _start(model, **settings)
    assert "\n" not in str(refused.value)


def _refuse_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        pytest.fail("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)


@pytest.mark.parametrize("name", ["no/such/model", "no-model.gguf", ""])
def test_a_model_that_is_not_there_is_refused_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    _refuse_processes(monkeypatch)
    for path in (tmp_path / "empty" / name, tmp_path):
        with pytest.raises(CheckpointError, match=re.escape(str(path))):
            _start(path)


def test_the_partition_of_the_environment_is_checked_and_the_flag_wins(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "1,2")
    with pytest.raises(ConfigError, match="VLLM_PP_LAYER_PARTITION '1,2' sums to 3"):
        _start(model)
    settings = {"distributed_executor_backend": "in_process", "pp_layer_partition": "3,1"}
    with _start(model, **settings) as llm:
        assert "[0, 3)" in llm.startup_table() and "[3, 4)" in llm.startup_table()


@pytest.mark.parametrize(
    ("kv_cache_memory", "num_warnings"), [("0.3", 0), ("0.95", 0), ("0.96", 1), ("4MiB,0.99", 1)]
)
def test_nearly_all_memory_is_given_with_a_warning(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kv_cache_memory: str,
    num_warnings: int,
) -> None:
    """Said before anything starts, so nothing needs to start here."""

    class Started(Exception):
        pass

    def start(*args: Any) -> None:
        raise Started

    monkeypatch.setattr(startup, "_make_executor", start)
    with caplog.at_level("INFO", "stageline"), pytest.raises(Started):
        _start(model, kv_cache_memory=kv_cache_memory)
    assert [r.message for r in caplog.records if r.levelname == "INFO"] == [f"loading {model} into 2 stages"]
    assert len([r for r in caplog.records if r.levelname == "WARNING"]) == num_warnings


@pytest.mark.parametrize("backend", ["in_process", "multi_process"])
@pytest.mark.parametrize(
    ("kv_cache_memory", "words"),
    [
        ("100", f"stage 0: 100 bytes .* hold no block of 16 tokens .{BLOCK_BYTES:,} bytes.; raise --kv-cache-memory"),
        ("0.1,900TiB", "stage 1: --kv-cache-memory asks for .* but .* are free after loading; ask for at most"),
    ],
)
def test_memory_that_is_not_there_is_refused_and_the_stages_end(
    model: Path, backend: str, kv_cache_memory: str, words: str
) -> None:
    """It is known only after loading."""
    before = psutil.Process().children(recursive=True)
    with pytest.raises(ConfigError, match=words):
        _start(model, distributed_executor_backend=backend, kv_cache_memory=kv_cache_memory)
    assert psutil.Process().children(recursive=True) == before


# ---- requests ----


def _message(role: object) -> list[dict[str, Any]]:
    return [{"role": role, "content": "hi"}]


REFUSED = {
    "empty text": ({"prompts": ""}, "prompt", "^the prompt is empty; give at least one token"),
    "no tokens": ({"prompts": [[]]}, "prompt_token_ids", "the prompt is empty"),
    "unknown token": ({"prompts": [1, 2, TINY_VOCAB_SIZE]}, "prompt_token_ids", "token id 260; the model has ids 0"),
    "negative token": ({"prompts": [5, -1]}, "prompt_token_ids", "token id -1; the model has ids 0 to 259"),
    "no integers": ({"prompts": [[1, 2.5]]}, "prompt_token_ids", "token id 2.5; the model has ids"),
    "true": ({"prompts": [[True]]}, "prompt_token_ids", "token id True; the model has ids"),
    "nothing": ({"prompts": None}, "prompt", "prompts is of type NoneType; give a text, a list of token ids"),
    "number": ({"prompts": 3.5}, "prompt", "prompts is of type float; give a text"),
    "dict": ({"prompts": {"prompt": "a"}}, "prompt", "prompts is of type dict; give a text"),
    "mixed": ({"prompts": ["a", 5]}, "prompt", "the prompt is of type int; give a text or a list of token ids"),
    "nothing in a list": ({"prompts": ["a", None]}, "prompt", "the prompt is of type NoneType"),
    "no Unicode": ({"prompts": "a\ud800"}, "prompt", "no Unicode text"),
    "too long": ({"prompts": "x" * MAX_MODEL_LEN}, "prompt", "has 96 tokens, .* 96; shorten it to at most 95"),
    "one bad of many": ({"prompts": ["a", "b", "", "c"]}, "prompt", "^prompt 3 of 4: the prompt is empty"),
    "params of another type": ({"prompts": "a", "params": {"n": 2}}, "sampling_params", "give SamplingParams"),
    "too few params": ({"prompts": ["a", "b"], "params": [GREEDY]}, "sampling_params", "1 sampling_params for 2"),
    "one bad parameter": (
        {"prompts": ["a", "b"], "params": [GREEDY, SamplingParams(temperature=-1.0)]},
        "temperature",
        "prompt 2 of 2: temperature is -1.0; it must be between 0 and 100",
    ),
    "unknown stop token": (
        {"prompts": "a", "params": SamplingParams(stop_token_ids=[260])},
        "stop_token_ids",
        "token id 260; the vocabulary has ids 0 to 259",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_request_that_cannot_be_served_is_refused_and_leaves_nothing(llm: LLM, reference: Any, name: str) -> None:
    asked, field, words = REFUSED[name]
    with pytest.raises(RequestError, match=words) as refused:
        llm.generate(asked["prompts"], asked.get("params", GREEDY))
    assert refused.value.field == field
    _check_is_usable_and_idle(llm, reference, name)


def _check_is_usable_and_idle(llm: LLM, reference: Any, prompt: str) -> None:
    """A request gets its own tokens, and all that is computed meanwhile is computed for it."""
    start_s = llm.clock.now_s()
    (output,) = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, prompt_logprobs=0))
    token_ids = llm.tokenizer.encode(prompt)
    assert output.outputs[0].token_ids == reference_greedy(reference, token_ids, 8)
    forwards = [span for span in llm.spans(start_s) if span.kind == "forward" and span.stage_index == 0]
    assert sum(span.num_tokens for span in forwards) == len(token_ids) + 7


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "messages is empty or not a list"),
        ([[]], r"messages is empty or not a list|messages\[0\] is \[\]; it must have a role"),
        (None, "messages is empty or not a list"),
        ("hi", "messages is empty or not a list"),
        (3.5, "messages is empty or not a list"),
        ({"role": "user", "content": "hi"}, "messages is empty or not a list"),
        ([{"content": "hi"}], r"messages\[0\] is .* must have a role and content"),
        (_message(5), r"messages\[0\] is .* must have a role and content"),
        ([_message("user"), _message(None)], r"messages\[0\] is .* must have a role and content"),
        (["hi"], r"messages\[0\] is 'hi'; it must have a role and content"),
    ],
    ids=str,
)
def test_messages_of_another_shape_are_refused(llm: LLM, messages: Any, words: str) -> None:
    for ask in (llm.chat, llm.stream_chat):
        with pytest.raises(RequestError, match=words) as refused:
            ask(messages, GREEDY)
        assert refused.value.field == "messages"


@pytest.mark.parametrize(("prompt", "field"), [("", "prompt"), (None, "prompt"), ([260], "prompt_token_ids")])
def test_a_stream_is_refused_when_it_is_asked_for_not_when_it_is_read(llm: LLM, prompt: Any, field: str) -> None:
    with pytest.raises(RequestError) as refused:
        llm.stream(prompt, GREEDY)
    assert refused.value.field == field


# ---- exactly at the limits ----


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens", "num_output_tokens"),
    [
        (MAX_MODEL_LEN - 1, 1, 1),
        (MAX_MODEL_LEN - 1, None, 1),
        (MAX_MODEL_LEN - 1, UpTo(50), 1),
        (MAX_MODEL_LEN - 9, 9, 9),
        (MAX_MODEL_LEN - 9, UpTo(10), 9),
        (1, MAX_MODEL_LEN - 1, MAX_MODEL_LEN - 1),
    ],
)
def test_prompt_and_output_together_reach_the_model_s_length_and_not_beyond(
    llm: LLM, reference: Any, num_prompt_tokens: int, max_tokens: int | None, num_output_tokens: int
) -> None:
    prompt = [(7 * index) % 250 for index in range(num_prompt_tokens)]
    (output,) = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True))
    assert output.outputs[0].token_ids == reference_greedy(reference, prompt, num_output_tokens)
    assert output.outputs[0].finish_reason == "length"


def test_the_whole_kv_cache_can_be_one_request_s_and_a_token_more_is_refused(small_llm: LLM, reference: Any) -> None:
    """The last token is never fed back, so the cache need not hold it."""
    prompt = list(range(50))
    room_tokens = NUM_BLOCKS * 16 + 1 - len(prompt)
    fits, too_much = (
        SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        for max_tokens in (room_tokens, room_tokens + 1)
    )
    needs = r"prompt 2 of 2: 50 prompt tokens and max_tokens 16 need 5 KV cache blocks .* 4; lower"
    with pytest.raises(RequestError, match=needs):
        small_llm.generate([prompt, prompt], [fits, too_much])
    outputs = small_llm.generate([prompt, "beside"], [fits, GREEDY])
    assert outputs[0].outputs[0].token_ids == reference_greedy(reference, prompt, room_tokens)
    _check_is_usable_and_idle(small_llm, reference, "afterwards")


def test_every_refusal_is_one_error_of_the_tree() -> None:
    assert issubclass(RequestError, StagelineError) and issubclass(ConfigError, StagelineError)
