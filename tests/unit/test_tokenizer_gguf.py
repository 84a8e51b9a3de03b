"""Tokenizers built from GGUF metadata equal the tokenizers they were written from."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stageline.checkpoint import open_checkpoint
from stageline.checkpoint.gguf_pre_tokenizers import PRE_TOKENIZERS
from stageline.checkpoint.tokenizer import Tokenizer, load_tokenizer
from stageline.errors import CheckpointError
from tests.unit.checkpoint_files import add_model_tensors, finish, model_writer
from tests.unit.tokenizer_files import (
    KINDS,
    TRICKY_TEXTS,
    byte_level_reference,
    sentencepiece_vocabulary,
    write_byte_level_gguf,
    write_sentencepiece_gguf,
)


def load(path: Path) -> Tokenizer:
    return load_tokenizer(open_checkpoint(str(path)))


@pytest.mark.parametrize("pre", KINDS)
def test_byte_level_tokenizers_equal_their_originals(tmp_path: Path, pre: str) -> None:
    tokenizer, reference = load(write_byte_level_gguf(tmp_path / "m.gguf", pre)), byte_level_reference(pre)
    assert tokenizer.vocab_size == reference.get_vocab_size()
    for text in TRICKY_TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == reference.encode(text, add_special_tokens=False).ids, text
        for skip in (True, False):
            assert tokenizer.decode(ids, skip) == reference.decode(ids, skip_special_tokens=skip)


def test_the_kinds_differ_where_they_should(tmp_path: Path) -> None:
    """Otherwise the test above could not fail."""
    texts = ["a  1", "12345", "they've", "don't (x", "a$b\u0561 1", "'they"]
    cuts = {}
    for pre in KINDS:
        cutter = PRE_TOKENIZERS[pre].build()
        cuts[pre] = tuple(tuple(piece for piece, _ in cutter.pre_tokenize_str(text)) for text in texts)
    assert len(set(cuts.values())) == len(KINDS), cuts


def test_some_kinds_have_several_names() -> None:
    """DeepSeek's distilled Qwen has Qwen2's tokenizer with other special tokens."""
    for name, kind in (("llama3", "llama-bpe"), ("llama-v3", "llama-bpe"), ("deepseek-r1-qwen", "qwen2")):
        assert PRE_TOKENIZERS[name] is PRE_TOKENIZERS[kind]


def sentencepiece_by_definition(text: str) -> list[int]:
    """SentencePiece BPE straight from its definition: merge the adjacent pair that scores highest, leftmost first."""
    vocabulary = sentencepiece_vocabulary()
    ids = {token: token_id for token_id, (token, _, _) in enumerate(vocabulary)}
    scores = {token: score for token, score, kind in vocabulary if kind == 1}
    pieces = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        joined = [left + right for left, right in pairwise(pieces)]
        pairs = [(scores[piece], -at) for at, piece in enumerate(joined) if piece in scores]
        if not pairs:
            break
        at = -max(pairs)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    return [
        token_id
        for piece in pieces
        for token_id in ([ids[piece]] if piece in ids else [ids[f"<0x{byte:02X}>"] for byte in piece.encode()])
    ]


@settings(max_examples=300, deadline=None)
@given(text=st.text(alphabet="thequickbrown aé🙂\n", max_size=30))
def test_sentencepiece_tokenizers_follow_the_definition(
    tmp_path_factory: pytest.TempPathFactory, text: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "sentencepiece.gguf"
    tokenizer = load(path if path.exists() else write_sentencepiece_gguf(path))
    assert tokenizer.encode(text, add_special_tokens=False) == sentencepiece_by_definition(text)
    assert tokenizer.decode(tokenizer.encode(text), True) == text


def test_bos_is_added_where_the_kind_or_the_file_says(tmp_path: Path) -> None:
    sentencepiece = load(write_sentencepiece_gguf(tmp_path / "a.gguf"))
    assert sentencepiece.encode("the")[0] == 1
    assert sentencepiece.encode("the", add_special_tokens=False)[0] != 1
    llama3 = load(write_byte_level_gguf(tmp_path / "b.gguf", "llama-bpe"))
    assert llama3.decode(llama3.encode("the"), False) == "<|begin|>the"
    assert llama3.special_tokens["bos_token"] == "<|begin|>"
    qwen2 = load(write_byte_level_gguf(tmp_path / "c.gguf", "qwen2"))
    assert qwen2.decode(qwen2.encode("the"), False) == "the"


def test_special_tokens_in_text_are_found_whole_and_skipped_on_request(tmp_path: Path) -> None:
    tokenizer = load(write_byte_level_gguf(tmp_path / "m.gguf"))
    ids = tokenizer.encode("<think>a<|end|>", add_special_tokens=False)
    assert len(ids) == 3
    assert (tokenizer.decode(ids, True), tokenizer.decode(ids, False)) == ("<think>a", "<think>a<|end|>")


def test_a_token_by_itself_keeps_its_space_and_unknown_ids_have_no_text(tmp_path: Path) -> None:
    for write in (write_byte_level_gguf, write_sentencepiece_gguf):
        tokenizer = load(write(tmp_path / f"{write.__name__}.gguf"))
        texts = [tokenizer.token_text(i) for i in tokenizer.encode("a the", add_special_tokens=False)]
        assert texts[-1] == " the"
        assert tokenizer.token_text(tokenizer.vocab_size + 5) == ""


def test_a_file_without_prefix_space_adds_none(tmp_path: Path) -> None:
    tokenizer = load(write_sentencepiece_gguf(tmp_path / "m.gguf", add_space_prefix=False))
    assert tokenizer.token_text(tokenizer.encode("the", add_special_tokens=False)[0]) != " the"
    assert tokenizer.decode(tokenizer.encode(" the", add_special_tokens=False)) == " the"


def test_runs_of_spaces_that_are_tokens_are_found_before_anything_is_merged(tmp_path: Path) -> None:
    """Gemma has them. SentencePiece looks for them in text whose spaces are escaped already, by any means."""
    runs = ("   ", "    ")
    tokenizer = load(write_sentencepiece_gguf(tmp_path / "m.gguf", add_space_prefix=False, user_defined=runs))
    for text, expected in (
        ("the    the", ["the", "    ", "the"]),
        ("t   the", ["t", "   ", "the"]),
        ("t  the", ["t", " ", " the"]),
        ("t▁ ▁the", ["t", "   ", "the"]),
    ):
        pieces = [tokenizer.decode([i]) for i in tokenizer.encode(text, add_special_tokens=False)]
        assert [piece for piece in pieces if piece.isspace()] == [piece for piece in expected if piece.isspace()], text
        assert "".join(pieces) == text.replace("▁", " ")


def test_other_pre_tokenizers_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'superbpe' is not supported.*smollm.*--tokenizer"):
        load(write_byte_level_gguf(tmp_path / "m.gguf", "superbpe"))


@pytest.mark.parametrize("fault", ["model", "no tokens", "types", "merge", "merge of nothing", "special id", "scores"])
def test_inconsistent_metadata_are_refused(tmp_path: Path, fault: str) -> None:
    writer = model_writer(tmp_path / "m.gguf")
    writer.add_tokenizer_model({"model": "rwkv", "scores": "llama"}.get(fault, "gpt2"))
    if fault != "no tokens":
        writer.add_token_list(["a", "b", "ab"])
    writer.add_token_types([1, 1] if fault == "types" else [1, 1, 1])
    writer.add_token_scores([0.0])
    writer.add_token_merges([{"merge": "ab", "merge of nothing": "x y"}.get(fault, "a b")])
    writer.add_bos_token_id(99 if fault == "special id" else 0)
    add_model_tensors(writer)
    finish(writer)
    with pytest.raises(CheckpointError, match=r"m\.gguf"):
        load(tmp_path / "m.gguf")
