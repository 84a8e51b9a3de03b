"""Incremental detokenisation: the pieces add up to the whole, and no piece holds half a character."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stageline.checkpoint import open_checkpoint
from stageline.checkpoint.decode_stream import LONGEST_WINDOW_TOKENS
from stageline.checkpoint.tokenizer import Tokenizer, load_tokenizer
from tests.unit.tokenizer_files import write_byte_level_gguf, write_sentencepiece_gguf

REPLACEMENT = "\ufffd"
# SentencePiece writes a space as "▁", so a text's own comes back as a space.
TEXTS = st.text(max_size=40).filter(lambda text: REPLACEMENT not in text and "▁" not in text)
# Up to three characters, bytes throughout, are within the context that a stream keeps of its prompt.
SHORT_TEXTS = st.text(max_size=3).filter(lambda text: REPLACEMENT not in text and "▁" not in text)
EMOJI = "naïve 🙂👨‍👩‍👧 日本語 — ½ ok"


@pytest.fixture(scope="module", params=["byte_level", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("t") / "m.gguf"
    write = write_byte_level_gguf if request.param == "byte_level" else write_sentencepiece_gguf
    return load_tokenizer(open_checkpoint(str(write(path))))


def pieces_of(tokenizer: Tokenizer, ids: list[int], prompt: list[int] | None = None) -> list[str]:
    stream = tokenizer.new_decode_stream(False, prompt or [])
    return [*(stream.step(token_id) for token_id in ids), stream.finish()]


@settings(max_examples=200, deadline=None)
@given(text=TEXTS)
def test_the_pieces_of_a_text_add_up_and_none_is_half_a_character(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids, False) == text
    assert not any(REPLACEMENT in piece for piece in pieces)


@settings(max_examples=200, deadline=None)
@given(prompt=SHORT_TEXTS, text=SHORT_TEXTS)
def test_after_a_prompt_exactly_the_rest_is_given(tokenizer: Tokenizer, prompt: str, text: str) -> None:
    ids = tokenizer.encode(prompt + text, add_special_tokens=False)
    for cut in (0, len(ids) // 2, len(ids)):
        pieces = pieces_of(tokenizer, ids[cut:], ids[:cut])
        before = tokenizer.decode(ids[:cut], False).rstrip(REPLACEMENT)
        assert before + "".join(pieces) == prompt + text


def test_a_character_of_four_bytes_comes_out_whole_with_its_last_token(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🙂", add_special_tokens=False)
    pieces = pieces_of(tokenizer, ids)
    assert len(ids) >= 4
    assert pieces == [""] * (len(ids) - 1) + (["🙂", ""] if "🙂" in pieces else [])


def test_an_unfinished_character_is_given_out_only_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a🙂", add_special_tokens=False)[:-1]
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces[:-1]) == "a"
    assert set(pieces[-1]) == {REPLACEMENT}


def test_noise_that_never_becomes_text_is_not_held_for_ever(tokenizer: Tokenizer) -> None:
    lead_byte = tokenizer.encode("🙂", add_special_tokens=False)[-4]
    stream = tokenizer.new_decode_stream(False, [])
    emitted = "".join(stream.step(lead_byte) for _ in range(3 * LONGEST_WINDOW_TOKENS))
    assert len(emitted) > LONGEST_WINDOW_TOKENS


def test_a_stream_over_special_tokens_skips_them_and_keeps_going(tokenizer: Tokenizer) -> None:
    special = tokenizer.encode("<|end|>", add_special_tokens=False)[-1]
    ids = tokenizer.encode(EMOJI, add_special_tokens=False)
    stream = tokenizer.new_decode_stream(True, [special])
    text = "".join(stream.step(i) for i in [*ids, *[special] * (2 * LONGEST_WINDOW_TOKENS), *ids]) + stream.finish()
    assert text.replace(" ", "") == (EMOJI + EMOJI).replace(" ", "")


@settings(max_examples=300, deadline=None)
@given(data=st.data(), text=TEXTS)
def test_last_tokens_taken_together_give_what_they_give_one_by_one(
    tokenizer: Tokenizer, data: st.DataObject, text: str
) -> None:
    """Whole texts, texts with bytes missing, and noise, after any number of steps and a prompt cut anywhere."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    noise = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=5))
    ids = [*ids, *noise, *ids]
    cut = data.draw(st.integers(0, len(ids)))
    del ids[cut : cut + data.draw(st.integers(0, 2))]
    start = data.draw(st.integers(0, len(ids)))
    stream = tokenizer.new_decode_stream(False, ids[:start])
    num_steps = data.draw(st.integers(0, len(ids) - start))
    pieces = [stream.step(token_id) for token_id in ids[start : start + num_steps]]
    pieces.append(stream.finish(ids[start + num_steps :]))
    assert "".join(pieces) == "".join(pieces_of(tokenizer, ids[start:], ids[:start]))


def test_a_directory_can_lend_its_tokenizer(tmp_path: Path) -> None:
    one = open_checkpoint(str(write_byte_level_gguf(tmp_path / "one.gguf")))
    other = open_checkpoint(str(write_sentencepiece_gguf(tmp_path / "other.gguf")))
    assert load_tokenizer(one, tokenizer=other.path).encode("hi") == load_tokenizer(other).encode("hi")
