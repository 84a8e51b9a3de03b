"""Chat templates: found wherever a checkpoint keeps them, rendered in a sandbox, and refused with the field's name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stageline.checkpoint import open_checkpoint
from stageline.checkpoint.tokenizer import Tokenizer, load_tokenizer
from stageline.errors import CheckpointError, ConfigError, RequestError
from tests.unit.checkpoint_files import write_hf_directory
from tests.unit.tokenizer_files import byte_level_reference, write_byte_level_gguf

TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ eos_token }}"
MESSAGES = [{"role": "user", "content": "hi"}]
RENDERED = "<|begin|>[user]hi<|end|>"


def directory_with(directory: Path, tokenizer_config: dict[str, Any], files: dict[str, str] | None = None) -> Path:
    write_hf_directory(directory)
    byte_level_reference("gpt-2").save(str(directory / "tokenizer.json"))
    special = {"bos_token": "<|begin|>", "eos_token": {"content": "<|end|>", "lstrip": False}}
    (directory / "tokenizer_config.json").write_text(json.dumps({**special, **tokenizer_config}))
    for name, text in (files or {}).items():
        (directory / name).write_text(text)
    return directory


def load(directory: Path, chat_template: str | None = None) -> Tokenizer:
    return load_tokenizer(open_checkpoint(str(directory)), None, chat_template)


def rendered_by(template: str, tmp_path: Path, **variables: Any) -> str:
    return load(directory_with(tmp_path, {}), template).apply_chat_template(MESSAGES, **variables)


@pytest.mark.parametrize(
    ("config", "files"),
    [
        ({"chat_template": TEMPLATE}, {}),
        ({"chat_template": [{"name": "rag", "template": "no"}, {"name": "default", "template": TEMPLATE}]}, {}),
        ({"chat_template": [{"name": "only", "template": TEMPLATE}]}, {}),
        ({"chat_template": "no"}, {"chat_template.jinja": TEMPLATE}),
        ({}, {"chat_template.json": json.dumps({"chat_template": TEMPLATE})}),
    ],
)
def test_the_template_is_found_in_every_place(tmp_path: Path, config: dict[str, Any], files: dict[str, str]) -> None:
    assert load(directory_with(tmp_path, config, files)).apply_chat_template(MESSAGES) == RENDERED


def test_a_gguf_file_carries_its_template(tmp_path: Path) -> None:
    tokenizer = load(write_byte_level_gguf(tmp_path / "m.gguf", chat_template=TEMPLATE))
    assert tokenizer.apply_chat_template(MESSAGES) == RENDERED


def test_a_given_template_wins_as_a_file_or_as_text(tmp_path: Path) -> None:
    directory = directory_with(tmp_path / "m", {"chat_template": "no"})
    (tmp_path / "given.jinja").write_text(TEMPLATE)
    assert load(directory, str(tmp_path / "given.jinja")).apply_chat_template(MESSAGES) == RENDERED
    assert load(directory, TEMPLATE).apply_chat_template(MESSAGES) == RENDERED
    with pytest.raises(ConfigError, match=r"missing\.jinja does not exist"):
        load(directory, str(tmp_path / "missing.jinja"))


def test_tools_choose_the_template_for_tools(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | length }} tools"}]
    tokenizer = load(directory_with(tmp_path, {"chat_template": named}))
    assert tokenizer.apply_chat_template(MESSAGES) == "plain"
    assert tokenizer.apply_chat_template(MESSAGES, tools=[{}, {}]) == "2 tools"


def test_special_tokens_are_not_added_twice(tmp_path: Path) -> None:
    tokenizer = load(write_byte_level_gguf(tmp_path / "m.gguf", "llama-bpe", TEMPLATE))
    ids = tokenizer.encode_chat(MESSAGES)
    assert tokenizer.decode(ids, False) == RENDERED
    assert ids.count(tokenizer.encode("<|begin|>", add_special_tokens=False)[0]) == 1


def test_no_template_names_the_flag(tmp_path: Path) -> None:
    tokenizer = load(directory_with(tmp_path, {}))
    assert tokenizer.chat_template_sources == []
    with pytest.raises(RequestError, match="--chat-template") as error:
        tokenizer.apply_chat_template(MESSAGES)
    assert error.value.field == "messages"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1"),
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("    {% if true %}\nx\n    {% endif %}\n", "x\n"),
        ("{% generation %}x{% endgeneration %}", "x"),
        ("{% if tools is none and documents is none %}none{% endif %}", "none"),
        ("{{ add_generation_prompt }}", "True"),
    ],
)
def test_the_environment_is_the_one_templates_expect(tmp_path: Path, template: str, expected: str) -> None:
    assert rendered_by(template, tmp_path) == expected


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].content.nothing.more }}",
        "{{ 1 / 0 }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
    ],
)
def test_what_a_template_refuses_or_may_not_do_is_a_request_error(tmp_path: Path, template: str) -> None:
    with pytest.raises(RequestError) as error:
        rendered_by(template, tmp_path)
    assert error.value.field == "messages"


def test_a_template_that_does_not_compile_is_refused_at_start(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"does not compile.*--chat-template"):
        load(directory_with(tmp_path, {"chat_template": "{% if %}"}))


def test_a_given_template_that_does_not_compile_is_refused_by_its_file(tmp_path: Path) -> None:
    given = tmp_path / "given.jinja"
    given.write_text("{% if %}")
    directory = directory_with(tmp_path / "m", {"chat_template": TEMPLATE})
    with pytest.raises(CheckpointError) as error:
        load(directory, str(given))
    assert str(given) in str(error.value) and str(directory) not in str(error.value)


@pytest.mark.parametrize("messages", [[], "hi", {"role": "user"}, ["hi"], [{"content": "x"}], [{"role": 1}]])
def test_malformed_messages_are_refused(tmp_path: Path, messages: Any) -> None:
    with pytest.raises(RequestError) as error:
        load(directory_with(tmp_path, {}), TEMPLATE).apply_chat_template(messages)
    assert error.value.field == "messages"


def test_a_directory_without_a_fast_tokenizer_says_so(tmp_path: Path) -> None:
    directory = write_hf_directory(tmp_path)
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json"):
        load(directory)
    (directory / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="not a tokenizer"):
        load(directory)


def test_truncation_left_over_from_training_is_ignored(tmp_path: Path) -> None:
    directory = directory_with(tmp_path, {})
    backend = byte_level_reference("gpt-2")
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    backend.save(str(directory / "tokenizer.json"))
    text = "the quick brown fox jumps"
    assert load(directory).encode(text) == byte_level_reference("gpt-2").encode(text).ids
