"""Flags are the settings: same names, types and defaults, and what a user types is what the engine gets."""

import argparse
import dataclasses
import math
from typing import Any

import pytest

from stageline import LLM
from stageline.config.engine_config import EngineConfig
from stageline.config.flags import add_engine_flags, engine_config_from_args
from stageline.config.keyword_settings import own_settings
from stageline.errors import ConfigError


def _parse(*argv: str) -> EngineConfig:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_engine_flags(parser)
    return engine_config_from_args(parser.parse_args(argv))


def test_without_flags_every_default_is_the_settings_own() -> None:
    assert _parse("model.gguf") == EngineConfig(model="model.gguf")


def test_every_setting_has_a_flag_and_a_help_text() -> None:
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    actions = {action.dest: action for action in parser._actions}
    for field in dataclasses.fields(EngineConfig):
        assert actions[field.name].help, field.name
        if field.name != "model":
            assert "--" + field.name.replace("_", "-") in actions[field.name].option_strings


def test_values_arrive_with_their_types() -> None:
    config = _parse(
        "m", "-pp", "3", "--pp-layer-partition", "1,28,1", "--heartbeat-timeout-s", "2.5", "--kv-cache-memory", "64MiB",
        "--max-model-len", "512", "--distributed-executor-backend", "in_process",
    )  # fmt: skip
    assert config.pipeline_parallel_size == 3
    assert config.pp_layer_partition == "1,28,1"
    assert config.heartbeat_timeout_s == 2.5
    assert config.max_model_len == 512
    assert config.distributed_executor_backend == "in_process"
    assert _parse("m", "--pipeline-parallel-size", "3").pipeline_parallel_size == 3


def test_what_is_on_by_default_can_be_switched_off() -> None:
    assert _parse("m").enable_prefix_caching is True
    assert _parse("m", "--no-enable-prefix-caching").enable_prefix_caching is False
    assert _parse("m", "--no-enable-prefix-caching", "--enable-prefix-caching").enable_prefix_caching is True


def test_help_shows_each_default_once(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser(prog="x")
    add_engine_flags(parser)
    text = " ".join(parser.format_help().split())
    assert "tokens per KV cache block (default: 16)" in text
    assert "its own CPU cores when there are enough (default: on)" in text
    assert "default: None" not in text and "SUPPRESS" not in text
    for heading in ("model:", "pipeline:", "memory:", "scheduling:"):
        assert heading in text


def test_a_value_that_cannot_work_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--pipeline-parallel-size is 0"):
        _parse("m", "-pp", "0")


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"kv_cache_memory": 0.3}, "--kv-cache-memory is 0.3; it must be of type str; give '0.3'"),
        ({"kv_cache_memory": 2**30}, "--kv-cache-memory is 1073741824; it must be of type str; give '1073741824'"),
        ({"pp_layer_partition": [2, 2]}, "--pp-layer-partition is [2, 2]; it must be of type str; give '2,2'"),
        ({"quantization": None}, "--quantization is None; it must be of type str; choose from none, int8"),
        ({"pipeline_parallel_size": 2.0}, "--pipeline-parallel-size is 2.0; it must be of type int"),
        ({"max_num_seqs": True}, "--max-num-seqs is True; it must be of type int"),
        ({"bind_cores": 1}, "--bind-cores is 1; it must be of type bool"),
        ({"model": None}, "--model is None; it must be of type str"),
        ({"max_model_len": 1}, "--max-model-len is 1; it must be an integer of at least 2"),
        ({"heartbeat_timeout_s": 0.09}, "--heartbeat-timeout-s is 0.09; it must be at least 0.1 seconds"),
        ({"heartbeat_timeout_s": math.nan}, "--heartbeat-timeout-s is nan; it must be at least 0.1 seconds"),
        ({"model": ""}, "the model's name is empty; give a Hugging Face directory, a GGUF file, or a name on the hub"),
        (
            {"pp_layer_partition": " "},
            "--pp-layer-partition is empty; give the layers of each stage, such as 16,14, or leave it out",
        ),
    ],
    ids=str,
)
def test_a_setting_that_can_never_work_is_refused_in_words(setting: dict[str, Any], words: str) -> None:
    """Python code is not checked by a parser of flags."""
    with pytest.raises(ConfigError) as refused:
        EngineConfig(**{"model": "m", **setting}).check()
    assert str(refused.value) == words


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"gpu_memory_utilization": 0.9}, "gpu_memory_utilization=0.9 is not supported: the KV cache is sized with"),
        ({"enable_lora": True}, "enable_lora=True is not supported: LoRA adapters are not applied"),
        ({"dtype": "half"}, "dtype='half' is not supported: write float16"),
        ({"pp": 2}, "pp is no setting; did you mean pipeline_parallel_size?"),
        ({"max_modle_len": 2}, "max_modle_len is no setting; did you mean max_model_len?"),
        ({"zzz": 2}, "zzz is no setting; `stageline generate --help` lists them, as flags"),
    ],
    ids=str,
)
def test_an_argument_that_is_none_is_refused_in_the_words_of_flags(setting: dict[str, Any], words: str) -> None:
    """Before anything is opened: the model does not exist."""
    with pytest.raises(ConfigError) as refused:
        LLM("m", **setting)
    assert str(refused.value).startswith(words)


def test_an_argument_of_vllm_that_changes_nothing_is_taken_with_a_note() -> None:
    given = {"swap_space": 4, "enforce_eager": True, "trust_remote_code": False, "revision": None, "cpu_offload_gb": 0}
    own, notes = own_settings({**given, "block_size": 32}, EngineConfig.__dataclass_fields__)
    assert own == {"block_size": 32}
    taken = ["swap_space=4", "enforce_eager=True", "cpu_offload_gb=0"]
    assert [note.partition(" changes nothing: ")[0] for note in notes] == taken


def test_a_whole_number_of_seconds_is_a_time() -> None:
    assert EngineConfig(model="m", heartbeat_timeout_s=3).check().heartbeat_timeout_s == 3
