"""Products over GGML's quantised blocks against float64, for every type and every variant the machine can run.

Packed rows are what the `gguf` package makes of the blocks: exactly, or for K types within the rounding of their scales
to float16. Products are checked against those rows in float64. Activations are rounded to eight bits per block, so the
reference rounds them by the same rule; what remains is float32's error in adding up the blocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from stageline.checkpoint.encodings import ENCODINGS, PACKED_BLOCK_BYTES, PACKED_BLOCK_ELEMENTS
from stageline.kernels.huge_pages import HugePages
from stageline.kernels.quantized import BLOCK, QuantizedKernels, QuantizedMatrix, QuantizedProduct
from stageline.weights.quantized import PACKED_ENCODINGS, pack_matrix
from tests.model.quantized_blocks import dequantized, random_blocks, runnable_kernels

TYPES = sorted(PACKED_ENCODINGS)
KERNELS = runnable_kernels()
SOME_ROWS = [1, 2, 3, 4, 5, 8, 11, 12, 13, 24, 25, 65]
# A row takes 1.75 bytes a column of the kernel's 256 KiB, so more rows than these go in two runs.
ROWS_OF_TWO_RUNS, COLUMNS_OF_TWO_RUNS = 75, 2048


@pytest.fixture(params=KERNELS)
def kernels(request: pytest.FixtureRequest) -> QuantizedKernels | None:
    return KERNELS[request.param]


def packed(name: str, rows: int, columns: int, seed: int = 0) -> tuple[QuantizedMatrix, torch.Tensor]:
    """A random matrix of a type and its weights in float64, as packed."""
    blocks = random_blocks(name, rows, columns, columns**-0.5, seed)
    matrix = pack_matrix(torch.from_numpy(blocks), name, HugePages())
    assert matrix is not None
    return matrix, matrix.rows(torch.arange(rows)).double()


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rounded_activations(x: torch.Tensor) -> torch.Tensor:
    """Eight bits per block of 32, by float32's arithmetic, which the kernels use, in float64."""
    blocks = x.float().reshape(x.shape[0], x.shape[1] // BLOCK, BLOCK).numpy()
    bounds = np.abs(blocks).max(-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        numbers = np.where(bounds > 0, np.round(blocks * (np.float32(127) / bounds)), 0)
    return torch.from_numpy(numbers.astype(np.float64) * (bounds / np.float32(127))).view(x.shape)


def assert_near(found: torch.Tensor, exact: torch.Tensor, x: torch.Tensor, weights: torch.Tensor) -> None:
    """At most five roundings a block in float32, of sums whose parts (the numbers' and the minimum's) may be some times
    larger than the weights; and the result's own rounding.
    """
    num_roundings = 5 * x.shape[1] // BLOCK + 5
    magnitude = 8 * x.abs().sum(-1, keepdim=True) * weights.abs().amax() + exact.abs()
    tolerance = magnitude * num_roundings * 2.0**-24 + exact.abs() * (2.0**-8 if found.dtype == torch.bfloat16 else 0)
    assert ((found.double() - exact).abs() <= tolerance).all()


@pytest.mark.parametrize("name", TYPES)
def test_packed_rows_are_the_weights_of_the_file(name: str) -> None:
    blocks = random_blocks(name, 130, 512, 512**-0.5)
    weights = torch.from_numpy(dequantized(name, blocks))
    matrix = pack_matrix(torch.from_numpy(blocks), name, HugePages())
    assert matrix is not None
    places = torch.tensor([129, 0, 0, 63, 64, 17])
    found = matrix.rows(places)
    if name in ("Q4_K", "Q6_K"):  # their scales are products, which float16 rounds
        assert ((found - weights[places]).abs() <= weights.abs().max() * 2.0**-10).all()
    else:
        assert torch.equal(found, weights[places])


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_looked_up_are_the_packed_ones(kernels: QuantizedKernels | None, dtype: torch.dtype, name: str) -> None:
    matrix, _ = packed(name, 130, 512)
    places = torch.tensor([129, 0, 0, 63, 64, 17, 78])
    assert torch.equal(QuantizedProduct(kernels, [matrix]).rows(places, dtype), matrix.rows(places).to(dtype))


@pytest.mark.parametrize("name", TYPES)
def test_memory_is_what_the_plan_counts(name: str) -> None:
    matrix, _ = packed(name, 128, 256)
    assert matrix.num_bytes == 128 * 256 // PACKED_BLOCK_ELEMENTS * PACKED_BLOCK_BYTES[name]


@settings(max_examples=40, deadline=None)
@given(data=st.data(), name=st.sampled_from(TYPES), variant=st.sampled_from(list(KERNELS)))
def test_products_of_any_shape_are_near_float64(data: st.DataObject, name: str, variant: str) -> None:
    blocks_per_row = data.draw(st.integers(1, 4 if ENCODINGS[name].block_elements == 256 else 12))
    columns = ENCODINGS[name].block_elements * blocks_per_row
    rows, out_features = data.draw(st.integers(0, 30)), data.draw(st.integers(1, 140))
    matrix, weights = packed(name, out_features, columns)
    x = noise(rows, columns).to(data.draw(st.sampled_from([torch.float32, torch.bfloat16])))
    bias = noise(out_features, seed=1) if data.draw(st.booleans()) else None
    dtype = torch.float32 if x.dtype == torch.float32 else data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    found = QuantizedProduct(KERNELS[variant], [matrix], bias).linear(x, dtype)
    assert found.shape == (rows, out_features) and found.dtype == dtype
    exact_x = rounded_activations(x)
    exact = exact_x @ weights.T + (0 if bias is None else bias.double())
    assert_near(found, exact, exact_x, weights)


@pytest.mark.parametrize("name", TYPES)
def test_float32_results_are_as_near_as_float32_can_be(kernels: QuantizedKernels | None, name: str) -> None:
    matrix, _ = packed(name, 100, 1536)
    weights = matrix.rows(torch.arange(100)).double()  # as packed: the rounding of K types' scales is left out
    x = noise(13, 1536)
    found = QuantizedProduct(kernels, [matrix]).linear(x, torch.float32).double()
    exact = rounded_activations(x) @ weights.T
    assert (found - exact).abs().max() <= 2e-6 * exact.abs().max()


def test_rows_beyond_one_run_and_rows_of_zeros(kernels: QuantizedKernels | None) -> None:
    matrix, weights = packed("Q4_1", 70, COLUMNS_OF_TWO_RUNS)
    x = noise(ROWS_OF_TWO_RUNS, COLUMNS_OF_TWO_RUNS)
    x[3] = 0
    x[4, : 5 * BLOCK] = 0
    found = QuantizedProduct(kernels, [matrix]).linear(x, torch.float32)
    assert_near(found, rounded_activations(x) @ weights.T, rounded_activations(x), weights)
    assert torch.equal(found[3], torch.zeros(70))


def test_the_largest_products_do_not_overflow(kernels: QuantizedKernels | None) -> None:
    columns = 256
    for name, largest in (("Q4_0", 0x00), ("Q4_1", 0xFF), ("Q8_0", 0x80), ("Q8_0", 0x7F)):
        blocks = random_blocks(name, 64, columns, 1.0)
        halves = 2 if name != "Q4_1" else 4
        blocks.reshape(-1, ENCODINGS[name].block_bytes)[:, halves:] = largest
        matrix = pack_matrix(torch.from_numpy(blocks), name, HugePages())
        assert matrix is not None
        weights = torch.from_numpy(dequantized(name, blocks)).double()
        for sign in (1.0, -1.0):
            x = torch.full((2, columns), sign)
            found = QuantizedProduct(kernels, [matrix]).linear(x, torch.float32).double()
            torch.testing.assert_close(found, x.double() @ weights.T, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", TYPES)
def test_a_row_s_result_is_the_same_bit_for_bit_in_every_company(kernels: QuantizedKernels | None, name: str) -> None:
    if kernels is None:
        pytest.skip("torch's matmul does not promise it")
    matrix, _ = packed(name, 96, 768)
    x = noise(max(SOME_ROWS), 768).bfloat16()
    product, gated = QuantizedProduct(kernels, [matrix]), QuantizedProduct(kernels, [matrix, matrix])
    alone = torch.cat([product.linear(row.unsqueeze(0), torch.float32) for row in x])
    alone_gated = torch.cat([gated.gated(row.unsqueeze(0)) for row in x])
    for rows in SOME_ROWS:
        assert torch.equal(product.linear(x[-rows:], torch.float32), alone[-rows:])
        assert torch.equal(gated.gated(x[-rows:]), alone_gated[-rows:])


def test_matrices_of_different_types_stand_side_by_side(kernels: QuantizedKernels | None) -> None:
    matrices = [packed(name, 30 + 10 * i, 512, seed=i)[0] for i, name in enumerate(TYPES)]
    bias = noise(sum(matrix.num_rows for matrix in matrices))
    x = noise(7, 512)
    together = QuantizedProduct(kernels, matrices, bias).linear(x, torch.float32)
    begin = 0
    for matrix in matrices:
        end = begin + matrix.num_rows
        alone = QuantizedProduct(kernels, [matrix], bias[begin:end]).linear(x, torch.float32)
        torch.testing.assert_close(together[:, begin:end], alone, rtol=1e-6, atol=1e-6)
        begin = end


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("types", [("Q4_1", "Q4_1"), ("Q4_K", "Q6_K")])
def test_a_gated_product_is_silu_of_the_first_times_the_second(
    kernels: QuantizedKernels | None, types: tuple[str, str], has_bias: bool
) -> None:
    (gate, gate_weights), (up, up_weights) = (packed(name, 100, 512, seed=i) for i, name in enumerate(types))
    bias = noise(200, seed=5) if has_bias else None
    x = 3 * noise(14, 512)
    found = QuantizedProduct(kernels, [gate, up], bias).gated(x)
    exact = rounded_activations(x) @ torch.cat((gate_weights, up_weights)).T
    gates, ups = (exact if bias is None else exact + bias.double()).chunk(2, -1)
    expected = F.silu(gates) * ups
    torch.testing.assert_close(found.double(), expected, rtol=2e-3, atol=2e-3)
    rounded = QuantizedProduct(kernels, [gate, up], bias).gated(x.bfloat16())
    assert rounded.dtype == torch.bfloat16 and rounded.shape == (14, 100)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_1"])
def test_the_largest_is_the_first_of_the_largest_results(kernels: QuantizedKernels | None, name: str) -> None:
    matrix, _ = packed(name, 500, 512)
    x = noise(15, 512).bfloat16()
    for bias in (None, noise(500)):
        product = QuantizedProduct(kernels, [matrix], bias)
        places = product.largest(x)
        if kernels is None:
            assert places is None
        else:
            assert torch.equal(places, product.linear(x, torch.float32).argmax(-1))
    if kernels is not None:
        assert torch.equal(product.largest(torch.zeros(2, 512)), bias.argmax().expand(2))
        assert QuantizedProduct(kernels, [matrix]).largest(torch.zeros(2, 512)).tolist() == [0, 0]


def _is_helped(call: Callable[[], object]) -> bool:
    """Whether threads other than this one compute, too. Nobody says when a busy machine lets them."""
    return any(_cpu_s_of_others(call) > 0.001 for _ in range(10))


def _cpu_s_of_others(call: Callable[[], object]) -> float:
    process_s, thread_s = time.process_time(), time.thread_time()
    call()
    return time.process_time() - process_s - (time.thread_time() - thread_s)


def test_threads_that_share_the_work_do_not_change_a_bit(kernels: QuantizedKernels | None) -> None:
    if kernels is None:
        pytest.skip("torch's matmul does not promise it")
    matrix, other = packed("Q4_1", 3990, 2048)[0], packed("Q8_0", 3990, 2048)[0]
    x = noise(90, 2048).bfloat16()
    both, head = QuantizedProduct(kernels, [matrix, other]), QuantizedProduct(kernels, [other])
    alone = both.linear(x, torch.float32), both.gated(x), head.largest(x)
    try:
        torch.set_num_threads(3)
        for product in (both, head):
            assert _is_helped(lambda product=product: product.linear(x, torch.float32)), "the work is not shared"
        shared = both.linear(x, torch.float32), both.gated(x), head.largest(x)
    finally:
        torch.set_num_threads(1)
    for one, many in zip(alone, shared, strict=True):
        assert torch.equal(one, many)


def test_a_scale_beyond_float16_is_not_packed() -> None:
    blocks = random_blocks("Q4_K", 4, 256, 1.0)
    blocks[2, 0:2] = np.array([60000.0], dtype=np.float16).view(np.uint8)
    assert pack_matrix(torch.from_numpy(blocks), "Q4_K", HugePages()) is None
