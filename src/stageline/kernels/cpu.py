"""The compiled kernels as functions of tensors. Shapes, dtypes and contiguity are checked here; C++ checks nothing.

One idea: a variant is a suffix of the functions' names, bound once, so a call costs about two microseconds and any
variant the machine can run can stand beside another in one process.
"""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch

from stageline.kernels import experts, gemm, latent, quantized, ranks
from stageline.kernels.program import Argument, Kernel, result
from stageline.kernels.quantized import QuantizedKernels

DTYPES = (torch.bfloat16, torch.float32)

_POINTER, _SIZE, _FLAG, _FLOAT = Argument.POINTER, Argument.SIZE, Argument.FLAG, Argument.FLOAT
_TOKENS = Argument.NUM_TOKENS
_SIGNATURES: dict[str, list[Argument]] = {
    "rms_norm": [_POINTER] * 5 + [_TOKENS, _SIZE, _FLOAT, _FLAG],
    "activate_and_mul": [_POINTER] * 2 + [_TOKENS, _SIZE] + [_FLAG] * 2,
    "add": [_POINTER] * 3 + [_TOKENS, _SIZE, _FLAG],
    "scale": [_POINTER, _TOKENS, _SIZE, _FLOAT, _FLAG],
    "normalize_heads": [_POINTER] * 3 + [_TOKENS] + [_SIZE] * 5 + [_FLOAT, _FLAG],
    "rotate_and_store": [_POINTER] * 7 + [_TOKENS] + [_SIZE] * 5 + [_FLAG],
    "argmax": [_POINTER] * 2 + [_SIZE] * 2 + [_FLAG],
    "top_k": [_POINTER] * 4 + [_SIZE] * 3,
    "attention": [_POINTER] * 8
    + [_SIZE, Argument.TABLE_WIDTH, Argument.NUM_ROWS]
    + [_SIZE] * 5
    + [_FLOAT, _FLOAT, _POINTER, _FLAG, _FLAG, _POINTER],
    **quantized.SIGNATURES,
    **gemm.SIGNATURES,
    **experts.SIGNATURES,
    **latent.SIGNATURES,
    **ranks.SIGNATURES,
}
_RECORDABLE = (
    "rms_norm", "activate_and_mul", "add", "scale", "normalize_heads", "rotate_and_store", "attention",
    *quantized.RECORDABLE, *gemm.RECORDABLE, *experts.RECORDABLE,
    *latent.RECORDABLE, *ranks.RECORDABLE,
)  # fmt: skip


class KernelLibrary:
    """A loaded library of kernels. Raises: OSError if it cannot be loaded."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))

    def can_run(self, variant: str) -> bool:
        """Whether this machine has the variant's instructions."""
        return bool(self._library[f"stageline_is_supported_{variant}"]())

    def holds(self, variant: str) -> bool:
        """Whether the variant was compiled into it; first use compiles one only."""
        try:
            return bool(self._library[f"stageline_add_{variant}"])
        except AttributeError:
            return False

    def variant(self, name: str) -> CpuKernels:
        """The kernels compiled for one instruction set, which this machine must have."""
        run_program = self._library["stageline_run_program"]
        run_program.argtypes, run_program.restype = [c_void_p, c_int64, c_void_p, c_int64, c_void_p], None
        return CpuKernels(name, {kernel: self._bind(kernel, name) for kernel in _SIGNATURES}, run_program)

    def _bind(self, kernel: str, variant: str) -> Kernel:
        by_words = None
        if kernel in _RECORDABLE:
            by_words = ctypes.cast(self._library[f"stageline_{kernel}_by_words_{variant}"], c_void_p).value
        return Kernel(kernel, self._library[f"stageline_{kernel}_{variant}"], _SIGNATURES[kernel], by_words)


class CpuKernels:
    """One variant's kernels, for contiguous tensors on the CPU in bfloat16 or float32; `gemm` has linear layers.

    Args:
        variant: "avx512", "avx2" or "portable".
        functions: by name, as in _SIGNATURES.
        run_program: runs what was recorded.
    """

    def __init__(self, variant: str, functions: dict[str, Kernel], run_program: Any) -> None:
        self.variant = variant
        self.run_program = run_program
        self._rms_norm = functions["rms_norm"]
        self._activate_and_mul = functions["activate_and_mul"]
        self._add = functions["add"]
        self._scale = functions["scale"]
        self._normalize_heads = functions["normalize_heads"]
        self._rotate_and_store = functions["rotate_and_store"]
        self._argmax = functions["argmax"]
        self._top_k = functions["top_k"]
        self.gemm = gemm.Gemm(functions)
        self.experts = experts.ExpertKernels(functions)
        self.latent = latent.LatentKernels(functions)
        self.ranks = ranks.RankKernels(functions)
        self._attention = functions["attention"]
        self.quantized = QuantizedKernels(*(functions[name] for name in quantized.SIGNATURES))

    @property
    def has_fast_linear(self) -> bool:
        """Whether `gemm` beats torch's and oneDNN's; only vectors wide enough for that do."""
        return self.variant != "portable"

    def rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x, residual: [rows, size]. Returns: (norm of the sum, the sum), rounded as layers.norm is."""
        rows, size = x.shape
        assert x.is_contiguous() and weight.shape == (size,) and weight.dtype == x.dtype
        out = result((rows, size), x.dtype)
        if residual is None:
            pointer, total = None, x
        else:
            assert residual.shape == x.shape and residual.dtype == x.dtype and residual.is_contiguous()
            pointer, total = residual.data_ptr(), result((rows, size), x.dtype)
        self._rms_norm(
            x.data_ptr(), pointer, weight.data_ptr(), total.data_ptr(), out.data_ptr(), rows, size, eps, _is_bf16(x)
        )
        return out, total

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up: [rows, 2 * size], gate first. Returns: silu(gate) * up, [rows, size]."""
        return self._gate(gate_up, is_gelu=False)

    def gelu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """The same with gelu, by its tanh formula."""
        return self._gate(gate_up, is_gelu=True)

    def _gate(self, gate_up: torch.Tensor, is_gelu: bool) -> torch.Tensor:
        rows, width = gate_up.shape
        assert gate_up.is_contiguous() and width % 2 == 0
        out = result((rows, width // 2), gate_up.dtype)
        self._activate_and_mul(gate_up.data_ptr(), out.data_ptr(), rows, width // 2, is_gelu, _is_bf16(gate_up))
        return out

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """x, residual: [rows, size]. Returns: their sum, rounded once."""
        assert x.shape == residual.shape and x.dtype == residual.dtype and _all_contiguous(x, residual)
        rows, size = x.shape
        total = result((rows, size), x.dtype)
        self._add(x.data_ptr(), residual.data_ptr(), total.data_ptr(), rows, size, _is_bf16(x))
        return total

    def scale_(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        """x: [rows, size], multiplied in place. Returns: x."""
        assert x.is_contiguous()
        rows, size = x.shape
        self._scale(x.data_ptr(), rows, size, factor, _is_bf16(x))
        return x

    def normalize_heads_(
        self, heads: torch.Tensor, queries: tuple[int, torch.Tensor], keys: tuple[int, torch.Tensor], eps: float
    ) -> None:
        """Norms of queries and of keys, in place.

        Args:
            heads: [tokens, numbers of a token]: queries, keys, and what is left alone.
            queries, keys: how many parts have a norm each, and the weight [numbers of a part] that all of them share.
        """
        rows, row_size = heads.shape
        (query_parts, query_weight), (key_parts, key_weight) = queries, keys
        query_size, key_size = query_weight.numel(), key_weight.numel()
        assert query_weight.dtype == key_weight.dtype == heads.dtype
        assert _all_contiguous(heads, query_weight, key_weight)
        assert query_parts * query_size + key_parts * key_size <= row_size
        self._normalize_heads(
            heads.data_ptr(), query_weight.data_ptr(), key_weight.data_ptr(), rows, row_size, query_parts, query_size,
            key_parts, key_size, eps, _is_bf16(heads),
        )  # fmt: skip

    def rotate_and_store(
        self,
        heads: torch.Tensor,
        tables: tuple[torch.Tensor, torch.Tensor] | None,
        positions: torch.Tensor,
        slots: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        """Rotate queries and keys, make values finite, all in place; put keys and values into their slots of the cache.

        Args:
            heads: [tokens, num_heads + 2 * num_kv_heads, head_dim]: queries, keys, values.
            tables: cosines and sines, [positions, pairs], of the dtype of heads; None to rotate nothing. With fewer
                pairs than head_dim / 2, only the leading numbers of a head are rotated.
            positions, slots: int64 [tokens].
            keys, values: the cache, [num_blocks, num_kv_heads, block_size, head_dim]. Within a block and head the order
                is this kernel's and `attention`'s own: source/cache_layout.h.
        Returns: the queries, a view of heads [tokens, num_heads, head_dim].
        """
        num_tokens, num_rows, head_dim = heads.shape
        _, num_kv_heads, block_size, _ = keys.shape
        assert keys.shape == values.shape and keys.shape[3] == head_dim and head_dim % 2 == 0
        assert heads.dtype == keys.dtype == values.dtype
        assert positions.shape == slots.shape == (num_tokens,) and positions.dtype == slots.dtype == torch.int64
        assert _all_contiguous(heads, positions, slots, keys, values)
        cosine = sine = None
        num_pairs = 0
        if tables is not None:
            num_pairs = tables[0].shape[1]
            assert all(table.dtype == heads.dtype for table in tables) and 0 < num_pairs <= head_dim // 2
            assert tables[0].shape == tables[1].shape and _all_contiguous(*tables)
            cosine, sine = (table.data_ptr() for table in tables)
        num_heads = num_rows - 2 * num_kv_heads
        self._rotate_and_store(
            heads.data_ptr(), cosine, sine, positions.data_ptr(), slots.data_ptr(),
            keys.data_ptr(), values.data_ptr(), num_tokens, num_heads, num_kv_heads, head_dim, block_size,
            num_pairs, _is_bf16(heads),
        )  # fmt: skip
        return heads[:, :num_heads]

    def attention(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        query_starts: torch.Tensor,
        context_lens: torch.Tensor,
        block_tables: torch.Tensor,
        scale: float,
        sliding_window: int | None,
        scratch: torch.Tensor,
        cap: float | None = None,
        sinks: torch.Tensor | None = None,
        is_latent: bool = False,
    ) -> torch.Tensor:
        """Causal attention over the paged cache; `AttentionMetadata` has the arguments' shapes.

        Args:
            queries: [tokens, num_heads, head_dim], each token's heads contiguous; an even head_dim in bfloat16.
            keys, values: the cache as `rotate_and_store` fills it.
            scratch: uint8, at least `attention_scratch_bytes`.
            cap, sinks: see `AttentionBackend.attend`.
            is_latent: keys and values are the same rows, as `latent.store_rows` fills them.
        Returns: [tokens, num_heads, head_dim], contiguous.
        """
        num_tokens, num_heads, head_dim = queries.shape
        _, num_kv_heads, block_size, _ = keys.shape
        assert keys.shape == values.shape and keys.shape[3] == head_dim and num_heads % num_kv_heads == 0
        assert queries.dtype == keys.dtype == values.dtype
        assert num_tokens == 0 or queries.stride()[1:] == (head_dim, 1)
        assert query_starts.dtype == context_lens.dtype == block_tables.dtype == torch.int32
        num_rows = context_lens.shape[0]
        assert query_starts.shape == (num_rows + 1,) and block_tables.shape[0] == num_rows
        assert _all_contiguous(keys, values, query_starts, context_lens, block_tables)
        shape = num_heads, num_kv_heads, head_dim, queries.dtype
        assert scratch.numel() >= self.attention_scratch_bytes(*shape, is_latent)
        assert not is_latent or keys.data_ptr() == values.data_ptr()
        assert cap is None or (cap > 0 and scale > 0)
        assert sinks is None or (sinks.shape == (num_heads,) and sinks.dtype == torch.float32 and sinks.is_contiguous())
        out = result((num_tokens, num_heads, head_dim), queries.dtype)
        self._attention(
            queries.data_ptr(), out.data_ptr(), keys.data_ptr(), values.data_ptr(), query_starts.data_ptr(),
            context_lens.data_ptr(), block_tables.data_ptr(), scratch.data_ptr(), queries.stride(0),
            block_tables.shape[1], num_rows, num_heads, num_kv_heads, head_dim, block_size, sliding_window or 0, scale,
            cap or 0.0, None if sinks is None else sinks.data_ptr(), is_latent, _is_bf16(queries), None,
        )  # fmt: skip
        return out

    def attention_scratch_bytes(
        self, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, is_latent: bool = False
    ) -> int:
        """Scratch that `attention` needs for heads of this shape, whatever the microbatch."""
        num_bytes = c_int64()
        self._attention.now(
            None, None, None, None, None, None, None, None, 0, 0, 0, num_heads, num_kv_heads, head_dim, 1, 0, 1.0,
            0.0, None, is_latent, int(dtype == torch.bfloat16), ctypes.addressof(num_bytes),
        )  # fmt: skip
        return num_bytes.value

    def argmax(self, x: torch.Tensor) -> torch.Tensor:
        """x: [rows, size], size at least 1. Returns: int64 [rows], of equals the lowest; NaN is the largest."""
        rows, size = x.shape
        assert x.is_contiguous() and size > 0
        out = torch.empty(rows, dtype=torch.int64)
        self._argmax(x.data_ptr(), out.data_ptr(), rows, size, _is_bf16(x))
        return out

    def top_k(self, x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The k largest of each row, largest first, equals by rising place.

        Args:
            x: float32 [rows, size].
            k: between 1 and size.
        Returns: float32 [rows, k] values and int64 [rows, k] places.
        """
        rows, size = x.shape
        assert x.is_contiguous() and x.dtype == torch.float32 and 1 <= k <= size
        values, places = torch.empty(rows, k), torch.empty(rows, k, dtype=torch.int64)
        heap = torch.empty(k, dtype=torch.int64)
        self._top_k(x.data_ptr(), values.data_ptr(), places.data_ptr(), heap.data_ptr(), rows, size, k)
        return values, places


def _is_bf16(x: torch.Tensor) -> bool:
    assert x.dtype in DTYPES, f"kernels take {DTYPES}, not {x.dtype}"
    return x.dtype == torch.bfloat16


def _all_contiguous(*tensors: torch.Tensor) -> bool:
    return all(tensor.is_contiguous() for tensor in tensors)
