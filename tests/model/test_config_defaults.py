"""A config.json says to us what it says to `transformers`, whatever of it is left out or written in an older way."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from stageline.checkpoint.hf_config import spec_from_config
from stageline.checkpoint.model_spec import ModelSpec
from stageline.errors import CheckpointError
from tests.model.tiny_experts import EXPERT_FAMILIES
from tests.model.tiny_families import FAMILIES, SIZES, WINDOW, TinyFamily
from tests.tiny_models import LLAMA3_ROPE

ALL_FAMILIES = {**FAMILIES, **EXPERT_FAMILIES}
# Whose absence means nothing about the model's shape: an end of text that a config does not name may be elsewhere.
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
NAMES = ("architectures", "model_type")
WINDOWS = {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": None}


def in_full(family: TinyFamily, values: dict[str, Any]) -> dict[str, Any]:
    """config.json as `transformers` understands these values, with everything it assumes."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = AutoConfig.for_model(family.model_type, **deepcopy(values)).to_dict()
    return {**config, "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family.model_type]]}


def spec_of(config: dict[str, Any]) -> ModelSpec:
    return spec_from_config(config, {}, "config.json", "float32")


def outcome(config: dict[str, Any]) -> ModelSpec | str:
    """The spec, or why it is refused."""
    try:
        return spec_of(config)
    except CheckpointError as refused:
        return str(refused)


@pytest.mark.parametrize("name", ALL_FAMILIES)
def test_what_a_config_leaves_out_is_what_transformers_assumes(name: str) -> None:
    family = ALL_FAMILIES[name]
    for values in (family.config, {**family.config, **WINDOWS}):
        config = in_full(family, {**SIZES, **values})
        for left_out in config.keys() - {*SPECIAL_TOKENS, *NAMES}:
            part = {key: value for key, value in config.items() if key != left_out}
            found = outcome(part)
            if isinstance(found, str) and "is missing" in found:
                continue  # what has no usual value must be said
            expected = outcome(in_full(family, {key: value for key, value in part.items() if key not in NAMES}))
            assert found == expected, f"without {left_out}"


_YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 64, "beta_fast": 16, "beta_slow": 2}
OLDER_SPELLINGS: dict[str, dict[str, Any]] = {
    "llama": {"rope_theta": 5e5, "rope_scaling": LLAMA3_ROPE},
    "qwen2": {"rope_theta": 1e6, "rope_scaling": _YARN},
    "mistral": {"rope_theta": 1e6, "rope_scaling": None},
    "gemma3": {
        "rope_theta": 2e6,
        "rope_local_base_freq": 3e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window_pattern": 3,
        "layer_types": None,
    },
    "phi3 longrope": {
        "rope_scaling": {"type": "longrope", "short_factor": [1.5] * 8, "long_factor": [2.0] * 8},
    },
    "glm4": {"rope_theta": 2e4, "partial_rotary_factor": 0.25},
    "smollm3": {"rope_theta": 5e6, "no_rope_layers": None, "no_rope_layer_interval": 2},
    "mixtral": {"rope_theta": 5e5},
    "deepseek v3": {"rope_scaling": {**_YARN, "mscale": 1.0, "mscale_all_dim": 0.8}},
    "gpt-oss": {"rope_theta": 2e5, "rope_scaling": {**_YARN, "truncate": False}},
}


@pytest.mark.parametrize("name", OLDER_SPELLINGS)
def test_configs_as_they_were_released_say_what_they_say_now(name: str) -> None:
    family = ALL_FAMILIES[name]
    values = {**SIZES, **family.config, **OLDER_SPELLINGS[name]}
    del values["rope_parameters"]
    now = in_full(family, values)
    assert "rope_scaling" not in now and now["rope_parameters"]
    assert spec_of({**values, "architectures": now["architectures"]}) == spec_of(now)
