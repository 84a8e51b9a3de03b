"""The bfloat16 linear kernels of every variant this machine can run: near float64, and the same in every company."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from stageline.errors import ConfigError
from stageline.kernels import load_kernels
from stageline.kernels.build import variant_flags
from stageline.kernels.gemm import Gemm
from stageline.kernels.huge_pages import HugePages
from stageline.layers.linear import GatedLinear, Linear, TiedLinear

HALF_ULP = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
SOME_ROWS = [1, 2, 4, 5, 8, 9, 16, 17, 31, 32, 33, 64, 65]


def runnable_gemms() -> dict[str, Gemm]:
    gemms = {}
    for variant in variant_flags():
        try:
            kernels = load_kernels(variant)
        except ConfigError:  # this machine lacks the instructions
            continue
        assert kernels is not None, "the kernels did not compile; the log says why"
        gemms[variant] = kernels.gemm
    return gemms


GEMMS = runnable_gemms()


@pytest.fixture(params=GEMMS)
def gemm(request: pytest.FixtureRequest) -> Gemm:
    return GEMMS[request.param]


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """x Wᵀ + b in float64, and how far a sum in float32 may be from it.

    bfloat16 products are exact in float32. There are at most two roundings per element of the sum, one for the bias and
    some for padding, each at most half an ulp of the sum of the magnitudes so far.
    """
    exact, magnitude = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    if bias is not None:
        exact, magnitude = exact + bias.double(), magnitude + bias.double().abs()
    return exact, magnitude * (2 * x.shape[1] + 4) * HALF_ULP[torch.float32]


def assert_within(actual: torch.Tensor, exact: torch.Tensor, error: torch.Tensor) -> None:
    """One more rounding to the result's own dtype is allowed."""
    allowed = error + (exact.abs() + error) * HALF_ULP[actual.dtype]
    excess = (actual.double() - exact).abs() - allowed
    assert actual.shape == exact.shape and (excess <= 0).all(), f"{excess.max()} beyond the allowed error"


@pytest.mark.parametrize("variant", GEMMS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_linear_is_as_near_to_float64_as_float32_sums_are(variant: str, data: st.DataObject) -> None:
    rows, inputs, outputs = (data.draw(st.integers(low, high)) for low, high in ((0, 130), (1, 150), (1, 150)))
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float32]))
    x, weight = noise(rows, inputs), noise(outputs, inputs, seed=1)
    bias = noise(outputs, seed=2) if data.draw(st.booleans()) else None
    packed = GEMMS[variant].pack(weight, bias)
    actual = GEMMS[variant].linear(x, packed, dtype)
    assert actual.dtype == dtype
    assert_within(actual, *product(x, weight, bias))


@pytest.mark.parametrize("variant", GEMMS)
@settings(max_examples=40, deadline=None)
@given(rows=st.integers(0, 70), inputs=st.integers(1, 130), size=st.integers(1, 70), has_bias=st.booleans())
def test_gated_is_silu_of_the_gate_times_up(variant: str, rows: int, inputs: int, size: int, has_bias: bool) -> None:
    x, weight = noise(rows, inputs), noise(2 * size, inputs, seed=1)
    bias = noise(2 * size, seed=2) if has_bias else None
    exact, error = product(x, weight, bias)
    (gate, up), (gate_error, up_error) = exact.chunk(2, 1), error.chunk(2, 1)
    expected = F.silu(gate) * up
    # silu's slope is below 1.1; the exponential, the quotient and the product are right to a few ulp.
    allowed = 1.1 * gate_error * (up.abs() + up_error) + F.silu(gate).abs() * up_error + expected.abs() * 1e-6 + 1e-30
    actual = GEMMS[variant].gated(x, GEMMS[variant].pack(weight, bias, is_gated=True))
    assert actual.dtype == torch.bfloat16
    assert_within(actual, expected, allowed)


def test_gated_saturates_at_both_ends(gemm: Gemm) -> None:
    packed = gemm.pack(torch.ones(2, 1, dtype=torch.bfloat16), is_gated=True)
    x = torch.tensor([[-1000.0], [-90.0], [90.0], [1000.0]]).bfloat16()
    assert gemm.gated(x, packed).flatten().tolist() == pytest.approx([0, 0, 8100, 1e6], rel=2.0**-8, abs=1e-20)


@pytest.mark.parametrize("shape", [(576, 100), (9000, 40)], ids=["one block", "a panel cut over k"])
def test_a_row_is_the_same_bit_for_bit_in_every_company(gemm: Gemm, shape: tuple[int, int]) -> None:
    inputs, outputs = shape
    x = noise(300, inputs)
    plain, gated = gemm.pack(noise(outputs, inputs, seed=1)), gemm.pack(noise(outputs, inputs, seed=2), is_gated=True)
    all_plain, all_gated = gemm.linear(x, plain, torch.float32), gemm.gated(x, gated)
    for num_rows in SOME_ROWS:
        for first in (0, 300 - num_rows):
            some = slice(first, first + num_rows)
            assert torch.equal(gemm.linear(x[some], plain, torch.float32), all_plain[some])
            assert torch.equal(gemm.gated(x[some], gated), all_gated[some])
    assert torch.equal(gemm.linear(x, plain), all_plain.bfloat16())


def test_infinite_and_undefined_rows_leave_the_others_alone(gemm: Gemm) -> None:
    x, packed = noise(40, 65), gemm.pack(noise(33, 65, seed=1))
    expected = gemm.linear(x, packed)
    x[3], x[17] = torch.inf, torch.nan
    others = [row for row in range(40) if row not in (3, 17)]
    assert torch.equal(gemm.linear(x, packed)[others], expected[others])


def test_rows_may_lie_apart(gemm: Gemm) -> None:
    packed = gemm.pack(noise(50, 64, seed=1))
    wide = noise(20, 131)
    for x in (wide[:, 2:66], wide[::2, 1:65], wide[:, :128:2], noise(64, 20).T):
        assert torch.equal(gemm.linear(x, packed), gemm.linear(x.contiguous(), packed))


def test_largest_is_where_the_largest_logit_stands(gemm: Gemm) -> None:
    for rows, inputs, outputs in ((1, 64, 1000), (37, 65, 77), (9, 2, 1)):
        x, packed = noise(rows, inputs), gemm.pack(noise(outputs, inputs, seed=1), noise(outputs, seed=2))
        logits = gemm.linear(x, packed, torch.float32)
        places, values = gemm.largest(x, packed)
        assert torch.equal(values, logits.amax(1))
        assert torch.equal(places, logits.argmax(1))


@pytest.mark.parametrize("value", [0.0, -3.0, 2.0, -torch.inf, torch.inf, torch.nan])
def test_of_equal_logits_the_first_is_the_largest(gemm: Gemm, value: float) -> None:
    """The weight's only column is the logit; all others are smaller where anything can be."""
    lower = -torch.inf
    for first, second in ((0, 99), (31, 32), (40, 50), (64, 65)):
        weight = torch.full((100, 1), lower).bfloat16()
        weight[[first, second]] = value
        place, largest = gemm.largest(torch.ones(1, 1).bfloat16(), gemm.pack(weight))
        assert place.item() == (0 if value == -torch.inf else first)
        assert torch.equal(largest, torch.tensor([value])) or largest.isnan().item()


def test_a_packed_weight_gives_its_rows_back(gemm: Gemm) -> None:
    for outputs, inputs in ((100, 64), (33, 7), (1, 1)):
        weight = noise(outputs, inputs)
        rows = torch.arange(outputs).flip(0).repeat(2)
        assert torch.equal(gemm.unpack(gemm.pack(weight), rows), weight[rows])


def test_memory_in_large_pages_is_aligned_and_never_shared() -> None:
    pages = HugePages()
    shapes = [(3,), (1000, 7), (0,), (2**25 + 1,), (5, 5)]  # the fourth is larger than a run
    tensors = [pages.empty(shape, torch.bfloat16) for shape in shapes]
    for value, tensor in enumerate(tensors):
        assert tensor.data_ptr() % 64 == 0
        tensor.fill_(value)
    del pages
    for value, (tensor, shape) in enumerate(zip(tensors, shapes, strict=True)):
        assert tensor.shape == shape and (tensor == value).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_layers_are_their_formulas_in_both_dtypes(dtype: torch.dtype) -> None:
    x, weight, bias = noise(33, 96).to(dtype), noise(80, 96, seed=1).to(dtype), noise(80, seed=2).to(dtype)
    near = {"rtol": 2.0**-7, "atol": 1e-3} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    exact, _ = product(x, weight, bias)
    torch.testing.assert_close(Linear(weight, bias)(x).double(), exact, **near)
    torch.testing.assert_close(Linear(weight, bias).in_float32(x).double(), exact, **near)
    gated = F.silu(exact[:, :40]) * exact[:, 40:]
    torch.testing.assert_close(GatedLinear(weight, bias)(x).double(), gated, rtol=2 * near["rtol"], atol=near["atol"])
    tied = TiedLinear(weight)
    assert torch.equal(tied.rows(torch.tensor([3, 0, 79])), weight[[3, 0, 79]])
    assert torch.equal(tied(x), Linear(weight)(x))


@pytest.mark.skipif(torch.cpu._is_amx_tile_supported(), reason="oneDNN computes on machines with matrix tiles")
def test_only_the_packed_weight_is_kept() -> None:
    for layer_type in (Linear, GatedLinear, TiedLinear):
        weight = noise(64, 32)
        unpacked = weakref.ref(weight)
        layer = layer_type(weight)
        del weight
        assert unpacked() is None
        assert layer(noise(2, 32)).shape[0] == 2


@pytest.fixture
def three_threads() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(num_threads)


def big_problem(gemm: Gemm) -> Callable[[], list[torch.Tensor]]:
    """Enough work that it is shared among threads; the largest logit is there twice, in different parts."""
    x, weight = noise(70, 600), noise(3000, 600, seed=1)
    weight[2999] = weight[7]
    plain, gated = gemm.pack(weight), gemm.pack(noise(6000, 600, seed=2), is_gated=True)
    x[:, :] = torch.where(torch.arange(70).unsqueeze(1) % 2 == 0, x, weight[7])
    return lambda: [gemm.linear(x, plain), gemm.linear(x, plain, torch.float32), gemm.gated(x, gated),
                    *gemm.largest(x, plain)]  # fmt: skip


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.view(torch.uint8).numpy().tobytes()


def assert_all_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.usefixtures("three_threads")
def test_threads_share_the_work_without_changing_a_bit(gemm: Gemm) -> None:
    compute = big_problem(gemm)
    shared = compute()
    torch.set_num_threads(1)
    assert_all_equal(shared, compute())
    assert shared[-2][1] == 7


@pytest.mark.usefixtures("three_threads")
def test_calls_from_several_threads_do_not_wait_for_one_another_or_mix(gemm: Gemm) -> None:
    compute = big_problem(gemm)
    expected = compute()
    with ThreadPoolExecutor(4) as callers:
        for found in callers.map(lambda _: compute(), range(12)):
            assert_all_equal(found, expected)


@pytest.mark.usefixtures("three_threads")
def test_a_forked_process_computes_though_its_parents_threads_are_gone(gemm: Gemm) -> None:
    """torch's threads are gone too, so the child uses torch for nothing that these would share."""
    x, packed = noise(70, 600), gemm.pack(noise(3000, 600, seed=1))
    expected = as_bytes(gemm.linear(x, packed))
    child = os.fork()
    if child == 0:
        is_equal = False
        try:
            is_equal = as_bytes(gemm.linear(x, packed)) == expected
        finally:
            os._exit(0 if is_equal else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
