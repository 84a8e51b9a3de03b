"""The server's flags are its settings, and what can never work is refused in words."""

import argparse
import dataclasses
import math
from typing import Any

import msgspec
import pytest

from stageline.config import environment
from stageline.config.engine_config import EngineConfig
from stageline.config.flags import (
    add_engine_flags,
    add_serve_flags,
    engine_config_from_args,
    serve_config_from_args,
)
from stageline.config.serve_config import ServeConfig
from stageline.errors import ConfigError


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_engine_flags(parser)
    add_serve_flags(parser)
    return parser


def _parse(*argv: str) -> ServeConfig:
    return serve_config_from_args(_parser().parse_args(["m", *argv]))


def test_without_flags_every_default_is_the_settings_own() -> None:
    assert _parse() == ServeConfig()
    assert engine_config_from_args(_parser().parse_args(["m"])) == EngineConfig(model="m")


def test_every_setting_has_a_flag_and_a_help_text() -> None:
    actions = {action.dest: action for action in _parser()._actions}
    for field in dataclasses.fields(ServeConfig):
        assert actions[field.name].help, field.name
        assert "--" + field.name.replace("_", "-") in actions[field.name].option_strings
    text = " ".join(_parser().format_help().split())
    assert "default: ()" not in text and "default: )" not in text and "default: None" not in text


def test_what_may_be_repeated_is_gathered_from_lists_and_repetitions() -> None:
    config = _parse("--api-key", "a,b", "--api-key", "c", "--served-model-name", "x", "--port", "0")
    assert config.api_key == ("a", "b", "c")
    assert config.served_model_name == ("x",)
    assert _parse().api_key == (), "one command line must not leave keys to the next"


def test_the_configuration_survives_the_way_to_another_process() -> None:
    config = _parse("--api-key", "a,b", "--request-timeout-s", "3", "--warmup")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=ServeConfig) == config


def test_keys_of_the_environment() -> None:
    assert environment.api_keys({"STAGELINE_API_KEY": "a, b,"}) == ("a", "b")
    assert environment.api_keys({}) == ()


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"port": 65536}, "--port is 65536; it must be between 0 and 65535"),
        ({"port": -1}, "--port is -1; it must be between 0 and 65535"),
        ({"port": "8000"}, "--port is '8000'; it must be of type int"),
        ({"host": " "}, "--host is empty; give an address of this machine, such as 127.0.0.1"),
        ({"api_server_count": 0}, "--api-server-count is 0; it must be an integer of at least 1"),
        ({"api_key": ["a"]}, "--api-key is ['a']; it must be a tuple of str"),
        ({"api_key": ("a", "")}, "--api-key has an empty entry; give a value or leave the flag out"),
        (
            {"api_key": ("schlüssel",)},
            "--api-key must be of printable ASCII characters without spaces: a header carries it",
        ),
        (
            {"ssl_keyfile": "k"},
            "--ssl-keyfile is given without --ssl-certfile; give both, or neither for plain HTTP",
        ),
        ({"root_path": "llm"}, "--root-path is 'llm'; it must begin with /, as /llm does"),
        ({"read_timeout_s": 0}, "--read-timeout-s is 0; it must be above 0 seconds"),
        ({"drain_timeout_s": math.nan}, "--drain-timeout-s is nan; it must be at least 0 seconds"),
        (
            {"request_timeout_s": -1.0},
            "--request-timeout-s is -1.0; it must be above 0 seconds, or left out for none",
        ),
        ({"max_body_bytes": 10}, "--max-body-bytes is 10; it must be an integer of at least 1024"),
    ],
    ids=str,
)
def test_a_setting_that_can_never_work_is_refused_in_words(setting: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        ServeConfig(**setting).check()
    assert str(refused.value) == words
