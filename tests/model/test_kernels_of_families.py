"""What families need beside Llama's: norms of queries and keys, gelu, rows scaled and added, partial rotation."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from stageline.attention.backend import AttentionMetadata, LayerCache
from stageline.attention.select import select_backend
from stageline.checkpoint.model_spec import RopeSpec
from stageline.layers.activation import GELU_TANH, activate_and_mul
from stageline.layers.linear import GatedLinear
from stageline.layers.norm import QueryKeyNorm
from stageline.layers.residual import add, scale_
from stageline.layers.rotary import Rotary
from tests.model.kernel_variants import variant

__all__ = ["variant"]

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
SIZES = [2, 7, 16, 20, 64, 96, 130]


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def near(found: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.double().view(x.shape[0], -1, weight.numel())
    return (wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()).flatten(1)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_queries_and_keys_have_norms_of_their_own_and_values_none(
    variant: str, dtype: torch.dtype, size: int
) -> None:
    for query_parts, key_parts in ((3, 1), (1, 1), (4, 2)):
        qkv = noise(5, (query_parts + 2 * key_parts) * size).to(dtype)
        weights = [1 + noise(size, seed=seed).to(dtype) * 0.2 for seed in (1, 2)]
        queries, keys, values = qkv.split([query_parts * size, key_parts * size, key_parts * size], 1)
        expected = torch.cat((normed(queries, weights[0]), normed(keys, weights[1]), values.double()), 1)
        near(QueryKeyNorm(weights[0], weights[1], 1e-5)(qkv.clone(), query_parts * size, key_parts * size), expected)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_gelu_is_near_float64_also_far_out(variant: str, dtype: torch.dtype) -> None:
    for size in SIZES:
        gate_up = (noise(3, 2 * size) * 3).to(dtype)
        gate_up[0, :size], gate_up[1, :size] = -200.0, 200.0
        gate, up = gate_up.double().chunk(2, -1)
        near(activate_and_mul(gate_up, GELU_TANH), F.gelu(gate, approximate="tanh") * up)


def test_a_gated_layer_takes_gelu(variant: str) -> None:
    x, weight = noise(4, 48).bfloat16(), (noise(2 * 40, 48, seed=1) / 7).bfloat16()
    gate, up = (x.double() @ weight.double().T).chunk(2, -1)
    near(GatedLinear(weight, None, GELU_TANH)(x), F.gelu(gate, approximate="tanh") * up)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_rows_are_added_and_scaled_and_rounded_once(variant: str, dtype: torch.dtype) -> None:
    for size in SIZES:
        x, residual = noise(3, size).to(dtype), noise(3, size, seed=1).to(dtype)
        before = x.clone()
        assert torch.equal(add(x, residual), x + residual) and torch.equal(x, before)
        assert torch.equal(scale_(x, 0.22), before * 0.22)
        assert torch.equal(scale_(before, 1.0), before)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("rotary_dim", [2, 10, 16, 32])
def test_the_rest_of_a_partly_rotated_head_stays_as_it_is(variant: str, dtype: torch.dtype, rotary_dim: int) -> None:
    num_tokens, head_dim = 6, 32
    heads = noise(num_tokens, 3 + 2, head_dim).to(dtype)
    cache = LayerCache(*(torch.zeros(2, 1, 16, head_dim, dtype=dtype) for _ in range(2)))
    metadata = AttentionMetadata(
        num_decode_rows=0,
        num_scheduled_tokens=[num_tokens],
        num_computed_tokens=[0],
        query_starts=torch.tensor([0, num_tokens], dtype=torch.int32),
        context_lens=torch.tensor([num_tokens], dtype=torch.int32),
        block_tables=torch.zeros(1, 1, dtype=torch.int32),
        slot_mapping=torch.arange(num_tokens),
        positions=torch.arange(20, 20 + num_tokens),
    )
    rotary = Rotary(RopeSpec(rotary_dim=rotary_dim, magnitude=1.25), head_dim, 64, CPU)
    found = select_backend(CPU).rotate_and_store(heads.clone(), rotary, metadata, cache)
    angles = torch.outer(metadata.positions.double(), 1e4 ** (-torch.arange(0, rotary_dim, 2).double() / rotary_dim))
    first, second, rest = heads[:, :3].double().split([rotary_dim // 2, rotary_dim // 2, head_dim - rotary_dim], -1)
    cos, sin = 1.25 * angles.cos()[:, None], 1.25 * angles.sin()[:, None]
    near(found, torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1))
    assert torch.equal(found[..., rotary_dim:], heads[:, :3, rotary_dim:])
    unrotated = select_backend(CPU).rotate_and_store(heads.clone(), None, metadata, cache)
    assert torch.equal(unrotated, heads[:, :3])
