"""Latent attention: every kernel gives what heads expanded from the rows give, and the cache keeps rows alone."""

from __future__ import annotations

import pytest
import torch

from stageline.attention.backend import LayerCache
from stageline.checkpoint.model_spec import MlaSpec, ModelSpec, RopeSpec
from stageline.kv.kv_size import kv_bytes_per_token
from stageline.layers.linear import Linear
from stageline.layers.mla import LatentAttention, LatentScores, LatentWeights
from stageline.layers.rotary import Rotary
from stageline.pipeline.microbatch import MicrobatchLimits
from stageline.worker.input_buffers import InputBuffers
from stageline.worker.kv_tensors import allocate_kv_tensors
from tests.model.kernel_variants import variant
from tests.model.requests_under_test import RequestsUnderTest

__all__ = ["variant"]

CPU = torch.device("cpu")
HIDDEN, HEADS, MAX_LEN, EPS = 40, 5, 256, 1e-6
SPEC = MlaSpec(q_lora_rank=12, kv_lora_rank=26, qk_nope_head_dim=14, qk_rope_head_dim=6, v_head_dim=10)
SPEC_OF_WHOLE_VECTORS = MlaSpec(
    q_lora_rank=None, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16
)
LIMITS = MicrobatchLimits(64, 16, 100, 8, 256, MAX_LEN)
MODEL = ModelSpec(
    family="deepseek", num_layers=3, hidden_size=HIDDEN, num_heads=HEADS, num_kv_heads=HEADS, head_dim=20,
    intermediate_size=8, vocab_size=100, max_position_embeddings=MAX_LEN, rms_norm_eps=EPS, rope=RopeSpec(),
    tie_word_embeddings=False, mla=SPEC,
)  # fmt: skip


class Layer:
    """Random weights, the layer over them, and what it should give."""

    def __init__(self, spec: MlaSpec, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).to(dtype)

        head_dim = spec.qk_nope_head_dim + spec.qk_rope_head_dim
        rank = spec.q_lora_rank or 0
        self.spec, self.scale = spec, head_dim**-0.5
        self.inputs = random(rank + spec.row_size, HIDDEN)
        self.queries = random(HEADS * head_dim, rank or HIDDEN) * 2
        self.out = random(HIDDEN, HEADS * spec.v_head_dim)
        self.weights = LatentWeights(
            row_norm=random(spec.kv_lora_rank) + 1,
            query_norm=random(rank) + 1 if rank else None,
            eps=EPS,
            key_up=random(HEADS, spec.qk_nope_head_dim, spec.kv_lora_rank),
            value_up=random(HEADS, spec.v_head_dim, spec.kv_lora_rank),
        )
        self.rotary = Rotary(RopeSpec(), spec.qk_rope_head_dim, MAX_LEN, CPU)
        shape = (LIMITS.num_blocks, 1, LIMITS.block_size, spec.row_size)
        rows = torch.zeros(shape, dtype=dtype)
        self.cache = LayerCache(rows, rows)
        self.layer = LatentAttention(
            spec,
            inputs=Linear(self.inputs),
            queries=Linear(self.queries),
            weights=self.weights,
            out=Linear(self.out),
            rotary=self.rotary,
            scores=LatentScores(spec, CPU, dtype),
            scale=self.scale,
        )

    def expected(self, x: torch.Tensor) -> torch.Tensor:
        """x: [tokens, hidden] of one request from its beginning. Keys and values are expanded to all heads, float64."""
        spec, tokens = self.spec, x.shape[0]
        positions = torch.arange(tokens)
        rank, nope = spec.kv_lora_rank, spec.qk_nope_head_dim
        inputs = x.double() @ self.inputs.double().T
        first, row = inputs[:, : -spec.row_size], inputs[:, -spec.row_size :]
        norm = self.weights.query_norm
        queries = (x.double() if norm is None else _normed(first, norm)) @ self.queries.double().T
        heads = queries.view(tokens, HEADS, -1)
        latent = _normed(row[:, :rank], self.weights.row_norm)
        turned_key = self.rotary(row[:, None, rank:], positions).expand(-1, HEADS, -1)
        keys = torch.cat((torch.einsum("hdr,tr->thd", self.weights.key_up.double(), latent), turned_key), -1)
        values = torch.einsum("hdr,tr->thd", self.weights.value_up.double(), latent)
        heads = torch.cat((heads[..., :nope], self.rotary(heads[..., nope:], positions)), -1)
        scores = torch.einsum("qhd,khd->hqk", heads, keys) * self.scale
        scores.masked_fill_(torch.ones(tokens, tokens, dtype=torch.bool).triu_(1), -torch.inf)
        attended = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
        return attended.flatten(1) @ self.out.double().T


def _normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def inputs_of(request: int, tokens: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(request)).to(dtype)


def run(
    layer: Layer, lengths: dict[int, int], schedule: list[dict[int, int]], dtype: torch.dtype
) -> list[torch.Tensor]:
    """Returns: each request's results, [tokens, hidden]."""
    requests, buffers = RequestsUnderTest(LIMITS), InputBuffers(LIMITS, CPU)
    states = {number: inputs_of(number, length, dtype) for number, length in lengths.items()}
    done: dict[int, list[torch.Tensor]] = {number: [] for number in lengths}
    for number, length in lengths.items():
        requests.add(number, [1] * length)
    for rows in schedule:
        starts = {number: requests.requests[number].num_computed for number in rows}
        microbatch = requests.microbatch(rows)
        order = microbatch.request_numbers
        x = torch.cat([states[number][starts[number] : starts[number] + rows[number]] for number in order])
        found = layer.layer(x, buffers.apply_and_build(microbatch), layer.cache)
        for number, part in zip(order, found.split([rows[number] for number in order]), strict=True):
            done[number].append(part.clone())
    return [torch.cat(done[number]) for number in lengths]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spec", [SPEC, SPEC_OF_WHOLE_VECTORS], ids=["compressed queries", "whole vectors"])
def test_rows_give_what_expanded_heads_give(spec: MlaSpec, dtype: torch.dtype, variant: str) -> None:
    layer = Layer(spec, dtype)
    lengths = {0: 150, 1: 40}
    found = run(layer, lengths, [{0: 70, 1: 39}, {0: 79, 1: 1}, {0: 1}], dtype)
    for number, result in zip(lengths, found, strict=True):
        expected = layer.expected(inputs_of(number, lengths[number], dtype))
        error = (result.double() - expected).norm() / expected.norm()
        assert error < (2e-6 if dtype == torch.float32 else 2e-2)


def test_a_token_does_not_know_its_company_nor_its_chunk(variant: str) -> None:
    if variant in ("torch", "portable") or torch.cpu._is_amx_tile_supported():
        pytest.skip("torch's own products depend on the number of rows")
    lengths, dtype = {0: 90, 1: 30}, torch.bfloat16
    together = run(Layer(SPEC, dtype), lengths, [{0: 64, 1: 20}, {0: 26, 1: 10}], dtype)
    alone = run(Layer(SPEC, dtype), {0: 90}, [{0: 33}, {0: 56}, {0: 1}], dtype)
    assert torch.equal(together[0], alone[0])


def test_the_cache_keeps_one_row_for_all_heads() -> None:
    assert kv_bytes_per_token(MODEL, 3, 2) == 3 * 2 * (26 + 6)
    [first, *_] = allocate_kv_tensors(MODEL, 3, 4, 16, torch.bfloat16, CPU)
    assert first.keys.shape == (4, 1, 16, 32) and first.values.data_ptr() == first.keys.data_ptr()


def test_an_overflow_of_one_request_does_not_reach_another(variant: str) -> None:
    layer, dtype = Layer(SPEC, torch.float32), torch.float32
    alone = run(layer, {1: 20}, [{1: 20}], dtype)[0]
    layer.cache.keys[:, :, 8:].fill_(3e38)  # what was left behind the end of a request's last block
    again = run(layer, {1: 20}, [{1: 20}], dtype)[0]
    assert torch.equal(alone, again)
