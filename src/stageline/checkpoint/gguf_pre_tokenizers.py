"""How text is cut before byte-level BPE merges anything, by the name that a GGUF file gives under `tokenizer.ggml.pre`.

One idea: a name stands for the pre-tokenizer of some published tokenizer.json, rebuilt here with the same parts. Only
names whose original is known are here: a cut that is nearly right gives tokens that the model has hardly seen, and
nothing tells of it.
Sources: the tokenizer.json of Llama 3, Qwen2, gpt-oss, SmolLM2, DeepSeek-LLM, DeepSeek-Coder and DeepSeek-V3; Mistral's
tekken.json in mistral-common; src/llama-vocab.cpp in the llama.cpp repository for the names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

_BEFORE_NUMBER = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_AFTER_NUMBER = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3_PATTERN = _BEFORE_NUMBER + r"\p{N}{1,3}" + _AFTER_NUMBER
_QWEN2_PATTERN = _BEFORE_NUMBER + r"\p{N}" + _AFTER_NUMBER

# OpenAI's o200k: words are cut where small letters end, and keep what is short for a word behind them. Mistral's
# tekken is the same with single digits and without the latter.
_BEFORE_WORD, _SHORT_WORD = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_NOT_SMALL, _NOT_CAPITAL = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_AFTER_DIGITS = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _words(behind: str) -> str:
    capitals_first = f"{_BEFORE_WORD}{_NOT_SMALL}*{_NOT_CAPITAL}+{behind}"
    return f"{capitals_first}|{_BEFORE_WORD}{_NOT_SMALL}+{_NOT_CAPITAL}*{behind}|"


_O200K_PATTERN = _words(_SHORT_WORD) + r"\p{N}{1,3}" + _AFTER_DIGITS
_TEKKEN_PATTERN = _words("") + r"\p{N}" + _AFTER_DIGITS

# DeepSeek-V3's, each within what the one before left.
_DEEPSEEK_V3_PATTERNS = (
    r"\p{N}{1,3}",
    r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"""
    r"\s*[\r\n]+|\s+(?!\S)|\s+",
)

# The letters with capitals that DeepSeek's first models know; neither Georgian's small ones nor Armenian's.
_CASED = """
41-5A 61-7A B5 C0-D6 D8-F6 F8-1BA 1BC-1BF 1C4-293 295-2AF 370-373 376 377 37B-37D 37F 386 388-38A 38C 38E-3A1 3A3-3F5
3F7-481 48A-52F 531-556 10A0-10C5 13A0-13F5 13F8-13FD 1C90-1CBA 1CBD-1CBF 1D00-1D2B 1D6B-1D77 1D79-1D9A 1E00-1F15
1F18-1F1D 1F20-1F45 1F48-1F4D 1F50-1F57 1F59 1F5B 1F5D 1F5F-1F7D 1F80-1FB4 1FB6-1FBC 1FBE 1FC2-1FC4 1FC6-1FCC 1FD0-1FD3
1FD6-1FDB 1FE0-1FEC 1FF2-1FF4 1FF6-1FFC 2102 2107 210A-2113 2115 2119-211D 2124 2126 2128 212A-212D 212F-2134 2139
213C-213F 2145-2149 214E 2183 2184 2C00-2C7B 2C7E-2CE4 2CEB-2CEE 2CF2 2CF3 A640-A66D A680-A69B A722-A76F A771-A787
A78B-A78E AB70-ABBF FB00-FB06 FB13-FB17 FF21-FF3A FF41-FF5A 10400-1044F 104B0-104D3 104D8-104FB 10C80-10CB2 10CC0-10CF2
118A0-118DF 1E900-1E943
"""
_CASED_CLASS = "".join("-".join(rf"\x{{{end}}}" for end in run.split("-")) for run in _CASED.split())
# Chinese, what lies before it, and Korean.
_NOT_ALPHABETIC = r"[\x{4E00}-\x{9FA5}\x{800}-\x{4E00}\x{AC00}-\x{D7FF}]+"
_DEEPSEEK_LLM_PATTERNS = (
    r"[\r\n]",
    rf"\s?[{_CASED_CLASS}]+",
    r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+",
    r"\s+$",
    _NOT_ALPHABETIC,
)
_DEEPSEEK_CODER_PATTERNS = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _NOT_ALPHABETIC)


@dataclass(frozen=True)
class PreTokenizer:
    """How text is cut before merging. `ignore_merges`: a piece that is a token is taken whole."""

    build: Callable[[], pre_tokenizers.PreTokenizer]
    ignore_merges: bool = False
    is_nfc: bool = False
    adds_bos: bool = False


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> pre_tokenizers.PreTokenizer:
    """Digits stand alone before anything else is cut, so a run of spaces before one stays a run."""
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _cut_at(*patterns: str, single_digits: bool = False) -> Callable[[], pre_tokenizers.PreTokenizer]:
    """Cut at what matches each pattern in turn; what matches is a piece, and so is what lies between."""

    def build() -> pre_tokenizers.PreTokenizer:
        parts: list[pre_tokenizers.PreTokenizer] = [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False) for pattern in patterns
        ]
        if single_digits:
            parts.append(pre_tokenizers.Digits(individual_digits=True))
        return pre_tokenizers.Sequence([*parts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    return build


_LLAMA3 = PreTokenizer(_cut_at(_LLAMA3_PATTERN), ignore_merges=True, adds_bos=True)
_QWEN2 = PreTokenizer(_cut_at(_QWEN2_PATTERN), is_nfc=True)
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer(_gpt2),
    "gpt-2": PreTokenizer(_gpt2),
    "smollm": PreTokenizer(_smollm),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "gpt-4o": PreTokenizer(_cut_at(_O200K_PATTERN), ignore_merges=True),
    "tekken": PreTokenizer(_cut_at(_TEKKEN_PATTERN), ignore_merges=True, adds_bos=True),
    "deepseek-llm": PreTokenizer(_cut_at(*_DEEPSEEK_LLM_PATTERNS, single_digits=True)),
    "deepseek-coder": PreTokenizer(_cut_at(*_DEEPSEEK_CODER_PATTERNS, single_digits=True)),
    "deepseek-v3": PreTokenizer(_cut_at(*_DEEPSEEK_V3_PATTERNS)),
}
