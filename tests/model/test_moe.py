"""Experts: every kernel computes what torch does, and a token's result does not depend on its company."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace

from stageline.checkpoint.model_spec import MoeSpec
from stageline.kernels.experts import Expert, QuantizedExpert
from stageline.kernels.huge_pages import HugePages
from stageline.kernels.quantized import Kind, QuantizedMatrix
from stageline.layers.moe import MoeMLP, Router, TorchExperts, choose_experts
from tests.model.kernel_variants import variant

__all__ = ["variant"]

HIDDEN, SIZE, NUM_EXPERTS = 72, 38, 8
SPECS = {
    "softmax": MoeSpec(num_experts=NUM_EXPERTS, num_experts_per_token=2, intermediate_size=SIZE),
    "not normalised": MoeSpec(
        num_experts=NUM_EXPERTS, num_experts_per_token=3, intermediate_size=SIZE, normalizes_weights=False
    ),
    "grouped by best": MoeSpec(
        num_experts=NUM_EXPERTS, num_experts_per_token=2, intermediate_size=SIZE, normalizes_weights=False,
        num_groups=4, num_groups_per_token=2, weight_factor=16.0,
    ),
    "sigmoid, grouped with a bias": MoeSpec(
        num_experts=NUM_EXPERTS, num_experts_per_token=3, intermediate_size=SIZE, scoring="sigmoid", num_groups=4,
        num_groups_per_token=2, group_score_experts=2, has_selection_bias=True, weight_factor=2.5,
    ),
    "clamped with biases": MoeSpec(
        num_experts=NUM_EXPERTS, num_experts_per_token=4, intermediate_size=SIZE, has_bias=True,
        activation="clamped_swiglu", swiglu_alpha=1.702, swiglu_limit=0.8,
    ),
}  # fmt: skip


class Layer:
    """One layer's random experts, and what they should give."""

    def __init__(self, spec: MoeSpec, dtype: torch.dtype, has_shared: bool = False) -> None:
        generator = torch.Generator().manual_seed(1)

        def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
            return (torch.randn(shape, generator=generator) * scale).to(dtype)

        self.spec = spec
        self.router_weight = random(spec.num_experts, HIDDEN, scale=0.3)
        self.bias = 0.5 * torch.randn(spec.num_experts, generator=generator) if spec.has_selection_bias else None
        self.experts = [
            Expert(
                random(2 * SIZE, HIDDEN, scale=HIDDEN**-0.5),
                random(HIDDEN, SIZE, scale=SIZE**-0.5),
                random(2 * SIZE) if spec.has_bias else None,
                random(HIDDEN) if spec.has_bias else None,
            )
            for _ in range(spec.num_experts)
        ]
        self.shared_weight = random(HIDDEN, HIDDEN, scale=HIDDEN**-0.5) if has_shared else None
        self.gate_weight = random(1, HIDDEN, scale=0.3) if has_shared else None

    def mlp(self, own: range | None = None) -> MoeMLP:
        """Args: own: the experts that a rank was dealt; all if it is not given."""
        weight, first, end = self.shared_weight, 0, self.spec.num_experts
        if own is not None:
            first, end = own.start, own.stop
        return MoeMLP(
            self.spec if own is None else replace(self.spec, is_dealt=True, own_experts=(first, end)),
            Router(self.router_weight),
            iter(self.experts[first:end]),
            self.bias,
            None if weight is None else (lambda x: x @ weight.T),
            None if self.gate_weight is None else Router(self.gate_weight),
        )

    def expected(self, x: torch.Tensor) -> torch.Tensor:
        """Token by token and expert by expert, in float64."""
        wide = x.double()
        chosen, weights = choose_experts(self.spec, (x.float() @ self.router_weight.float().T), self.bias)
        rows = []
        for token, (places, shares) in enumerate(zip(chosen.tolist(), weights.tolist(), strict=True)):
            row = torch.zeros(HIDDEN, dtype=torch.float64)
            for place, share in zip(places, shares, strict=True):
                row += share * self.of_expert(place, wide[token])
            if self.shared_weight is not None and self.gate_weight is not None:
                gate = torch.sigmoid(wide[token] @ self.gate_weight[0].double())
                row += gate * (self.shared_weight.double() @ wide[token])
            rows.append(row)
        return torch.stack(rows)

    def of_expert(self, place: int, row: torch.Tensor) -> torch.Tensor:
        expert = self.experts[place]
        gate_up, down = expert.gate_up.double() @ row, expert.down.double()
        if expert.gate_up_bias is not None and expert.down_bias is not None:
            gate, up = (gate_up + expert.gate_up_bias.double()).chunk(2)
            gate, up = gate.clamp(max=self.spec.swiglu_limit), up.clamp(-self.spec.swiglu_limit, self.spec.swiglu_limit)
            gated = gate * torch.sigmoid(self.spec.swiglu_alpha * gate) * (up + 1)
            return down @ gated + expert.down_bias.double()
        gate, up = gate_up.chunk(2)
        return down @ (torch.nn.functional.silu(gate) * up)


def inputs(num_tokens: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(2)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", SPECS)
def test_the_chosen_experts_are_summed_by_weight(name: str, dtype: torch.dtype, variant: str) -> None:
    layer = Layer(SPECS[name], dtype, has_shared=name == "softmax")
    x = inputs(33, dtype)
    expected = layer.expected(x)
    error = (layer.mlp()(x).double() - expected).norm() / expected.norm()
    assert error < (1e-6 if dtype == torch.float32 else 6e-3)


@pytest.mark.parametrize("name", SPECS)
def test_what_ranks_with_some_of_the_experts_give_adds_up_to_all(name: str, variant: str) -> None:
    layer = Layer(SPECS[name], torch.float32)
    x = inputs(33, torch.float32)
    chosen, _ = choose_experts(layer.spec, x @ layer.router_weight.T, layer.bias)
    total, num_without = torch.zeros_like(x), 0
    for own in (range(1), range(1, 6), range(6, NUM_EXPERTS)):
        part = layer.mlp(own)(x)
        has_own = ((chosen >= own.start) & (chosen < own.stop)).any(1)
        assert torch.equal(part.abs().sum(1) > 0, has_own)
        num_without += int((~has_own).sum())
        total += part
    assert num_without > 0
    expected = layer.expected(x)
    assert (total.double() - expected).norm() / expected.norm() < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_token_does_not_know_its_company(dtype: torch.dtype, variant: str) -> None:
    if variant == "torch":
        pytest.skip("torch's own products depend on the number of rows")
    mlp = Layer(SPECS["softmax"], dtype).mlp()
    x = inputs(300, dtype)
    logits_in_company = mlp(x)
    for token in (0, 7, 299):
        alone = mlp(x[token : token + 1].contiguous())
        if dtype == torch.float32:  # the router's product is torch's
            torch.testing.assert_close(alone[0], logits_in_company[token], rtol=1e-6, atol=1e-6)
        else:
            assert torch.equal(alone[0], logits_in_company[token])


def test_threads_that_share_the_work_change_nothing() -> None:
    spec = MoeSpec(num_experts=4, num_experts_per_token=2, intermediate_size=1024)
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    experts = [Expert(random(2048, 1024), random(1024, 1024)) for _ in range(4)]
    mlp = MoeMLP(spec, Router(random(4, 1024)), iter(experts))
    x = random(64, 1024)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = mlp(x)
        torch.set_num_threads(2)
        assert torch.equal(mlp(x), alone)
    finally:
        torch.set_num_threads(before)


def quantized_layer(size: int, is_clamped: bool) -> tuple[MoeSpec, Router, list[QuantizedExpert]]:
    """Experts in three kinds of blocks, hidden and size being multiples of 32."""
    hidden, generator, memory = 96, torch.Generator().manual_seed(7), HugePages()

    def matrix(kind: Kind, rows: int, columns: int) -> QuantizedMatrix:
        packed = QuantizedMatrix.empty(kind, rows, columns, memory)
        numbers = torch.randint(0, 16 if kind.is_four_bits else 256, (rows, columns), generator=generator)
        scales = torch.rand(rows, columns // 32, kind.num_scales, generator=generator)
        scales *= 0.03 if kind.is_four_bits else 2e-3
        if kind == Kind.FOUR_BITS_MINIMUM:
            scales[..., 1] *= -8
        packed.pack_rows(0, numbers.to(torch.uint8), scales.half())
        return packed

    def bias(rows: int) -> torch.Tensor | None:
        return torch.randn(rows, generator=generator).bfloat16() if is_clamped else None

    spec = MoeSpec(num_experts=6, num_experts_per_token=2, intermediate_size=size)
    if is_clamped:
        spec = replace(spec, has_bias=True, activation="clamped_swiglu", swiglu_alpha=1.702, swiglu_limit=0.8)
    kinds = Kind.FOUR_BITS_MINIMUM, Kind.FOUR_BITS, Kind.EIGHT_BITS
    experts = [
        QuantizedExpert(
            matrix(kinds[0], size, hidden),
            matrix(kinds[1], size, hidden),
            matrix(kinds[2], hidden, size),
            bias(2 * size),
            bias(hidden),
        )
        for _ in range(spec.num_experts)
    ]
    return spec, Router(torch.randn(6, hidden, generator=generator).bfloat16()), experts


@pytest.mark.parametrize(("size", "is_clamped"), [(64, True), (160, False)])
def test_experts_that_stay_quantised_compute_what_their_numbers_do(size: int, is_clamped: bool, variant: str) -> None:
    spec, router, experts = quantized_layer(size, is_clamped)
    x = torch.randn(40, 96, generator=torch.Generator().manual_seed(8)).bfloat16()
    mlp = MoeMLP(spec, router, iter(experts))
    dense = TorchExperts(spec, [expert.dequantized(torch.float32) for expert in experts], None)
    expected = dense(x.float(), router(x), None, None)
    found = mlp(x)
    assert (found.float() - expected).norm() / expected.norm() < 0.03
    if variant != "torch":
        assert torch.equal(mlp(x[7:8].contiguous())[0], found[7])
    hands = [MoeMLP(replace(spec, own_experts=own), router, iter(experts[slice(*own)])) for own in ((0, 2), (2, 6))]
    assert (sum(part(x).float() for part in hands) - expected).norm() / expected.norm() < 0.03


def test_of_equal_experts_the_first_are_chosen_and_weights_sum_to_one(variant: str) -> None:
    spec = SPECS["softmax"]
    layer = Layer(spec, torch.float32)
    layer.router_weight.zero_()
    x = inputs(5, torch.float32)
    found = layer.mlp()(x)
    for row, result in zip(x.double(), found.double(), strict=True):
        first_two = (layer.of_expert(0, row) + layer.of_expert(1, row)) / 2
        torch.testing.assert_close(result, first_two, rtol=1e-5, atol=1e-5)


def test_no_tokens_give_none(variant: str) -> None:
    assert Layer(SPECS["softmax"], torch.float32).mlp()(torch.empty(0, HIDDEN)).shape == (0, HIDDEN)


def test_torch_computes_on_without_kernels() -> None:
    layer = Layer(SPECS["sigmoid, grouped with a bias"], torch.float32)
    x = inputs(9, torch.float32)
    logits = x @ layer.router_weight.T
    found = TorchExperts(layer.spec, layer.experts, layer.bias)(x, logits, None, None)
    torch.testing.assert_close(found.double(), layer.expected(x), rtol=1e-4, atol=1e-5)
