"""A real model from a GGUF file: SmolLM2's greedy answers are those of `transformers` in float32, at every depth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from stageline import LLM, SamplingParams

NUM_OUTPUT_TOKENS = 24
CONVERSATIONS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "Why is the sky blue?"},
    ],
]


@pytest.fixture(scope="module")
def expected(smollm2_gguf: Path) -> list[tuple[list[int], list[int]]]:
    """Per conversation the prompt's and the answer's token ids."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, name = smollm2_gguf.parent, smollm2_gguf.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32).eval()
    return [_answer(model, tokenizer, conversation) for conversation in CONVERSATIONS]


@torch.inference_mode()
def _answer(model: Any, tokenizer: Any, conversation: list[dict[str, str]]) -> tuple[list[int], list[int]]:
    encoded = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=True)
    prompt = torch.tensor([encoded["input_ids"]]).reshape(1, -1)
    tokens = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=NUM_OUTPUT_TOKENS
    )
    return prompt[0].tolist(), tokens[0, prompt.shape[1] :].tolist()


@pytest.mark.parametrize(
    ("num_stages", "backend", "partition"),
    [
        (1, "in_process", None),
        (3, "multi_process", "1,28,1"),
        (5, "in_process", None),
    ],
)
def test_greedy_answers_are_those_of_transformers(
    smollm2_gguf: Path,
    expected: list[tuple[list[int], list[int]]],
    num_stages: int,
    backend: str,
    partition: str | None,
) -> None:
    settings = {"distributed_executor_backend": backend, "pp_layer_partition": partition, "kv_cache_memory": "64MiB"}
    with LLM(smollm2_gguf, pipeline_parallel_size=num_stages, dtype="float32", **settings) as llm:
        answers = llm.chat(CONVERSATIONS, SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT_TOKENS))
    found = [(answer.prompt_token_ids, answer.outputs[0].token_ids) for answer in answers]
    assert found == expected
    assert "Paris" in answers[0].outputs[0].text
    for answer in answers:
        assert "<|im_" not in answer.outputs[0].text
