"""A real model from a GGUF file, SmolLM2: all that `transformers` makes of the same file in float32 is made of it here.

Tokens and chat prompts, weights, logits, and greedy answers at every depth. Together, because `transformers` takes long
to read the file.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import pre_tokenizers

from stageline import LLM, SamplingParams
from stageline.checkpoint import open_checkpoint
from stageline.checkpoint.tokenizer import Tokenizer, load_tokenizer
from stageline.weights.reader import CheckpointReader
from tests.model.chain import Chain, cut, sequence
from tests.tiny_models import reference_logits
from tests.unit.tokenizer_files import TRICKY_TEXTS

NUM_OUTPUT_TOKENS = 24
CONVERSATIONS = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": "You answer in one short sentence."},
        {"role": "user", "content": "Why is the sky blue?"},
    ],
]
TEXTS = [
    *TRICKY_TEXTS,
    "The capital of France is",
    "What is 17 * 23? Answer: 391.",
    "import os\n\n\nclass A:\n    def f(self, x: int = 3) -> None:\n        return {'a': [1, 2]}  # done\n",
    "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n",
    "Ελληνικά, русский, עברית, العربية, हिन्दी, 한국어, 中文 𝔘𝔫𝔦𝔠𝔬𝔡𝔢",
    "tabs\t\t\tand \u3000 spaces   \n\n\n   end  ",
    "https://example.com/a?b=c&d=%20#frag",
    "\u200d\ufe0f❤️‍🔥 👩🏽‍🚀 🇫🇷",
]
CHATS = [
    [{"role": "user", "content": "Hi <b>there</b> & you"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b 🙂"},
        {"role": "user", "content": "c\n1. d"},
    ],
]


@pytest.fixture(scope="module", autouse=True)
def _read_once() -> Iterator[None]:
    """`transformers` would read the file for each thing that it wants to know, and make a table of names per tensor."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("GGUFReader", "get_tensor_name_map"):
            patch.setattr(gguf, name, functools.cache(getattr(gguf, name)))
        yield


@pytest.fixture(scope="module")
def ours(smollm2_gguf: Path) -> Tokenizer:
    return load_tokenizer(open_checkpoint(str(smollm2_gguf)))


@pytest.fixture(scope="module")
def theirs(smollm2_gguf: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)


@pytest.fixture(scope="module")
def theirs_with_digits(theirs: Any) -> Backend:
    """transformers forgets, for GGUF files only, that this model's tokenizer.json splits off digits first (as llama.cpp
    does for `smollm`), so it cuts "a  1" after the first space. With that put right it is the model's own tokenizer."""
    backend = Backend.from_str(theirs.backend_tokenizer.to_str())
    digits = pre_tokenizers.Digits(individual_digits=True)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, backend.pre_tokenizer])
    return backend


def test_tokens_equal_transformers(ours: Tokenizer, theirs: Any) -> None:
    texts = [text for text in TEXTS if not re.search(r"\s\s\d|½|Ⅷ", text)]
    assert len(texts) > len(TEXTS) * 2 / 3
    for text in texts:
        assert ours.encode(text) == theirs.encode(text), text


def test_all_tokens_equal_transformers_with_digits_put_right(ours: Tokenizer, theirs_with_digits: Backend) -> None:
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs_with_digits.encode(text).ids, text
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs_with_digits.decode(ids, skip_special_tokens=skip)


def test_every_token_has_the_text_that_transformers_gives_it(ours: Tokenizer, theirs: Any) -> None:
    assert ours.vocab_size == len(theirs) == 49152
    for token_id in range(0, 49152, 7):
        assert ours.token_text(token_id) == theirs.decode([token_id])
    for token_id in theirs.all_special_ids:
        assert ours.decode([token_id], skip_special_tokens=True) == ""


@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_chat_prompts_equal_transformers(ours: Tokenizer, theirs: Any, add_generation_prompt: bool) -> None:
    for messages in CHATS:
        options = {"add_generation_prompt": add_generation_prompt}
        expected = theirs.apply_chat_template(messages, tokenize=False, **options)
        assert ours.apply_chat_template(messages, **options) == expected
        ids = theirs.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
        assert ours.encode_chat(messages, **options) == ids


def test_weights_equal_the_gguf_package_in_transformers_order(smollm2_gguf: Path) -> None:
    checkpoint = open_checkpoint(str(smollm2_gguf))
    stored = {tensor.name: tensor for tensor in gguf.GGUFReader(str(smollm2_gguf)).tensors}
    wanted = [name for name in checkpoint.tensors if ".29." in name or name == "model.norm.weight"]
    with CheckpointReader(checkpoint, torch.float32, torch.device("cpu")) as reader:
        for name in wanted:
            entry = checkpoint.tensors[name]
            tensor = stored[entry.stored_name]
            expected = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(entry.shape)
            if "q_proj" in name or "k_proj" in name:
                heads = entry.shape[0] // checkpoint.spec.head_dim
                expected = expected.reshape(heads, 32, 2, -1).swapaxes(1, 2).reshape(entry.shape)
            assert np.array_equal(reader.read(name, entry.shape).numpy(), expected), name


@pytest.fixture(scope="module")
def reference(smollm2_gguf: Path) -> Any:
    """The model as `transformers` runs it."""
    from transformers import AutoModelForCausalLM

    folder, name = smollm2_gguf.parent, smollm2_gguf.name
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32).eval()

def test_logits_equal_transformers(smollm2_gguf: Path, reference: Any) -> None:
    tokens = sequence(0, 24, vocab_size=40000)
    chain = Chain(smollm2_gguf, cut(1, 28, 1))
    chain.requests.add(0, tokens)
    found = torch.cat([chain.run({0: 17})[0], chain.run({0: 6})[0], chain.run({0: 1})[0]])
    expected = reference_logits(reference, tokens)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


@pytest.fixture(scope="module")
def expected(reference: Any, theirs: Any) -> list[tuple[list[int], list[int]]]:
    """Per conversation the prompt's and the answer's token ids."""
    return [_answer(reference, theirs, conversation) for conversation in CONVERSATIONS]


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
