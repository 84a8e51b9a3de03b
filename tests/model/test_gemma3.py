"""Gemma 3 270M from its GGUF file: windows on most layers, a SentencePiece vocabulary, a head as heavy as all layers.

It is the base model, which has no chat template: it goes on with a text.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from stageline.checkpoint import open_checkpoint
from stageline.checkpoint.tokenizer import Tokenizer, load_tokenizer
from tests.model.chain import Chain, cut

PROMPT = "Water boils at"
CUTS = {1: cut(18), 2: cut(11, 7), 3: cut(6, 6, 6)}


@pytest.fixture(scope="module")
def tokenizer(gemma3_gguf: Path) -> Tokenizer:
    return load_tokenizer(open_checkpoint(str(gemma3_gguf)))


def greedy(chain: Chain, prompt: list[int], num_tokens: int) -> list[int]:
    chain.requests.add(0, prompt)
    tokens: list[int] = []
    num_new = len(prompt)
    for _ in range(num_tokens):
        tokens.append(int(chain.run({0: num_new})[0][-1].argmax()))
        chain.requests.requests[0].tokens.append(tokens[-1])
        num_new = 1
    return tokens


def test_its_shape_is_read(gemma3_gguf: Path) -> None:
    spec = open_checkpoint(str(gemma3_gguf)).spec
    assert (spec.family, spec.num_layers, spec.head_dim, spec.vocab_size) == ("gemma3", 18, 256, 262144)
    assert [index for index in range(18) if spec.window_of(index) is None] == [5, 11, 17]
    assert spec.window_of(0) == 512 and spec.rope_of(0).theta == 1e4 and spec.rope_of(5).theta == 1e6  # type: ignore[union-attr]


def test_text_is_cut_as_sentencepiece_cuts_it(tokenizer: Tokenizer) -> None:
    """The expected pieces are SentencePiece's own, of this vocabulary."""
    expected = {
        "  two  spaces   and\ttabs\n\n\n": ["▁▁", "two", "▁▁", "spaces", "▁▁▁", "and", "\t", "tabs", "\n\n\n"],
        "1234 naïve 日本語": ["1", "2", "3", "4", "▁naïve", "▁日本", "語"],
    }
    for text, pieces in expected.items():
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert [tokenizer._backend.id_to_token(i) for i in ids] == pieces
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("a")[0] == 2, "begins with <bos>"


def test_it_goes_on_sensibly_and_alike_at_every_depth(gemma3_gguf: Path, tokenizer: Tokenizer) -> None:
    answers = {
        depth: greedy(Chain(gemma3_gguf, cuts, torch.bfloat16, keeps_quantized=True), tokenizer.encode(PROMPT), 8)
        for depth, cuts in CUTS.items()
    }
    assert "100 degrees" in tokenizer.decode(answers[1])
    assert answers[2] == answers[1] and answers[3] == answers[1]
