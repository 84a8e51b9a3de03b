"""What the cost model says of well-known models: sums that are published, and laws that hold for any."""

from __future__ import annotations

from pathlib import Path

import pytest

from stageline.cost.model_costs import BYTES_PER_WEIGHT, WeightFormat, model_costs
from stageline.errors import ConfigError
from stageline.planner.known_models import find_model, model_names
from tests.unit.checkpoint_files import split_gguf, write_gguf_model, write_hf_directory

# Billions: all parameters, and those that one token is multiplied with; the embedding is looked up, so not among them.
PUBLISHED = {
    "llama-3.1-8b": (8.03, 7.50),
    "llama-3.1-70b": (70.55, 69.50),
    "llama-3.1-405b": (405.9, 403.8),
    "qwen2.5-72b": (72.7, 71.5),
    "qwen3-235b-a22b": (235.1, 21.6),
    "qwen3-30b-a3b": (30.5, 3.04),
    "mixtral-8x7b": (46.7, 12.75),
    "deepseek-v3": (671.0, 36.6),
    "gpt-oss-120b": (116.8, 5.13),
    "gpt-oss-20b": (20.9, 3.61),
}


def _costs(name: str):
    model = find_model(name)
    return model_costs(model.spec, model.weights)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_as_published(name: str) -> None:
    total, active = PUBLISHED[name]
    costs = _costs(name)
    assert costs.num_parameters / 1e9 == pytest.approx(total, rel=2e-3)
    assert costs.num_active / 1e9 == pytest.approx(active, rel=2e-3)


def test_every_shipped_config_can_be_read_and_priced() -> None:
    assert len(model_names()) >= 25
    for name in model_names():
        costs = _costs(name)
        assert costs.num_parameters >= costs.num_active > 0, name
        assert all(layer.kv_bytes_per_token > 0 for layer in costs.layers), name


def test_layers_are_as_many_as_the_models_have_and_only_deepseeks_first_three_are_dense() -> None:
    assert len(_costs("llama-3.1-405b").layers) == 126
    layers = _costs("deepseek-v3").layers
    assert [index for index, layer in enumerate(layers) if not layer.num_experts] == [0, 1, 2]
    assert len(layers) == 61


@pytest.mark.parametrize(
    ("name", "kv_bytes"),
    [
        ("llama-3.1-70b", 320 * 1024),  # 80 layers x 2 x 8 heads x 128 x 2 bytes
        ("deepseek-v3", 61 * (512 + 64) * 2),  # one compressed row for all heads
        ("qwen3-235b-a22b", 94 * 2 * 4 * 128 * 2),
    ],
)
def test_a_token_takes_as_much_kv_cache_as_its_heads_or_its_compressed_row(name: str, kv_bytes: int) -> None:
    assert _costs(name).kv_bytes_per_token == kv_bytes


def test_experts_kept_in_four_bits_make_the_checkpoint_as_small_as_it_is() -> None:
    assert _costs("gpt-oss-120b").weight_bytes / 1e9 == pytest.approx(65.2, rel=0.01)


def test_sharding_stops_at_the_kv_heads_for_cache_and_the_matrices_that_fill_it() -> None:
    layer = _costs("llama-3.1-70b").layers[0]
    assert layer.kv_bytes(8) == layer.kv_bytes_per_token / 8
    assert layer.kv_bytes(16) == layer.kv_bytes(8)
    assert 16 * layer.weight_bytes(16) - layer.weight_bytes(1) == layer.num_kv * 2


def test_a_compressed_cache_is_the_same_on_every_device() -> None:
    layer = _costs("deepseek-v3").layers[5]
    assert layer.kv_bytes(8) == layer.kv_bytes(1)


def test_what_brings_latent_attention_to_its_short_rows_is_on_every_device_like_a_router() -> None:
    """DeepSeek-V3: 7,168 numbers to rows of 512 + 64 and to queries' of 1,536, their norms, and 256 experts' scores."""
    layer = _costs("deepseek-v3").layers[5]
    num_copied = 7168 * (512 + 64) + 512 + 7168 * 1536 + 1536 + 7168 * 256
    assert 8 * layer.weight_bytes(8) - layer.weight_bytes(1) == pytest.approx(7 * num_copied, rel=1e-9)
    assert 8 * layer.own_dense(8) - layer.own_dense(1) == pytest.approx(7 * num_copied, rel=1e-9)


def test_latent_attention_multiplies_every_head_with_whole_rows() -> None:
    assert _costs("deepseek-v3").layers[5].flops_per_pair == 2 * 128 * ((512 + 64) + 512)
    assert _costs("llama-3.1-70b").layers[5].flops_per_pair == 2 * 64 * (128 + 128)


def test_a_microbatch_reads_the_experts_of_its_tokens_and_no_more_than_there_are() -> None:
    layer = _costs("mixtral-8x7b").layers[0]
    assert layer.num_experts_read(1) == pytest.approx(2)
    assert layer.num_experts_read(2) == pytest.approx(2 + 2 * 6 / 8)
    assert layer.num_experts_read(1000) == pytest.approx(8)
    assert layer.read_bytes(1000) == pytest.approx(layer.weight_bytes())
    assert layer.read_bytes(1) == pytest.approx(layer.num_active * 2)


def test_a_window_bounds_what_a_request_keeps() -> None:
    costs = _costs("gpt-oss-120b")
    per_layer = 2 * 8 * 64 * 2
    assert costs.kv_bytes_per_request(1000) == 18 * per_layer * 1000 + 18 * per_layer * 128
    assert costs.kv_bytes_per_request(100) == 36 * per_layer * 100


def test_a_tied_head_is_kept_once_and_multiplied_all_the_same() -> None:
    costs = _costs("qwen3-0.6b")
    matrix = 151936 * 1024
    assert costs.num_parameters == pytest.approx(0.596e9, rel=1e-3)
    assert costs.head.num_active >= matrix
    assert costs.embedding.read_bytes(3) == 3 * 1024 * 2


def test_an_unknown_weight_format_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="known are fp32, bf16"):
        WeightFormat("q5", "bf16")
    assert set(BYTES_PER_WEIGHT) >= {"bf16", "fp8", "int8", "int4", "mxfp4"}


def _compressed(**weights: object) -> dict[str, object]:
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}


@pytest.mark.parametrize(
    ("quantization", "kept"),
    [
        ({"quant_method": "fp8", "fmt": "e4m3"}, "fp8"),
        ({"quant_method": "gptq", "bits": 8}, "int8"),
        ({"quant_method": "gptq", "bits": 4}, "int4"),
        ({"quant_method": "awq"}, "int4"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "int8"),
        (_compressed(num_bits=4), "int4"),
        (_compressed(num_bits=8), "int8"),
        (_compressed(num_bits=8, type="float"), "fp8"),
    ],
)
def test_a_quantised_checkpoint_is_planned_with_the_bits_it_has(
    tmp_path: Path, quantization: dict[str, object], kept: str
) -> None:
    write_hf_directory(tmp_path, {"quantization_config": quantization})
    assert str(find_model(str(tmp_path)).weights) == kept


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.1-8B-Instruct", "Llama-3.1-8B", "Meta-Llama-3.1-8B-Instruct"])
def test_a_model_is_found_by_hub_id_in_any_of_its_spellings(name: str) -> None:
    assert find_model(name).spec.num_layers == 32


def test_a_gguf_model_is_found_by_its_file_and_of_several_by_any_or_their_folder(tmp_path: Path) -> None:
    whole = write_gguf_model(tmp_path / "m.gguf")
    first, second = split_gguf(whole, tmp_path / "parts", 20)
    for path in (first, second, first.parent):
        assert find_model(str(path)).spec == find_model(str(whole)).spec
        assert find_model(str(path)).source == str(first if path.is_dir() else path)


def test_an_unknown_model_is_refused_with_what_comes_close() -> None:
    with pytest.raises(ConfigError, match=r"did you mean llama-3\.1-70b.*directory with its config\.json"):
        find_model("llama-3.1-71b")
