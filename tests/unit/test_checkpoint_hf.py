"""Hugging Face directories: what is understood, and what is refused with which words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stageline.checkpoint import RopeSpec, generation_defaults, open_checkpoint
from stageline.checkpoint.hf_config import spec_from_config
from stageline.errors import CheckpointError
from tests.unit.checkpoint_files import CONFIG, VOCAB, tensor_shapes, write_hf_directory, write_safetensors


def spec_of(directory: Path, **changes: Any) -> Any:
    return open_checkpoint(str(write_hf_directory(directory, changes))).spec


def test_a_plain_llama_is_read_with_all_its_numbers(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(write_hf_directory(tmp_path)))
    spec = checkpoint.spec
    assert (spec.family, spec.num_layers, spec.hidden_size, spec.num_heads, spec.num_kv_heads) == ("llama", 3, 64, 4, 2)
    assert (spec.head_dim, spec.intermediate_size, spec.vocab_size) == (16, 96, VOCAB)
    assert (spec.max_position_embeddings, spec.rms_norm_eps, spec.rope) == (512, 1e-5, RopeSpec())
    assert (spec.tie_word_embeddings, spec.sliding_window) == (False, None)
    assert spec.dtype == "float32"
    assert {name: entry.shape for name, entry in checkpoint.tensors.items()} == tensor_shapes()
    assert not checkpoint.is_gguf


def test_optional_values_have_the_defaults_of_transformers(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, num_key_value_heads=..., rms_norm_eps=..., hidden_act=..., tie_word_embeddings=...)
    assert (spec.num_kv_heads, spec.rms_norm_eps, spec.tie_word_embeddings) == (4, 1e-6, False)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rope_theta": 5e5}, RopeSpec(theta=5e5)),
        ({"rope_scaling": None}, RopeSpec()),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, RopeSpec(kind="linear", factor=2.0)),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4}}, RopeSpec(kind="linear", factor=4.0)),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, RopeSpec(theta=1e6)),
        (
            {
                "rope_theta": 5e5,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192,
                },
            },
            RopeSpec(theta=5e5, kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0),
        ),
    ],
)
def test_rope_is_read_in_every_spelling(tmp_path: Path, changes: dict[str, Any], expected: RopeSpec) -> None:
    assert spec_of(tmp_path, **changes).rope == expected


@pytest.mark.parametrize("name", ["longrope", "su", "yarn"])
def test_phi_3_is_read_as_released_with_code_that_is_not_run_and_by_any_name_of_its_longrope(
    tmp_path: Path, name: str
) -> None:
    released = {
        "architectures": ["Phi3ForCausalLM"],
        "auto_map": {"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"},
        "original_max_position_embeddings": 64,
        "rope_scaling": {"type": name, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
    }
    rope = spec_from_config({**CONFIG, **released}, {}, "config.json", "float32").rope
    assert (rope.kind, rope.factor, rope.frequency_divisors) == ("longrope", 8.0, (2.0,) * 8)


def test_biases_follow_the_architecture(tmp_path: Path) -> None:
    llama = spec_of(tmp_path / "a", attention_bias=True, mlp_bias=True)
    assert (llama.attention_bias, llama.attention_output_bias, llama.mlp_bias) == (True, True, True)
    qwen2 = spec_of(tmp_path / "b", architectures=["Qwen2ForCausalLM"], use_sliding_window=False, sliding_window=4096)
    assert (qwen2.attention_bias, qwen2.attention_output_bias, qwen2.mlp_bias) == (True, False, False)
    assert qwen2.sliding_window is None


@pytest.mark.parametrize(("value", "expected"), [(128, 128), (None, None), (..., 4096)])
def test_mistral_has_the_window_it_says(tmp_path: Path, value: Any, expected: int | None) -> None:
    assert spec_of(tmp_path, architectures=["MistralForCausalLM"], sliding_window=value).sliding_window == expected


def test_end_of_sequence_ids_of_both_files_are_merged(tmp_path: Path) -> None:
    write_hf_directory(tmp_path, {"eos_token_id": 7, "bos_token_id": 1})
    generation_config = {"eos_token_id": [9, 7], "temperature": 0.6, "top_k": 5}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation_config))
    checkpoint = open_checkpoint(str(tmp_path))
    assert (checkpoint.spec.eos_token_ids, checkpoint.spec.bos_token_id) == ((7, 9), 1)
    defaults = generation_defaults(checkpoint)
    assert (defaults.temperature, defaults.top_k, defaults.top_p) == (0.6, 5, None)


@pytest.mark.parametrize(("key", "value"), [("dtype", "float16"), ("torch_dtype", "torch.float16")])
def test_the_dtype_is_the_config_s_or_else_the_weights_own(tmp_path: Path, key: str, value: str) -> None:
    assert spec_of(tmp_path / "a", **{key: value}).dtype == "float16"
    assert open_checkpoint(str(write_hf_directory(tmp_path / "b", dtype="BF16"))).spec.dtype == "bfloat16"


@pytest.mark.parametrize(
    "key", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "architectures"]
)
def test_a_missing_key_names_itself(tmp_path: Path, key: str) -> None:
    with pytest.raises(CheckpointError, match=key):
        spec_of(tmp_path, **{key: ...})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ["GPT2LMHeadModel", "LlamaForCausalLM", "MistralForCausalLM"]),
        ({"auto_map": {"AutoModel": "evil.Model"}}, ["auto_map", "never run"]),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, ["bitsandbytes", "awq", "GGUF"]),
        ({"quantization_config": {"quant_method": "gptq", "bits": 3}}, ["3 bits", "2, 4, 8"]),
        ({"hidden_act": "gelu"}, ["gelu", "silu"]),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, ["dynamic", "llama3"]),
        ({"rope_scaling": {"rope_type": "linear"}}, ["factor", "missing"]),
        ({"rope_scaling": "linear"}, ["rope_scaling"]),
        ({"num_key_value_heads": 3}, ["4", "3"]),
        ({"hidden_size": 63}, ["63", "4"]),
        ({"head_dim": 15}, ["15", "even"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers", "0"]),
        ({"num_hidden_layers": 10**12}, ["num_hidden_layers"]),
        ({"num_hidden_layers": True}, ["num_hidden_layers"]),
        ({"hidden_size": "64"}, ["hidden_size", "'64'"]),
        ({"rms_norm_eps": -1.0}, ["rms_norm_eps", "-1.0"]),
        ({"torch_dtype": "float8_e4m3fn"}, ["float8_e4m3fn", "bfloat16"]),
        ({"eos_token_id": "</s>"}, ["eos_token_id"]),
        ({"num_hidden_layers": 5}, ["5 layers", "layer 3"]),
        ({"architectures": ["Qwen2ForCausalLM"], "layer_types": ["full_attention"]}, ["layer_types", "1", "3"]),
        ({"architectures": ["Qwen2ForCausalLM"], "layer_types": ["mamba"] * 3}, ["layer_types", "sliding_attention"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor"]),
        ({"rope_theta": 1.0}, ["rotary", "base 1", "above 1"]),
        (
            {"architectures": ["Gemma2ForCausalLM"], "hidden_activation": "gelu_tanh", "sliding_window": None},
            ["sliding_window", "missing"],
        ),
    ],
)
def test_what_cannot_work_is_refused_with_the_numbers(
    tmp_path: Path, changes: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(CheckpointError) as error:
        spec_of(tmp_path, **changes)
    for word in words:
        assert word in str(error.value)


def test_a_directory_without_config_says_what_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "BF16").mkdir()
    (tmp_path / "BF16" / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(
        CheckpointError, match=r"no config\.json.*safetensors\.index\.json\. There is BF16/model\.gguf: give the path"
    ):
        open_checkpoint(str(tmp_path))


def test_a_directory_without_weights_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"no weights.*pytorch_model\.bin is not read"):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize("text", ["{", "[]", "\xff", '{"a": ' + "[" * 5000 + "]" * 5000 + "}"])
def test_a_damaged_config_is_an_error_of_the_checkpoint(tmp_path: Path, text: str) -> None:
    write_hf_directory(tmp_path)
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        open_checkpoint(str(tmp_path))


def write_shards(directory: Path) -> dict[str, str]:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG))
    shapes = list(tensor_shapes().items())
    halves = {"a.safetensors": dict(shapes[:10]), "b.safetensors": dict(shapes[10:])}
    for name, part in halves.items():
        write_safetensors(directory / name, part)
    return {tensor: file for file, part in halves.items() for tensor in part}


def write_index(directory: Path, weight_map: dict[str, str]) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_shards_are_indexed_as_one(tmp_path: Path) -> None:
    weight_map = write_shards(tmp_path)
    write_index(tmp_path, weight_map)
    tensors = open_checkpoint(str(tmp_path)).tensors
    assert {name: Path(entry.file).name for name, entry in tensors.items()} == weight_map


def test_a_missing_shard_names_itself(tmp_path: Path) -> None:
    write_index(tmp_path, write_shards(tmp_path))
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"b\.safetensors"):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize("shard", ["../b.safetensors", "/etc/passwd", "x/y.safetensors"])
def test_an_index_cannot_lead_out_of_its_directory(tmp_path: Path, shard: str) -> None:
    weight_map = write_shards(tmp_path)
    write_index(tmp_path, {**weight_map, "model.norm.weight": shard})
    with pytest.raises(CheckpointError, match="not a plain file name"):
        open_checkpoint(str(tmp_path))


def test_an_index_that_disagrees_with_its_shard_is_refused(tmp_path: Path) -> None:
    weight_map = write_shards(tmp_path)
    write_index(tmp_path, {**weight_map, "model.norm.weight": "b.safetensors"})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight.*b\.safetensors"):
        open_checkpoint(str(tmp_path))


def test_weights_of_a_type_that_cannot_be_read_are_refused_before_anything_starts(tmp_path: Path) -> None:
    write_hf_directory(tmp_path, {"torch_dtype": "bfloat16"}, dtype="F8_E4M3")
    with pytest.raises(CheckpointError, match="F8_E4M3"):
        open_checkpoint(str(tmp_path))


@pytest.mark.parametrize("model", ["./nowhere", "nowhere", "/nowhere/at/all", "folder/model.gguf"])
def test_a_path_that_does_not_exist_is_said_so(model: str) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        open_checkpoint(model)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    write_hf_directory(tmp_path)
    with pytest.raises(CheckpointError, match="not GGUF"):
        open_checkpoint(str(tmp_path / "model.safetensors"))
