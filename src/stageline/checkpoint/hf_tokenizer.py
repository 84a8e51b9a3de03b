"""The tokenizer of a Hugging Face directory: tokenizer.json, and the special tokens and chat templates beside it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tokenizers import Tokenizer

from stageline.checkpoint.fields import read_json_object
from stageline.checkpoint.hf_directory import read_optional_json
from stageline.errors import CheckpointError

TOKENIZER, TOKENIZER_CONFIG, SPECIAL_TOKENS_MAP = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
CHAT_TEMPLATE, CHAT_TEMPLATE_JSON = "chat_template.jinja", "chat_template.json"
SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def load_backend(path: Path) -> Tokenizer:
    """Args: path: a tokenizer.json. Raises: CheckpointError."""
    if not path.is_file():
        raise CheckpointError(
            f"{path.parent} has no {path.name}; slow tokenizers (tokenizer.model) are not supported: save the fast "
            "one, or give one with --tokenizer"
        )
    try:
        backend = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise CheckpointError(f"{path} is not a tokenizer that can be read: {error}") from error
    # Settings of somebody's training run; they would silently cut or pad prompts.
    backend.no_truncation()
    backend.no_padding()
    return backend


def special_tokens(directory: Path) -> dict[str, str]:
    """Texts by name, such as "bos_token"; tokenizer_config.json wins over special_tokens_map.json."""
    found: dict[str, str] = {}
    for file_name in (SPECIAL_TOKENS_MAP, TOKENIZER_CONFIG):
        values = read_optional_json(directory / file_name)
        for name in SPECIAL_TOKEN_NAMES:
            value = values.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found[name] = text
    return found


def chat_templates(directory: Path) -> Mapping[str, str]:
    """Templates by name; a lone one is "default". The file wins over the one in tokenizer_config.json."""
    if (path := directory / CHAT_TEMPLATE).is_file():
        return {"default": read_text(path)}
    if (path := directory / CHAT_TEMPLATE_JSON).is_file():
        return _named_templates(path, read_json_object(path).get("chat_template"))
    path = directory / TOKENIZER_CONFIG
    return _named_templates(path, read_optional_json(path).get("chat_template"))


def read_text(path: Path) -> str:
    """Raises: CheckpointError."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8 text: {error}") from error
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error


def _named_templates(path: Path, value: object) -> dict[str, str]:
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    templates: dict[str, str] = {}
    for item in value if isinstance(value, list) else [value]:
        name, template = (item.get("name"), item.get("template")) if isinstance(item, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(template, str):
            raise CheckpointError(f"{path}: chat_template must be a string or a list of names and templates")
        templates[name] = template
    return templates
