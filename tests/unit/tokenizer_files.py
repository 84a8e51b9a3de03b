"""GGUF files that carry a small tokenizer of each kind, and the same tokenizer built directly, to compare with."""

from __future__ import annotations

from pathlib import Path

import gguf
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from tests.unit.checkpoint_files import add_model_tensors, finish, model_writer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = (
    int(kind)
    for kind in (
        gguf.TokenType.NORMAL,
        gguf.TokenType.UNKNOWN,
        gguf.TokenType.CONTROL,
        gguf.TokenType.USER_DEFINED,
        gguf.TokenType.BYTE,
    )
)
CORPUS = [
    "the quick brown fox jumps over the lazy dog and the other dogs 12345 67890",
    "def add(x, y):\n    return x + y\n\n\nprint(add(1, 22))",
    "I'll they've don't WE'RE it's   spaces    runs\t\ttabs\r\n",
    "der schöne Fluß über die Brücke, café déjà vu, 日本語 テキスト",
] * 3
TRICKY_TEXTS = [
    "",
    " ",
    "   ",
    "the quick   brown",
    " leading and trailing ",
    "12345 1,234.56 x86_64 3rd",
    "a  1   22\n\n333",
    "def f(x):\n\treturn x  # ok\r\n\r\n",
    "don't I'LL they'Ve",
    "camelCase XMLParser WE'REthey path//to/\n",
    "日本語テキスト — über Straße",
    "🙂👨‍👩‍👧 ½ Ⅷ ①",
    "e\u0301 vs é \u200b\u00a0x",
    "<|end|>x<|end|> <think>y</think> <|nope|>",
    "\x00\x01\x7f",
]
SPECIAL = ["<|begin|>", "<|end|>"]
USER = ["<think>"]
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2_SPLIT = LLAMA3_SPLIT.replace("{1,3}", "")
O200K_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def byte_level_reference(pre: str) -> Tokenizer:
    """A trained byte-level BPE with the pre-tokenizer that models of this kind have in their tokenizer.json."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=pre in ("llama-bpe", "gpt-4o")))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre in ("smollm", "gpt-2"))
    if pre == "smollm":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    elif pre == "gpt-2":
        tokenizer.pre_tokenizer = byte_level
    else:
        pattern = {"llama-bpe": LLAMA3_SPLIT, "qwen2": QWEN2_SPLIT, "gpt-4o": O200K_SPLIT}[pre]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(pattern), behavior="isolated"), byte_level]
        )
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens(USER)
    return tokenizer


def write_byte_level_gguf(path: Path, pre: str = "gpt-2", chat_template: str | None = None) -> Path:
    """The vocabulary of `byte_level_reference`, as llama.cpp's converter writes it."""
    import json

    reference = byte_level_reference(pre if pre in ("smollm", "llama-bpe", "qwen2", "gpt-4o") else "gpt-2")
    vocab = reference.get_vocab(with_added_tokens=True)
    tokens = sorted(vocab, key=lambda token: vocab[token])
    merges = json.loads(reference.to_str())["model"]["merges"]
    writer = model_writer(path)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([CONTROL if t in SPECIAL else USER_DEFINED if t in USER else NORMAL for t in tokens])
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_bos_token_id(vocab[SPECIAL[0]])
    writer.add_eos_token_id(vocab[SPECIAL[1]])
    return _finish(writer, path, chat_template)


WORDS = ["▁the", "▁t", "he", "▁quick", "▁brown", "th", "ick", "▁q", "ui", "ck", "qu", "▁b", "ro", "wn", "own", "▁▁"]


def sentencepiece_vocabulary() -> list[tuple[str, float, int]]:
    """(token, score, type): Llama 2's layout in small."""
    letters = sorted({character for word in WORDS for character in word} | set("abcdefghijklmnopqrstuvwxyzé."))
    return [
        ("<unk>", 0.0, UNKNOWN),
        ("<s>", 0.0, CONTROL),
        ("</s>", 0.0, CONTROL),
        *((f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)),
        *((word, -float(rank), NORMAL) for rank, word in enumerate(WORDS)),
        *((letter, -1000.0 - rank, NORMAL) for rank, letter in enumerate(letters)),
        ("<|end|>", 0.0, CONTROL),
        ("<think>", 0.0, USER_DEFINED),
    ]


def write_sentencepiece_gguf(
    path: Path, chat_template: str | None = None, add_space_prefix: bool = True, user_defined: tuple[str, ...] = ()
) -> Path:
    """Args: user_defined: further tokens that are found whole, with plain spaces as llama.cpp's converter has them."""
    further = [(token, 0.0, USER_DEFINED) for token in user_defined]
    tokens, scores, types = zip(*sentencepiece_vocabulary(), *further, strict=True)
    writer = model_writer(path)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    if not add_space_prefix:
        writer.add_add_space_prefix(False)
    return _finish(writer, path, chat_template)


def _finish(writer: gguf.GGUFWriter, path: Path, chat_template: str | None) -> Path:
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    add_model_tensors(writer)
    finish(writer)
    return path
