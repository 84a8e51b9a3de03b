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
    "!important #tag 'quoted' \u2018so\u2019 \uff01\uff1f \u3002x",
    "\u0531\u0561 \u10d0\u1c90 \u0410\u0430 \u212bK \u1e9e\u00df \U0001d400x \u0e01\u0e33",
    "\ud55c\uad6d\uc5b4\n \u304b\u306a\u4e00x",
    "x \r\n \t y  \n\n z   ",
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


TEKKEN_SPLIT = O200K_SPLIT.replace(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "").replace("{1,3}", "")
DEEPSEEK_V3_SPLITS = (
    "\\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+"
    "[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)
DEEPSEEK_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
DEEPSEEK_CODER_SPLITS = ("[\r\n]", "\\s?\\p{L}+", "\\s?\\p{P}+", DEEPSEEK_CJK)
DEEPSEEK_LETTERS = (
    "A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556"
    "\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b"
    "\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
DEEPSEEK_LLM_SPLITS = (
    "[\r\n]",
    f"\\s?[{DEEPSEEK_LETTERS}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    "\\s+$",
    DEEPSEEK_CJK,
)
SPLITS = {
    "llama-bpe": (LLAMA3_SPLIT,),
    "qwen2": (QWEN2_SPLIT,),
    "gpt-4o": (O200K_SPLIT,),
    "tekken": (TEKKEN_SPLIT,),
    "deepseek-v3": DEEPSEEK_V3_SPLITS,
    "deepseek-coder": DEEPSEEK_CODER_SPLITS,
    "deepseek-llm": DEEPSEEK_LLM_SPLITS,
}
"""As they are published; by what a GGUF file calls them."""
KINDS = ("smollm", "gpt-2", *SPLITS)


def byte_level_reference(pre: str) -> Tokenizer:
    """A trained byte-level BPE with the pre-tokenizer that models of this kind have in their tokenizer.json."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=pre in ("llama-bpe", "gpt-4o", "tekken")))
    parts: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in SPLITS.get(pre, ())
    ]
    if pre in ("smollm", "deepseek-coder", "deepseek-llm"):
        parts.append(pre_tokenizers.Digits(individual_digits=True))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre not in SPLITS)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*parts, byte_level])
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

    reference = byte_level_reference(pre if pre in KINDS else "gpt-2")
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
