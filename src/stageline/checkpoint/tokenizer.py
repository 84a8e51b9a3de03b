"""Text to token ids and back, and conversations to prompts. The same class for both kinds of checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import tokenizers

from stageline.checkpoint import hf_tokenizer
from stageline.checkpoint.chat_template import FIELD, ChatTemplate
from stageline.checkpoint.checkpoint import Checkpoint
from stageline.checkpoint.decode_stream import REPLACEMENT, DecodeStream
from stageline.checkpoint.gguf_container import is_gguf
from stageline.checkpoint.gguf_parts import first_part, only_model
from stageline.checkpoint.gguf_tokenizer import load_gguf_tokenizer
from stageline.checkpoint.token_pieces import piece_bytes
from stageline.errors import CheckpointError, ConfigError, RequestError


def load_tokenizer(checkpoint: Checkpoint, tokenizer: str | None = None, chat_template: str | None = None) -> Tokenizer:
    """The checkpoint's tokenizer, or another's.

    Args:
        tokenizer: a directory, a tokenizer.json or a GGUF file (or its directory) to take it from instead.
        chat_template: a file with a Jinja template, or the template itself, to use instead.
    Raises: CheckpointError, or ConfigError for a chat template file that does not exist.
    """
    origin = Path(tokenizer).expanduser() if tokenizer else Path(checkpoint.path)
    if not origin.exists():
        raise CheckpointError(f"--tokenizer {tokenizer} does not exist; give a directory, tokenizer.json or GGUF file")
    if tokenizer and origin.is_dir() and not (origin / hf_tokenizer.TOKENIZER).is_file():
        origin = only_model(origin) or origin
    templates: Mapping[str, str]
    if origin.is_file() and is_gguf(origin):
        loaded = load_gguf_tokenizer(first_part(origin))
        backend, special_tokens, templates = loaded.backend, loaded.special_tokens, loaded.chat_templates
    else:
        directory = origin if origin.is_dir() else origin.parent
        backend = hf_tokenizer.load_backend(origin / hf_tokenizer.TOKENIZER if origin.is_dir() else origin)
        special_tokens, templates = hf_tokenizer.special_tokens(directory), hf_tokenizer.chat_templates(directory)
    if chat_template is None:
        compiled = {name: ChatTemplate(source, f"of {origin}") for name, source in templates.items()}
    else:
        compiled = {"default": _given_template(chat_template)}
    return Tokenizer(backend, special_tokens, compiled, str(origin))


def _given_template(chat_template: str) -> ChatTemplate:
    if "{{" in chat_template or "{%" in chat_template:
        return ChatTemplate(chat_template, "given as text")
    path = Path(chat_template).expanduser()
    if not path.is_file():
        raise ConfigError(f"--chat-template {chat_template} does not exist; give a file with a Jinja template")
    return ChatTemplate(hf_tokenizer.read_text(path), f"in {chat_template}")


class Tokenizer:
    """Args:
    special_tokens: texts by name, such as "bos_token"; chat templates may use them.
    chat_templates: by name; "default" is used unless "tool_use" exists and there are tools.
    origin: what to call the checkpoint in messages.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: Mapping[str, str],
        chat_templates: Mapping[str, ChatTemplate],
        origin: str,
    ) -> None:
        self._backend = backend
        self._special_tokens = dict(special_tokens)
        self._templates = dict(chat_templates)
        self._origin = origin

    @property
    def vocab_size(self) -> int:
        """Tokens that have a text; the model's vocabulary may be padded beyond."""
        return int(self._backend.get_vocab_size(with_added_tokens=True))

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """Texts by name, such as "eos_token"."""
        return self._special_tokens

    @property
    def chat_template_sources(self) -> list[str]:
        """The templates' Jinja texts: they show what a model's answers look like."""
        return [template.source for template in self._templates.values()]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Special tokens that stand in the text become their ids either way."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Ids without a text are left out; bytes that are no text become U+FFFD."""
        return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def token_text(self, token_id: int) -> str:
        """One token by itself, its leading space included; empty for an id without a text."""
        piece = self._backend.id_to_token(token_id)
        if piece is None:
            return ""
        text = self.decode([token_id], skip_special_tokens=False)
        return " " + text if piece.startswith("▁") and not text.startswith(" ") else text

    def token_bytes(self, token_id: int) -> bytes:
        """One token's bytes, also where they are a part of a character; joined with its neighbours' they are text."""
        text = self.token_text(token_id)
        if REPLACEMENT not in text:
            return text.encode()
        return piece_bytes(self._backend.id_to_token(token_id) or "")

    @property
    def longest_token_bytes(self) -> int:
        """No token stands for more bytes of text; it may be that none stands for as many."""
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        return max((len(piece.encode()) for piece in vocabulary), default=1)

    def serialized(self) -> str:
        """All of it but the chat templates, in the form of a tokenizer.json."""
        return str(self._backend.to_str())

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """Args:
            kwargs: further variables for the template, such as `tools`.
        Raises: RequestError (field "messages").
        """
        return self._template(kwargs).render(messages, add_generation_prompt, {**self._special_tokens, **kwargs})

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **kwargs: Any
    ) -> list[int]:
        """The conversation as token ids. The template writes the special tokens itself, so none are added."""
        text = self.apply_chat_template(messages, add_generation_prompt, **kwargs)
        return self.encode(text, add_special_tokens=False)

    def new_decode_stream(self, skip_special_tokens: bool = True, prompt_token_ids: Sequence[int] = ()) -> DecodeStream:
        """Text of tokens as they come, after the prompt."""
        return DecodeStream(partial(self.decode, skip_special_tokens=skip_special_tokens), prompt_token_ids)

    def _template(self, variables: Mapping[str, Any]) -> ChatTemplate:
        if not self._templates:
            raise RequestError(f"{self._origin} has no chat template; start with --chat-template FILE", FIELD)
        wanted = "tool_use" if variables.get("tools") and "tool_use" in self._templates else "default"
        if wanted not in self._templates and len(self._templates) == 1:
            return next(iter(self._templates.values()))
        if wanted not in self._templates:
            names = ", ".join(self._templates)
            raise RequestError(f"{self._origin} has chat templates {names}, none default; use --chat-template", FIELD)
        return self._templates[wanted]
