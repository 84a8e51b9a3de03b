"""Every layer against float64, and bit for bit against `transformers` where rounding in bfloat16 is meant to agree."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import LlamaConfig, Phi3Config
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding
from transformers.models.phi3.modeling_phi3 import apply_rotary_pos_emb as apply_phi3_rotary

from stageline.checkpoint.model_spec import RopeSpec
from stageline.errors import CheckpointError
from stageline.layers.activation import silu_and_mul
from stageline.layers.embedding import LMHead, TokenEmbedding
from stageline.layers.linear import Linear
from stageline.layers.norm import RMSNorm
from stageline.layers.rotary import Rotary, inverse_frequencies

CPU = torch.device("cpu")
LLAMA3 = RopeSpec(theta=500000.0, kind="llama3", factor=8.0, original_max_position_embeddings=64)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_linear_is_x_times_weight_transposed_plus_bias() -> None:
    x, weight, bias = noise(5, 24), noise(7, 24, seed=1), noise(7, seed=2)
    expected = x.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(Linear(weight, bias)(x).double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(Linear(weight)(x).double(), expected - bias.double(), rtol=1e-5, atol=1e-5)


def test_norm_of_a_sum_returns_the_sum_and_changes_neither_input() -> None:
    x, residual, weight = noise(5, 24), noise(5, 24, seed=1), noise(24, seed=2)
    before = x.clone(), residual.clone()
    normed, total = RMSNorm(weight, 1e-5)(x, residual)
    wide = x.double() + residual.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(normed.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(total, x + residual)
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-7), (torch.bfloat16, 0.0)])
def test_norm_rounds_as_transformers_does(dtype: torch.dtype, tolerance: float) -> None:
    """In float32 the order of a sum shows in the last bits; in bfloat16 it is rounded away."""
    x, weight = noise(64, 96).to(dtype), noise(96, seed=1).to(dtype)
    reference = LlamaRMSNorm(96, eps=1e-5)
    reference.weight = torch.nn.Parameter(weight)
    torch.testing.assert_close(RMSNorm(weight, 1e-5)(x)[0], reference(x).detach(), rtol=tolerance, atol=tolerance)


def test_silu_and_mul_gates_the_second_half_with_the_first() -> None:
    gate_up = noise(5, 48)
    gate, up = gate_up[:, :24].double(), gate_up[:, 24:].double()
    torch.testing.assert_close(silu_and_mul(gate_up).double(), gate / (1 + (-gate).exp()) * up, rtol=1e-5, atol=1e-6)


def test_embedding_and_head_are_the_two_ends_of_one_matrix() -> None:
    weight, norm_weight = noise(11, 24).bfloat16(), noise(24, seed=1).bfloat16()
    embedding = TokenEmbedding(weight)
    token_ids = torch.tensor([3, 0, 3])
    assert torch.equal(embedding(token_ids), weight[token_ids])
    hidden = noise(4, 24, seed=2).bfloat16()
    head = LMHead(RMSNorm(norm_weight, 1e-5), embedding.as_projection())
    assert torch.equal(embedding(token_ids), weight[token_ids]), "also when it exists only as the head's projection"
    assert head(hidden).dtype == torch.float32
    expected = RMSNorm(norm_weight, 1e-5)(hidden)[0].double() @ weight.double().T
    torch.testing.assert_close(head(hidden).double(), expected, rtol=1e-2, atol=1e-2)


def rotate_in_float64(x: torch.Tensor, positions: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """Each pair (i, i + half) as a complex number, turned by its angle."""
    first, second = x.double().chunk(2, -1)
    angles = torch.outer(positions.double(), frequencies.double())
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles).unsqueeze(1)
    return torch.cat((turned.real, turned.imag), -1)


@pytest.mark.parametrize(
    "spec",
    [
        RopeSpec(),
        RopeSpec(theta=100000.0),
        RopeSpec(kind="linear", factor=4.0),
        LLAMA3,
        RopeSpec(frequency_divisors=tuple(1.0 + i / 4 for i in range(16))),
    ],
    ids=["default", "theta", "linear", "llama3", "divisors"],
)
def test_rotary_turns_every_pair_by_position_times_frequency(spec: RopeSpec) -> None:
    x, positions = noise(9, 3, 32), torch.tensor([0, 1, 2, 63, 64, 65, 100, 254, 255])
    rotated = Rotary(spec, 32, 256, CPU)(x, positions)
    expected = rotate_in_float64(x, positions, inverse_frequencies(spec, 32))
    torch.testing.assert_close(rotated.double(), expected, rtol=1e-4, atol=5e-5)


def test_default_frequencies_are_powers_of_theta() -> None:
    expected = [10000.0 ** (-2 * i / 8) for i in range(4)]
    assert inverse_frequencies(RopeSpec(), 8).tolist() == pytest.approx(expected, rel=1e-6)


def test_explicit_divisors_override_the_kind() -> None:
    divisors = (1.0, 2.0, 4.0, 8.0)
    plain = inverse_frequencies(RopeSpec(), 8)
    divided = inverse_frequencies(RopeSpec(kind="linear", factor=3.0, frequency_divisors=divisors), 8)
    assert torch.equal(divided, plain / torch.tensor(divisors))


@pytest.mark.parametrize(
    ("spec", "rope_parameters"),
    [
        (RopeSpec(theta=10000.0), {"rope_type": "default", "rope_theta": 10000.0}),
        (RopeSpec(kind="linear", factor=4.0), {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}),
        (
            LLAMA3,
            {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        ),
    ],
    ids=["default", "linear", "llama3"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_rounds_as_transformers_does(
    spec: RopeSpec, rope_parameters: dict[str, object], dtype: torch.dtype
) -> None:
    config = LlamaConfig(hidden_size=128, num_attention_heads=4, max_position_embeddings=512)
    config.rope_parameters = rope_parameters
    reference = LlamaRotaryEmbedding(config)
    assert torch.equal(inverse_frequencies(spec, 32), reference.inv_freq)
    queries, keys, positions = noise(40, 4, 32).to(dtype), noise(40, 2, 32, seed=1).to(dtype), torch.arange(400, 440)
    cos, sin = reference(queries[None], positions[None])
    expected, _ = apply_rotary_pos_emb(queries.transpose(0, 1)[None], keys.transpose(0, 1)[None], cos, sin)
    rotated = Rotary(spec, 32, 512, CPU)(queries, positions)
    assert torch.equal(rotated, expected[0].transpose(0, 1))


def test_rotary_follows_new_positions_and_another_dtype() -> None:
    rotary, x = Rotary(RopeSpec(), 32, 64, CPU), noise(3, 2, 32)
    first, second = torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6])
    rotary(x, first)
    assert torch.equal(rotary(x, second), Rotary(RopeSpec(), 32, 64, CPU)(x, second))
    assert rotary(x.bfloat16(), second).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("spec", "head_dim", "words"),
    [
        (RopeSpec(kind="spiral"), 8, ["spiral", "llama3"]),
        (RopeSpec(), 7, ["even", "7"]),
        (RopeSpec(frequency_divisors=(1.0, 2.0)), 8, ["2 rotary", "needs 4"]),
    ],
)
def test_rotary_refuses_what_it_cannot_do(spec: RopeSpec, head_dim: int, words: list[str]) -> None:
    with pytest.raises(CheckpointError) as refused:
        inverse_frequencies(spec, head_dim)
    assert all(word in str(refused.value) for word in words)
    assert math.isfinite(inverse_frequencies(RopeSpec(), 8).sum().item())


@pytest.mark.parametrize("max_model_len", [64, 65])
def test_longrope_has_the_divisors_of_the_length_it_serves(max_model_len: int) -> None:
    """transformers chooses by the sequence at hand; a server knows its longest one, and its cache cannot turn again."""
    short, long = [1.0, 1.1, 1.2, 1.3], [1.0, 2.0, 3.0, 4.0]
    config = Phi3Config(
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=256,
        original_max_position_embeddings=64,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": short,
            "long_factor": long,
            "partial_rotary_factor": 0.5,
        },
    )
    positions = torch.arange(max_model_len)
    x = noise(max_model_len, 2, 16)
    cos, sin = Phi3RotaryEmbedding(config)(x, positions[None])
    expected, _ = apply_phi3_rotary(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)
    spec = RopeSpec(
        kind="longrope",
        original_max_position_embeddings=64,
        frequency_divisors=tuple(long),
        short_divisors=tuple(short),
        magnitude=math.sqrt(1 + math.log(4) / math.log(64)),
        rotary_dim=8,
    )
    found = Rotary(spec, 16, max_model_len, CPU)(x, positions)
    torch.testing.assert_close(found, expected[0].transpose(0, 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("scale", "cap"), [(1.0, 1.0), (1 / 3, None), (0.25, None)])
def test_the_likeliest_token_is_the_first_of_the_largest_logits(scale: float, cap: float | None) -> None:
    """A cap makes logits equal that were not: the first of them is chosen, with and without writing logits."""
    generator = torch.Generator().manual_seed(0)
    norm = RMSNorm(torch.ones(64, dtype=torch.bfloat16), 1e-6)
    weight = torch.randn((300, 64), generator=generator).bfloat16() * 4
    head = LMHead(norm, Linear(weight, None), scale, cap)
    states = torch.randn((12, 64), generator=generator).bfloat16()
    logits = head(states)
    places = logits.argmax(-1)
    if cap is not None:
        assert ((logits == logits.max(-1, keepdim=True).values).sum(-1) > 1).all(), "the cap made none equal"
    found = head.likeliest(states)
    assert found is None or torch.equal(found, places)
