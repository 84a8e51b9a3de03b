"""Configs of models with experts say what their papers say; numbers that cannot fit together are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest

from stageline.checkpoint.hf_config import spec_from_config
from stageline.checkpoint.model_spec import MlaSpec, ModelSpec
from stageline.errors import CheckpointError

SIZES: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 260,
    "max_position_embeddings": 256,
}
LATENT = {"kv_lora_rank": 24, "q_lora_rank": 20, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
DEEPSEEK = {
    **LATENT,
    "architectures": ["DeepseekV3ForCausalLM"],
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
_COMPRESSED = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}},
}
_AS_V2 = {"scoring_func": "softmax", "topk_method": "greedy"}


def spec_of(**values: object) -> ModelSpec:
    return spec_from_config({**SIZES, **values}, {}, "config.json", "float32")


def test_deepseek_v3_as_released() -> None:
    spec = spec_of(**DEEPSEEK)
    assert spec.mla == MlaSpec(
        q_lora_rank=20, kv_lora_rank=24, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12
    )
    assert spec.mla.row_size == 32
    assert spec.moe is not None
    assert (spec.moe.scoring, spec.moe.has_selection_bias, spec.moe.group_score_experts) == ("sigmoid", True, 2)
    assert (spec.moe.num_groups, spec.moe.num_groups_per_token, spec.moe.shared_intermediate_size) == (4, 2, 64)
    assert [spec.has_experts(layer) for layer in range(4)] == [False, False, True, True]
    assert spec.rope.kind == "yarn" and spec.rope.rotary_dim == 8 and spec.rope.magnitude == 1.0
    assert spec.attention_scale == pytest.approx(24**-0.5 * (0.1 * math.log(40) + 1) ** 2)


def test_qwen_says_which_layers_are_dense() -> None:
    spec = spec_of(
        architectures=["Qwen3MoeForCausalLM"],
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        decoder_sparse_step=2,
        mlp_only_layers=[3],
        norm_topk_prob=True,
    )
    assert [spec.has_experts(layer) for layer in range(4)] == [False, True, False, False]


def test_gpt_oss_has_windows_on_every_other_layer_and_stretched_positions_by_default() -> None:
    spec = spec_of(architectures=["GptOssForCausalLM"], num_local_experts=4, experts_per_token=2)
    assert spec.layer_windows == (128, None, 128, None)
    assert (spec.rope.kind, spec.rope.factor, spec.rope.rounds_ramp) == ("yarn", 32.0, False)
    assert spec.has_sinks and spec.moe is not None and spec.moe.has_bias
    assert spec.moe.num_experts_per_token == 2


def test_no_rotation_of_what_matrices_are_multiplied_with_is_nothing_to_refuse() -> None:
    quantization = {**_COMPRESSED, "transform_config": {"config_groups": {}}}
    assert spec_of(**{**DEEPSEEK, "quantization_config": quantization}).family == "deepseek"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"n_group": 3}, ["8 experts", "3 groups"]),
        ({"num_experts_per_tok": 5}, ["5 experts", "2 groups of 2"]),
        ({"topk_group": 5}, ["4 groups", "5"]),
        ({"n_routed_experts": 2048}, ["2048", "1024"]),
        ({"scoring_func": "softmax"}, ["softmax", "sigmoid"]),
        ({"qk_rope_head_dim": 7}, ["qk_rope_head_dim", "even"]),
        ({"kv_lora_rank": None}, ["kv_lora_rank", "missing"]),
        ({"use_bidirectional_attention": True}, ["use_bidirectional_attention", "token by token"]),
        ({"quantization_config": {**_COMPRESSED, "transform_config": {"config_groups": {"u": 1}}}}, ["rotates"]),
        ({"architectures": ["DeepseekV2ForCausalLM"], **_AS_V2, "mlp_bias": True}, ["mlp_bias", "DeepSeek-V2"]),
    ],
)
def test_what_does_not_fit_together_is_refused_with_the_numbers(changes: dict[str, object], words: list[str]) -> None:
    with pytest.raises(CheckpointError) as error:
        spec_of(**{**DEEPSEEK, **changes})
    assert all(word in str(error.value) for word in words)
