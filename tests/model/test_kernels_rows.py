"""Norm, activation, rotation with store, the largest logits: near float64 or exact, in every variant and in torch."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stageline.attention.backend import AttentionMetadata, LayerCache
from stageline.attention.select import select_backend
from stageline.checkpoint.model_spec import RopeSpec
from stageline.kernels import CpuKernels
from stageline.layers.activation import silu_and_mul
from stageline.layers.norm import RMSNorm
from stageline.layers.rotary import Rotary
from stageline.worker.leading_tokens import largest, leading_tokens
from tests.model.kernel_variants import library, variant

__all__ = ["library", "variant"]

CPU = torch.device("cpu")
SIZES = [1, 2, 7, 15, 16, 17, 33, 64, 100, 577]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
DTYPES = list(TOLERANCE)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_residual", [False, True])
@pytest.mark.parametrize("num_rows", [0, 1, 5])
def test_norm_is_near_float64(variant: str, dtype: torch.dtype, has_residual: bool, num_rows: int) -> None:
    for size in SIZES:
        x, weight = noise(num_rows, size).to(dtype), noise(size, seed=1).to(dtype)
        residual = noise(num_rows, size, seed=2).to(dtype) if has_residual else None
        normed, total = RMSNorm(weight, 1e-5)(x, residual)
        assert torch.equal(total, x if residual is None else x + residual)
        wide = total.double()
        expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
        torch.testing.assert_close(normed.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_and_mul_is_near_float64_also_far_out(variant: str, dtype: torch.dtype) -> None:
    for size in SIZES:
        gate_up = (noise(3, 2 * size) * 3).to(dtype)
        gate_up[0, :size] = -200.0
        gate_up[1, :size] = 200.0
        gate, up = gate_up.double().chunk(2, -1)
        expected = gate / (1 + (-gate).exp()) * up
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(silu_and_mul(gate_up).double(), expected, rtol=tolerance, atol=tolerance / 10)


class StoreUnderTest:
    """Some tokens in random slots of a random cache."""

    def __init__(self, dtype: torch.dtype, head_dim: int, num_heads: int, num_kv_heads: int, block_size: int) -> None:
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        num_tokens = 11
        shape = (8, num_kv_heads, block_size, head_dim)
        self.cache = LayerCache(noise(*shape, seed=3).to(dtype), noise(*shape, seed=4).to(dtype))
        self.before = LayerCache(self.cache.keys.clone(), self.cache.values.clone())
        self.heads = noise(num_tokens, num_heads + 2 * num_kv_heads, head_dim).to(dtype)
        self.positions = torch.arange(90, 90 + num_tokens)
        generator = torch.Generator().manual_seed(5)
        self.slots = torch.randperm(8 * block_size, generator=generator)[:num_tokens]
        self.metadata = AttentionMetadata(
            num_decode_rows=0,
            num_scheduled_tokens=[num_tokens],
            num_computed_tokens=[0],
            query_starts=torch.tensor([0, num_tokens], dtype=torch.int32),
            context_lens=torch.tensor([num_tokens], dtype=torch.int32),
            block_tables=torch.zeros(1, 2, dtype=torch.int32),
            slot_mapping=self.slots,
            positions=self.positions,
        )
        self.rotary = Rotary(RopeSpec(), head_dim, 128, CPU)

    def run(self) -> torch.Tensor:
        return select_backend(CPU).rotate_and_store(self.heads.clone(), self.rotary, self.metadata, self.cache)

    def stored(self, tensor: torch.Tensor) -> torch.Tensor:
        """[tokens, num_kv_heads, head_dim]: what stands in the tokens' slots."""
        block_size = tensor.shape[2]
        return tensor[self.slots // block_size, :, self.slots % block_size]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (9, 3), (5, 1)], ids=str)
@pytest.mark.parametrize("head_dim", [2, 8, 20, 64, 80, 96, 128, 256])
def test_queries_and_stored_keys_are_rotated_exactly_as_by_torch(
    variant: str, dtype: torch.dtype, heads: tuple[int, int], head_dim: int
) -> None:
    case = StoreUnderTest(dtype, head_dim, *heads, block_size=6)
    queries = case.run()
    num_heads, num_rotated = heads[0], sum(heads)
    rotated = case.rotary(case.heads[:, :num_rotated], case.positions)
    assert torch.equal(queries, rotated[:, :num_heads])
    assert torch.equal(case.stored(case.cache.keys), rotated[:, num_heads:])
    assert torch.equal(case.stored(case.cache.values), case.heads[:, num_rotated:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nothing_is_stored_beside_the_slots(variant: str, dtype: torch.dtype) -> None:
    case = StoreUnderTest(dtype, 20, 4, 2, block_size=6)
    case.run()
    for after, before in ((case.cache.keys, case.before.keys), (case.cache.values, case.before.values)):
        untouched = torch.ones(8, 6, dtype=torch.bool)
        untouched[case.slots // 6, case.slots % 6] = False
        assert torch.equal(after.transpose(1, 2)[untouched], before.transpose(1, 2)[untouched])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_are_finite_in_the_cache(variant: str, dtype: torch.dtype) -> None:
    case = StoreUnderTest(dtype, 8, 1, 1, block_size=6)
    case.heads[:, 2] = torch.tensor([1.0, math.inf, -math.inf, math.nan, 2.0, 3.0, 4.0, 5.0])
    case.run()
    most = torch.finfo(dtype).max
    expected = torch.tensor([1.0, most, -most, 0.0, 2.0, 3.0, 4.0, 5.0]).to(dtype)
    assert torch.equal(case.stored(case.cache.values), expected.expand(11, 1, 8))


@pytest.mark.parametrize("size", [1, 2, 15, 16, 17, 63, 64, 65, 100, 5000])
def test_the_largest_is_the_first_of_equals(variant: str, size: int) -> None:
    logits = torch.randint(0, 5, (20, size), generator=torch.Generator().manual_seed(size)).float()
    logits[0] = -math.inf
    logits[1] = 0.0
    logits[2, size // 2] = math.nan
    assert largest(logits).tolist() == [row.index(max(row)) for row in logits[:2].tolist()] + [size // 2] + [
        row.index(max(row)) for row in logits[3:].tolist()
    ]


def test_the_largest_of_bfloat16_is_found_too(library: CpuKernels) -> None:
    logits = noise(7, 1000).bfloat16()
    assert torch.equal(library.argmax(logits), logits.float().argmax(-1))


@pytest.mark.parametrize(("size", "k"), [(1, 1), (5, 5), (40, 3), (1000, 1), (1000, 64), (5000, 20), (5000, 4999)])
def test_leading_tokens_are_sorted_by_logit_then_id(variant: str, size: int, k: int) -> None:
    generator = torch.Generator().manual_seed(size + k)
    few_values = torch.randint(-50, 50, (3, size), generator=generator).float()
    for logits in (few_values, noise(3, size), few_values.masked_fill(few_values < 40, -math.inf)):
        values, ids = leading_tokens(logits, k)
        for row in range(3):
            order = sorted(range(size), key=lambda token: (-logits[row, token].item(), token))[:k]
            assert ids[row].tolist() == order
            assert torch.equal(values[row], logits[row, order])


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 300), st.integers(0, 2**32), st.integers(1, 40))
def test_leading_tokens_of_any_row_equal_a_stable_sort(variant: str, size: int, seed: int, num_values: int) -> None:
    draw = random.Random(seed)
    row = [float(draw.randrange(num_values)) for _ in range(size)]
    k = draw.randint(1, size)
    values, ids = leading_tokens(torch.tensor([row]), k)
    expected = sorted(range(size), key=lambda token: (-row[token], token))[:k]
    assert ids[0].tolist() == expected
    assert values[0].tolist() == [row[token] for token in expected]
