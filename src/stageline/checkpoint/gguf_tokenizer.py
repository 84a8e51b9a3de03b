"""The tokenizer that a GGUF file's metadata describe, built for the `tokenizers` library.

Two models: "gpt2", byte-level BPE with merges, whose pre-tokenizer is named by `tokenizer.ggml.pre`; and "llama",
SentencePiece BPE, whose merges follow from the tokens' scores. Built to agree with the models' own tokenizer.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from stageline.checkpoint.fields import Fields
from stageline.checkpoint.gguf_container import read_gguf
from stageline.checkpoint.gguf_pre_tokenizers import PRE_TOKENIZERS
from stageline.errors import CheckpointError

# Source: enum llama_token_type in llama.h.
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_SPACE = "▁"
T = TypeVar("T")


@dataclass(frozen=True)
class GgufTokenizer:
    """What a GGUF file says about text.

    Args:
        special_tokens: texts by transformers' names, such as "bos_token".
        chat_templates: by name; the plain one is "default".
    """

    backend: Tokenizer
    special_tokens: Mapping[str, str]
    chat_templates: Mapping[str, str]


@dataclass(frozen=True)
class _Vocabulary:
    tokens: list[str]
    types: list[int]
    ids: dict[str, int]


def load_gguf_tokenizer(path: Path) -> GgufTokenizer:
    """Raises: CheckpointError if the metadata are incomplete, inconsistent, or of a kind that is not supported."""
    metadata = read_gguf(path, with_vocabulary=True).metadata
    fields = Fields(metadata, str(path))
    vocabulary = _vocabulary(fields)
    model, has_prefix_space = fields.string("tokenizer.ggml.model"), True
    try:
        if model == "gpt2":
            backend, adds_bos = _byte_level(fields, vocabulary)
        elif model == "llama":
            has_prefix_space = fields.boolean("tokenizer.ggml.add_space_prefix", True)
            vocabulary = vocabulary if has_prefix_space else _with_escaped_spaces(vocabulary)
            backend, adds_bos = _sentencepiece(fields, vocabulary, has_prefix_space), True
        else:
            raise CheckpointError(f"{path}: tokenizer model {model!r} is not supported; supported are gpt2, llama")
        _add_special_tokens(backend, vocabulary, is_normalized=model == "llama" and not has_prefix_space)
    except CheckpointError:
        raise
    except Exception as error:  # the library raises bare Exception for merges that name no token
        raise CheckpointError(f"{path}: its tokenizer cannot be built: {error}") from error
    special_tokens = _special_tokens(fields, vocabulary)
    adds_bos = fields.boolean("tokenizer.ggml.add_bos_token", adds_bos)
    _add_post_processor(backend, special_tokens, adds_bos, fields.boolean("tokenizer.ggml.add_eos_token", False))
    return GgufTokenizer(backend, special_tokens, _chat_templates(metadata))


def _vocabulary(fields: Fields) -> _Vocabulary:
    tokens: list[str] = _array(fields, "tokenizer.ggml.tokens", str)
    types: list[int] = _array(fields, "tokenizer.ggml.token_type", int, default=[1] * len(tokens))
    if len(types) != len(tokens):
        raise CheckpointError(f"{fields.source}: {len(tokens)} tokens but {len(types)} token types")
    return _Vocabulary(tokens, types, {token: token_id for token_id, token in enumerate(tokens)})


def _array(fields: Fields, key: str, kind: type[T], default: list[T] | None = None) -> list[T]:
    values = fields.raw(key)
    if values is None and default is not None:
        return default
    if not isinstance(values, list) or not values or not isinstance(values[0], kind):
        raise CheckpointError(f"{fields.source}: {key} is missing or not an array of {kind.__name__}")
    return values


def _byte_level(fields: Fields, vocabulary: _Vocabulary) -> tuple[Tokenizer, bool]:
    name = fields.string("tokenizer.ggml.pre", default="default")
    if name not in PRE_TOKENIZERS:
        raise CheckpointError(
            f"{fields.source}: pre-tokenizer {name!r} is not supported; supported are {', '.join(PRE_TOKENIZERS)}. "
            "Give the model's own tokenizer.json with --tokenizer"
        )
    pre = PRE_TOKENIZERS[name]
    merges = [_merge(fields, text) for text in _array(fields, "tokenizer.ggml.merges", str)]
    backend = Tokenizer(models.BPE(vocab=vocabulary.ids, merges=merges, ignore_merges=pre.ignore_merges))
    if pre.is_nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre.build()
    backend.decoder = decoders.ByteLevel()
    return backend, pre.adds_bos


def _merge(fields: Fields, text: str) -> tuple[str, str]:
    left, separator, right = text.partition(" ")
    if not (left and separator and right):
        raise CheckpointError(f"{fields.source}: tokenizer.ggml.merges holds {text!r}; each must be two tokens")
    return left, right


def _with_escaped_spaces(vocabulary: _Vocabulary) -> _Vocabulary:
    """User-defined tokens as SentencePiece finds them, which is in text whose spaces are escaped already."""
    typed = zip(vocabulary.tokens, vocabulary.types, strict=True)
    tokens = [token.replace(" ", _SPACE) if kind == _USER_DEFINED else token for token, kind in typed]
    return _Vocabulary(tokens, vocabulary.types, {token: token_id for token_id, token in enumerate(tokens)})


def _sentencepiece(fields: Fields, vocabulary: _Vocabulary, has_prefix_space: bool) -> Tokenizer:
    scores: list[float] = _array(fields, "tokenizer.ggml.scores", float)
    if len(scores) != len(vocabulary.tokens):
        raise CheckpointError(f"{fields.source}: {len(vocabulary.tokens)} tokens but {len(scores)} scores")
    unknown_id = fields.integer("tokenizer.ggml.unknown_token_id", default=0, lowest=0)
    model = models.BPE(
        vocab=vocabulary.ids,
        merges=_merges_of_scores(vocabulary, scores),
        unk_token=_token_text(fields, vocabulary, "tokenizer.ggml.unknown_token_id", unknown_id),
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = Tokenizer(model)
    prepend: list[normalizers.Normalizer] = [normalizers.Prepend(_SPACE)] if has_prefix_space else []
    backend.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", _SPACE)])
    strip: list[decoders.Decoder] = [decoders.Strip(" ", 1, 0)] if has_prefix_space else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def _merges_of_scores(vocabulary: _Vocabulary, scores: list[float]) -> list[tuple[str, str]]:
    """SentencePiece merges the pair whose result scores highest, BPE the pair that is listed first: so every way to cut
    a token into two tokens is listed, by that token's score."""
    ids, tokens, types = vocabulary.ids, vocabulary.tokens, vocabulary.types
    merges = []
    for token_id in sorted(range(len(tokens)), key=lambda token_id: -scores[token_id]):
        if types[token_id] in (_UNKNOWN, _CONTROL):
            continue
        token = tokens[token_id]
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                merges.append((left, right))
    return merges


def _add_special_tokens(backend: Tokenizer, vocabulary: _Vocabulary, is_normalized: bool) -> None:
    """Tokens that are found whole in text: control tokens are special, user-defined ones are not.

    Args:
        is_normalized: whether user-defined ones are looked for behind the normaliser.
    """
    typed = list(zip(vocabulary.tokens, vocabulary.types, strict=True))
    special = [token for token, kind in typed if kind in (_CONTROL, _UNKNOWN)]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    user_defined = [token for token, kind in typed if kind == _USER_DEFINED]
    backend.add_tokens([AddedToken(token, normalized=is_normalized, special=False) for token in user_defined])


def _special_tokens(fields: Fields, vocabulary: _Vocabulary) -> dict[str, str]:
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    special_tokens = {}
    for name, ggml_name in names.items():
        key = f"tokenizer.ggml.{ggml_name}_token_id"
        if fields.has(key):
            special_tokens[name] = _token_text(fields, vocabulary, key, fields.integer(key, lowest=0))
    return special_tokens


def _token_text(fields: Fields, vocabulary: _Vocabulary, key: str, token_id: int) -> str:
    if token_id >= len(vocabulary.tokens):
        raise CheckpointError(f"{fields.source}: {key} is {token_id}; there are only {len(vocabulary.tokens)} tokens")
    return vocabulary.tokens[token_id]


def _add_post_processor(backend: Tokenizer, special_tokens: Mapping[str, str], has_bos: bool, has_eos: bool) -> None:
    before = [special_tokens["bos_token"]] if has_bos and "bos_token" in special_tokens else []
    after = [special_tokens["eos_token"]] if has_eos and "eos_token" in special_tokens else []
    if before or after:
        backend.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            special_tokens=[(token, backend.token_to_id(token)) for token in {*before, *after}],
        )


def _chat_templates(metadata: Mapping[str, object]) -> dict[str, str]:
    key = "tokenizer.chat_template"
    templates = {}
    for name, value in metadata.items():
        if isinstance(value, str) and (name == key or name.startswith(key + ".")):
            templates[name[len(key) + 1 :] or "default"] = value
    return templates
