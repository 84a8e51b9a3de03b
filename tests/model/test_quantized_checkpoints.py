"""Quantised safetensors are read as the numbers they stand for; what is missing or of another kind is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from stageline.checkpoint import open_checkpoint
from stageline.checkpoint.stage_tensors import (
    can_stay_quantized,
    packed_bytes,
    stage_file_bytes,
    stage_weight_bytes,
)
from stageline.errors import CheckpointError
from stageline.kernels.quantized import QuantizedMatrix
from stageline.weights.reader import CheckpointReader
from tests.model.chain import Chain, cut, sequence
from tests.model.ranks_under_test import SharedChain
from tests.model.tiny_experts import EXPERT_FAMILIES
from tests.tiny_models import TinyModel, load_reference, reference_logits

CPU = torch.device("cpu")
GROUP = 16
KEPT_GROUP = 32
Tensors = dict[str, torch.Tensor]


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def packed(numbers: torch.Tensor, bits: int, order: list[int] | None = None) -> torch.Tensor:
    """numbers: unsigned [rows, columns], columns in words of 32 bits, the first in the lowest bits."""
    per_word = 32 // bits
    parts = numbers.long().view(numbers.shape[0], -1, per_word)
    if order is not None:
        parts = parts[..., order]
    words = sum(parts[..., place] << (bits * place) for place in range(per_word))
    return torch.where(words >= 2**31, words - 2**32, words).int()


def random_numbers(shape: tuple[int, int], bits: int) -> torch.Tensor:
    return torch.randint(0, 2**bits, shape, generator=torch.Generator().manual_seed(shape[0]))


def spread(scales: torch.Tensor, columns: int) -> torch.Tensor:
    return scales.repeat_interleave(columns // scales.shape[1], 1)


def awq(rows: int, columns: int, group: int = GROUP) -> tuple[Tensors, torch.Tensor]:
    numbers, zeros = random_numbers((rows, columns), 4), random_numbers((rows, columns // group), 4)
    scales = noise(rows, columns // group).half()
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    stored = {
        "qweight": packed(numbers.T, 4, order),
        "qzeros": packed(zeros.T, 4, order),
        "scales": scales.T.contiguous(),
    }
    return stored, (numbers - spread(zeros, columns)) * spread(scales.float(), columns)


def gptq(
    rows: int, columns: int, bits: int = 4, is_shuffled: bool = False, group: int = GROUP
) -> tuple[Tensors, torch.Tensor]:
    """The first format: zero points are stored less one."""
    numbers = random_numbers((rows, columns), bits)
    zeros = random_numbers((rows, columns // group), bits).clamp(min=1)
    scales, groups = noise(rows, columns // group).half(), torch.arange(columns) // group
    if is_shuffled:
        groups = groups[torch.randperm(columns, generator=torch.Generator().manual_seed(5))]
    stored = {
        "qweight": packed(numbers, bits).T.contiguous(),
        "qzeros": packed((zeros - 1).T, bits),
        "scales": scales.T.contiguous(),
        "g_idx": groups.int(),
    }
    return stored, (numbers - zeros[:, groups]) * scales.float()[:, groups]


def fp8_blocks(rows: int, columns: int) -> tuple[Tensors, torch.Tensor]:
    numbers = noise(rows, columns).to(torch.float8_e4m3fn)
    scales = noise(-(-rows // 24), -(-columns // 40)).abs()
    wide = scales.repeat_interleave(24, 0)[:rows].repeat_interleave(40, 1)[:, :columns]
    return {"weight": numbers, "weight_scale_inv": scales}, numbers.float() * wide


def fp8_powers(rows: int, columns: int) -> tuple[Tensors, torch.Tensor]:
    """Scales that are powers of two, in a byte each."""
    stored, _ = fp8_blocks(rows, columns)
    scales = stored["weight_scale_inv"].to(torch.float8_e8m0fnu)
    wide = scales.float().repeat_interleave(24, 0)[:rows].repeat_interleave(40, 1)[:, :columns]
    return {**stored, "weight_scale_inv": scales}, stored["weight"].float() * wide


def fp8_channels(rows: int, columns: int) -> tuple[Tensors, torch.Tensor]:
    numbers, scales = noise(rows, columns).to(torch.float8_e4m3fn), noise(rows, 1).abs().bfloat16()
    return {"weight": numbers, "weight_scale": scales, "input_scale": torch.ones(1)}, numbers.float() * scales.float()


def fp8_tensor(rows: int, columns: int) -> tuple[Tensors, torch.Tensor]:
    numbers = noise(rows, columns).to(torch.float8_e4m3fn)
    return {"weight": numbers, "weight_scale": torch.tensor(0.37)}, numbers.float() * 0.37


def int8_channels(rows: int, columns: int) -> tuple[Tensors, torch.Tensor]:
    numbers, scales = random_numbers((rows, columns), 8) - 128, noise(rows, 1).abs()
    return {"weight": numbers.to(torch.int8), "weight_scale": scales}, numbers * scales


def compressed_int4(
    rows: int, columns: int, has_zeros: bool = False, group: int = GROUP
) -> tuple[Tensors, torch.Tensor]:
    numbers, zeros = random_numbers((rows, columns), 4), random_numbers((rows, columns // group), 4)
    scales = noise(rows, columns // group).bfloat16()
    stored = {
        "weight_packed": packed(numbers, 4),
        "weight_scale": scales,
        "weight_shape": torch.tensor([rows, columns]),
    }
    if not has_zeros:
        return stored, (numbers - 8) * spread(scales.float(), columns)
    stored["weight_zero_point"] = packed(zeros.T, 4).T.contiguous()
    return stored, (numbers - spread(zeros, columns)) * spread(scales.float(), columns)


def compressed(kind: str, bits: int, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"type": kind, "num_bits": bits, **weights}}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": ["lm_head"]}


@dataclass(frozen=True)
class Format:
    """Args:
    config: of config.json's `quantization_config`.
    make: the stored tensors of a matrix [rows, columns], and its numbers.
    """

    config: dict[str, Any]
    make: Callable[[int, int], tuple[Tensors, torch.Tensor]]


FORMATS = {
    "awq": Format({"quant_method": "awq", "bits": 4, "version": "gemm"}, awq),
    "gptq": Format({"quant_method": "gptq", "bits": 4}, gptq),
    "gptq in 8 bits": Format({"quant_method": "gptq", "bits": 8}, lambda *shape: gptq(*shape, bits=8)),
    "gptq with shuffled groups": Format(
        {"quant_method": "gptq", "bits": 4, "desc_act": True}, lambda *shape: gptq(*shape, is_shuffled=True)
    ),
    "fp8 in blocks": Format({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [24, 40]}, fp8_blocks),
    "fp8 with powers of two": Format({"quant_method": "fp8", "weight_block_size": [24, 40]}, fp8_powers),
    "fp8 per tensor": Format({"quant_method": "fp8"}, fp8_tensor),
    "compressed fp8 per row": Format(compressed("float", 8, strategy="channel"), fp8_channels),
    "compressed int8 per row": Format(compressed("int", 8, strategy="channel"), int8_channels),
    "compressed int4 in groups": Format(compressed("int", 4, group_size=GROUP), compressed_int4),
    "compressed int4 with zero points": Format(
        compressed("int", 4, group_size=GROUP, symmetric=False), lambda *shape: compressed_int4(*shape, has_zeros=True)
    ),
}


KEPT = {
    "awq": Format(FORMATS["awq"].config, lambda *shape: awq(*shape, group=KEPT_GROUP)),
    "gptq": Format(FORMATS["gptq"].config, lambda *shape: gptq(*shape, group=KEPT_GROUP)),
    "compressed int4": Format(
        compressed("int", 4, group_size=KEPT_GROUP), lambda *shape: compressed_int4(*shape, group=KEPT_GROUP)
    ),
    "compressed int4 with zero points": Format(
        compressed("int", 4, symmetric=False),
        lambda *shape: compressed_int4(*shape, has_zeros=True, group=KEPT_GROUP),
    ),
    "compressed int8 per row": FORMATS["compressed int8 per row"],
}
"""Formats whose numbers integer products can work on."""


def quantised(directory: Path, form: Format) -> dict[str, torch.Tensor]:
    """Write a tiny model whose layers' matrices are quantised. Returns: what each of them stands for."""
    TinyModel(num_layers=2).write(directory)
    return quantise(directory, form, "_proj.weight")


def quantise(directory: Path, form: Format, *suffixes: str) -> dict[str, torch.Tensor]:
    """The matrices with such names in a directory that is there."""
    tensors, expected = load_file(directory / "model.safetensors"), {}
    for name in [name for name in tensors if name.endswith(suffixes)]:
        stored, expected[name] = form.make(*tensors.pop(name).shape)
        base = name.removesuffix(".weight")
        tensors.update({f"{base}.{part}": tensor.contiguous() for part, tensor in stored.items()})
    save_file(tensors, directory / "model.safetensors")
    write_config(directory, form.config)
    return expected


def write_config(directory: Path, quantization: dict[str, Any]) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))


@pytest.mark.parametrize("name", FORMATS)
def test_a_quantised_matrix_is_the_numbers_it_stands_for(name: str, tmp_path: Path) -> None:
    expected = quantised(tmp_path, FORMATS[name])
    checkpoint = open_checkpoint(str(tmp_path))
    with CheckpointReader(checkpoint, torch.float32, CPU) as reader:
        for tensor, numbers in expected.items():
            found = reader.read(tensor, tuple(numbers.shape))
            torch.testing.assert_close(found, numbers.float(), rtol=1e-6, atol=1e-7)
    sizes = [entry.num_elements for entry in checkpoint.tensors.values()]
    assert stage_weight_bytes(checkpoint, range(2), True, True, 4) == 4 * sum(sizes)


def test_a_quantised_model_runs_and_all_its_bytes_are_read(tmp_path: Path) -> None:
    quantised(tmp_path, FORMATS["compressed int4 in groups"])
    checkpoint = open_checkpoint(str(tmp_path))
    chain = Chain(tmp_path, cut(1, 1))
    chain.requests.add(0, sequence(0, 9))
    assert chain.run({0: 9})[0].isfinite().all()
    assert chain.num_bytes_read == stage_file_bytes(checkpoint, range(2), True, True)


@pytest.mark.parametrize("name", KEPT)
def test_a_matrix_that_stays_quantised_is_the_same_numbers(name: str, tmp_path: Path) -> None:
    """But for the minimum of four bits with a zero point, which is a product rounded to half precision."""
    expected = quantised(tmp_path, KEPT[name])
    checkpoint = open_checkpoint(str(tmp_path))
    with CheckpointReader(checkpoint, torch.float32, CPU, keeps_quantized=True) as reader:
        for tensor, numbers in expected.items():
            rows, columns = numbers.shape
            found = reader.read_matrix(tensor, (rows, columns))
            assert isinstance(found, QuantizedMatrix)
            largest = numbers.abs().max().item()
            torch.testing.assert_close(found.rows(torch.arange(rows)), numbers.float(), rtol=1e-3, atol=1e-3 * largest)
            if rows % 64 == 0:
                assert packed_bytes(checkpoint.tensors[tensor]) == found.num_bytes


@pytest.mark.parametrize("name", ["awq", "compressed int8 per row"])
def test_a_model_that_stays_quantised_answers_like_its_numbers(name: str, tmp_path: Path) -> None:
    quantised(tmp_path, KEPT[name])
    tokens = sequence(0, 20)
    logits = []
    for keeps_quantized in (False, True):
        chain = Chain(tmp_path, cut(1, 1), keeps_quantized=keeps_quantized)
        chain.requests.add(0, tokens)
        logits.append(chain.run({0: 20})[0])
    assert (logits[1] - logits[0]).norm() / logits[0].norm() < 0.1


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("qwen3 moe", {"head_dim": 32}),
        ("deepseek v3", {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "v_head_dim": 16}),
    ],
)
def test_experts_that_stay_quantised_answer_like_their_numbers(
    tmp_path: Path, name: str, sizes: dict[str, int]
) -> None:
    """And so does latent attention, whose projections are put in another order of rows, with their biases."""
    family = EXPERT_FAMILIES[name]
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "intermediate_size": 64, **sizes}
    type(family)(family.model_type, "", {**family.config, **sizes}).write(tmp_path)
    quantise(tmp_path, KEPT["awq"], "_proj.weight", "_with_mqa.weight")
    kept = [entry.name for entry in open_checkpoint(str(tmp_path)).tensors.values() if can_stay_quantized(entry)]
    assert not any("kv_b_proj" in name for name in kept)
    assert any("o_proj" in name for name in kept) and any("experts.1.down_proj" in name for name in kept)
    logits = []
    for keeps_quantized in (False, True):
        chain = Chain(tmp_path, cut(2, 2), keeps_quantized=keeps_quantized)
        chain.requests.add(0, sequence(0, 20))
        logits.append(chain.run({0: 20})[0])
    assert 0 < (logits[1] - logits[0]).norm() / logits[0].norm() < 0.1


@pytest.mark.parametrize("name", ["awq", "gptq with shuffled groups", "fp8 in blocks", "gptq in 8 bits"])
def test_what_integer_products_cannot_work_on_is_made_floating_point(name: str, tmp_path: Path) -> None:
    expected = quantised(tmp_path, FORMATS[name])
    checkpoint = open_checkpoint(str(tmp_path))
    with CheckpointReader(checkpoint, torch.float32, CPU, keeps_quantized=True) as reader:
        tensor, numbers = next(iter(expected.items()))
        assert not can_stay_quantized(checkpoint.tensors[tensor])
        found = reader.read_matrix(tensor, (numbers.shape[0], numbers.shape[1]))
        assert isinstance(found, torch.Tensor)
        torch.testing.assert_close(found, numbers.float(), rtol=1e-6, atol=1e-7)


def test_gpt_oss_with_mxfp4_is_transformers_with_its_numbers(tmp_path: Path) -> None:
    """`transformers` makes numbers of the same blocks."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    family = EXPERT_FAMILIES["gpt-oss"]
    plain, stored = tmp_path / "plain", tmp_path / "stored"
    for directory in (plain, stored):
        type(family)(family.model_type, "", {**family.config, "hidden_size": 96}).write(directory)
    tensors = load_file(plain / "model.safetensors")
    blocks = dict(tensors)
    generator = torch.Generator().manual_seed(4)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, in_features, out_features = tensors[name].shape
        shape = (experts, out_features, in_features // 32, 16)
        numbers = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        scales = torch.randint(123, 126, shape[:3], dtype=torch.uint8, generator=generator)
        tensors[name] = convert_moe_packed_tensors(numbers, scales, dtype=torch.float32)
        del blocks[name]
        blocks[f"{name}_blocks"], blocks[f"{name}_scales"] = numbers, scales
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(blocks, stored / "model.safetensors", metadata={"format": "pt"})
    write_config(stored, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    expected = reference_logits(load_reference(plain), sequence(0, 20))
    chain = Chain(stored, cut(2, 2))
    chain.requests.add(0, sequence(0, 20))
    found = torch.cat([chain.run({0: 12})[0], chain.run({0: 8})[0]])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())
    name, checkpoint = "model.layers.0.mlp.experts.gate_up_proj", open_checkpoint(str(stored))
    shape, gate_and_up = checkpoint.tensors[name].shape, (slice(0, None, 2), slice(1, None, 2))
    with CheckpointReader(checkpoint, torch.float32, CPU, keeps_quantized=True) as reader:
        kept = reader.read_transposed_part(name, (shape[0], shape[1], shape[2]), 2, gate_and_up)
    for matrix, rows in zip(kept, gate_and_up, strict=True):
        assert isinstance(matrix, QuantizedMatrix)
        assert torch.equal(matrix.rows(torch.arange(matrix.num_rows)), tensors[name][2].T[rows])
    assert packed_bytes(checkpoint.tensors[name]) == checkpoint.tensors[name].num_elements // 32 * 34
    quantized = Chain(stored, cut(2, 2), keeps_quantized=True)
    quantized.requests.add(0, sequence(0, 20))
    kept_logits = quantized.run({0: 20})[0]
    assert 0 < (kept_logits - expected).norm() / expected.norm() < 0.3
    for keeps_quantized, logits in ((False, expected), (True, kept_logits)):
        dealt = SharedChain(stored, cut(4), [2], keeps_quantized=keeps_quantized, deals_experts=True)
        dealt.requests.add(0, sequence(0, 20))
        near = {"rtol": 1e-4, "atol": (0.02 if keeps_quantized else 1e-4) * logits.abs().max().item()}
        torch.testing.assert_close(dealt.run({0: 20})[0], logits, **near)


def test_numbers_without_scales_are_refused_when_the_model_is_opened(tmp_path: Path) -> None:
    quantised(tmp_path, FORMATS["fp8 in blocks"])
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight_scale_inv"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight.*scales"):
        open_checkpoint(str(tmp_path))


def test_numbers_of_another_type_are_refused_when_the_model_is_opened(tmp_path: Path) -> None:
    quantised(tmp_path, FORMATS["fp8 in blocks"])
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e5m2)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight is of type F8_E5M2.*F8_E4M3"):
        open_checkpoint(str(tmp_path))


def test_parts_that_do_not_fit_together_are_refused_with_their_shapes(tmp_path: Path) -> None:
    expected = quantised(tmp_path, FORMATS["awq"])
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.scales"] = torch.ones(3, 7).half()
    save_file(tensors, tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    with (
        CheckpointReader(open_checkpoint(str(tmp_path)), torch.float32, CPU) as reader,
        pytest.raises(CheckpointError, match=r"do not fit together.*scales \[3, 7\]"),
    ):
        reader.read(name, tuple(expected[name].shape))
