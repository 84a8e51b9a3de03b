"""A layer's mixture of experts as one kernel: choosing, both products of the chosen experts, and the weighted sum.

One idea: every expert's matrices are packed like those of a linear layer (`stageline.kernels.gemm`), and a table of
their addresses is all the kernel needs: it reads the weights of experts that some token chose, and no others.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_float, c_int64, c_void_p
from dataclasses import dataclass

import torch

from stageline.checkpoint.model_spec import MoeSpec
from stageline.kernels.gemm import PANEL
from stageline.kernels.huge_pages import HugePages
from stageline.kernels.program import Argument, Kernel, result
from stageline.kernels.quantized import QuantizedMatrix, matrix_structs

MAX_EXPERTS = 1024

_POINTER, _FLAG = Argument.POINTER, Argument.FLAG
SIGNATURES: dict[str, list[Argument]] = {
    "experts": [_POINTER] * 7 + [Argument.NUM_TOKENS] + [_FLAG] * 2,
    "experts_scratch_bytes": [_POINTER, Argument.SIZE, _FLAG, _POINTER],
}
RECORDABLE = ("experts",)


@dataclass(frozen=True)
class Expert:
    """One expert's weights, as they were read.

    Args:
        gate_up: [2 * size, hidden], the gate first.
        down: [hidden, size].
        gate_up_bias, down_bias: one per row of these, or None.
    """

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


@dataclass(frozen=True)
class QuantizedExpert:
    """One expert's weights that stay quantised.

    Args:
        gate, up: [size, hidden].
        down: [hidden, size].
        gate_up_bias, down_bias: as of an `Expert`.
    """

    gate: QuantizedMatrix
    up: QuantizedMatrix
    down: QuantizedMatrix
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None

    def dequantized(self, dtype: torch.dtype) -> Expert:
        """The same as floating-point matrices."""
        gate, up, down = (
            matrix.rows(torch.arange(matrix.num_rows)).to(dtype) for matrix in (self.gate, self.up, self.down)
        )
        biases = (None if bias is None else bias.to(dtype) for bias in (self.gate_up_bias, self.down_bias))
        return Expert(torch.cat((gate, up)), down, *biases)


class _PlanStruct(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("gate_up", "down", "quantized")),
        *((name, c_void_p) for name in ("gate_up_bias", "down_bias", "selection_bias")),
        *((name, c_int64) for name in ("num_experts", "first_own", "num_own", "num_chosen", "hidden", "size")),
        *((name, c_int64) for name in ("num_groups", "num_chosen_groups", "group_score_experts")),
        *((name, c_int64) for name in ("is_sigmoid", "normalizes", "is_clamped")),
        *((name, c_float) for name in ("weight_factor", "alpha", "limit")),
    ]


class ExpertKernels:
    """One variant's functions.

    Args:
        functions: by name, as in SIGNATURES and `gemm.SIGNATURES`.
    """

    def __init__(self, functions: dict[str, Kernel]) -> None:
        self.experts = functions["experts"]
        self.scratch_bytes = functions["experts_scratch_bytes"]
        self.pack = functions["gemm_pack"]


class PackedExperts:
    """The experts of a layer that are there, ready to compute.

    Args:
        kernels: a variant's functions.
        spec: which these are, how experts are chosen and what they compute.
        hidden_size: even, as the experts' own size must be.
        selection_bias: [experts], or None.
        dtype: bfloat16 or float32: of the weights and of what is computed with.
    """

    def __init__(
        self, kernels: ExpertKernels, spec: MoeSpec, hidden_size: int, selection_bias: torch.Tensor | None,
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        assert spec.num_experts <= MAX_EXPERTS and hidden_size % 2 == spec.intermediate_size % 2 == 0
        assert dtype in (torch.bfloat16, torch.float32)
        self._kernels, self._spec, self._hidden_size, self._dtype = kernels, spec, hidden_size, dtype
        self._memory = HugePages()
        self._packed: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._biases: list[tuple[torch.Tensor | None, torch.Tensor | None]] = []
        self._quantized: list[QuantizedMatrix] = []
        self._selection_bias = None if selection_bias is None else selection_bias.float().contiguous()
        self._plan: _PlanStruct | None = None
        self._tables: list[torch.Tensor] = []

    def add(self, expert: Expert | QuantizedExpert) -> None:
        """Pack the next expert; its own tensors are not kept, unless they are quantised. All are of one kind."""
        size, hidden = self._spec.intermediate_size, self._hidden_size
        self._biases.append((expert.gate_up_bias, expert.down_bias))
        if isinstance(expert, QuantizedExpert):
            assert not self._packed
            assert expert.gate.shape == expert.up.shape == (size, hidden) and expert.down.shape == (hidden, size)
            self._quantized += [expert.gate, expert.up, expert.down]
            return
        assert expert.gate_up.shape == (2 * size, hidden) and expert.down.shape == (hidden, size)
        packed = self._pack(expert.gate_up, is_gated=True), self._pack(expert.down, is_gated=False)
        self._packed.append(packed)

    def finish(self) -> None:
        """All experts that are there were added."""
        spec = self._spec
        assert len(self._packed) + len(self._quantized) // 3 == len(spec.own)
        addresses = [self._table([matrices[which].data_ptr() for matrices in self._packed]) for which in (0, 1)]
        self._structs = matrix_structs(self._quantized)
        quantized = ctypes.addressof(self._structs) if self._quantized else None
        biases = [self._bias_table([pair[which] for pair in self._biases]) for which in (0, 1)]
        self._biases.clear()
        self._plan = _PlanStruct(
            *addresses, quantized, *biases, None if self._selection_bias is None else self._selection_bias.data_ptr(),
            spec.num_experts, spec.own.start, len(spec.own), spec.num_experts_per_token,
            self._hidden_size, spec.intermediate_size,
            spec.num_groups, spec.num_groups_per_token, spec.group_score_experts,
            spec.scoring == "sigmoid", spec.normalizes_weights, spec.activation == "clamped_swiglu",
            spec.weight_factor, spec.swiglu_alpha, spec.swiglu_limit,
        )  # fmt: skip

    def __call__(
        self,
        x: torch.Tensor,
        logits: torch.Tensor,
        shared: torch.Tensor | None = None,
        shared_gate: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The weighted sum of those of the chosen experts that are there, rounded once. A row's result depends on no
        other row.

        Args:
            x: [tokens, hidden].
            logits: float32 [tokens, experts], the router's.
            shared: [tokens, hidden], added to the sum; or None.
            shared_gate: float32 [tokens, 1], whose sigmoid weights what is shared; or None.
        Returns: [tokens, hidden], of x's dtype.
        """
        assert self._plan is not None, "not all experts were added"
        tokens, hidden = x.shape
        assert x.dtype == self._dtype and hidden == self._hidden_size and x.is_contiguous()
        assert logits.dtype == torch.float32 and logits.shape == (tokens, self._spec.num_experts)
        assert logits.is_contiguous()
        assert shared is None or (shared.shape == x.shape and shared.dtype == x.dtype and shared.is_contiguous())
        assert shared_gate is None or (shared_gate.dtype == torch.float32 and shared_gate.shape == (tokens, 1))
        plan, is_bf16 = ctypes.addressof(self._plan), x.dtype == torch.bfloat16
        out = result((tokens, hidden), x.dtype)
        scratch = result((self._scratch_bytes(tokens, is_bf16),), torch.uint8)
        self._kernels.experts(
            plan, x.data_ptr(), logits.data_ptr(), None if shared is None else shared.data_ptr(),
            None if shared_gate is None else shared_gate.data_ptr(), out.data_ptr(), scratch.data_ptr(),
            tokens, torch.get_num_threads(), is_bf16,
        )  # fmt: skip
        return out

    def _scratch_bytes(self, tokens: int, is_bf16: bool) -> int:
        num_bytes = c_int64()
        self._kernels.scratch_bytes.now(ctypes.addressof(self._plan), tokens, is_bf16, ctypes.addressof(num_bytes))  # type: ignore[arg-type]
        return num_bytes.value

    def _pack(self, weight: torch.Tensor, is_gated: bool) -> torch.Tensor:
        assert weight.dtype == self._dtype
        weight = weight.contiguous()
        rows, columns = weight.shape
        per_word = 2 if self._dtype == torch.bfloat16 else 1
        steps, out_features = columns // per_word, rows // 2 if is_gated else rows
        per_panel = PANEL // 2 if is_gated else PANEL
        panels = self._memory.empty((-(-out_features // per_panel), steps, PANEL, per_word), self._dtype)
        zeros = torch.zeros(steps, dtype=torch.int32)
        self._kernels.pack(
            weight.data_ptr(), panels.data_ptr(), zeros.data_ptr(), out_features, steps, is_gated
        )
        return panels

    def _table(self, addresses: Sequence[int]) -> int:
        self._tables.append(torch.tensor(addresses, dtype=torch.int64))
        return self._tables[-1].data_ptr()

    def _bias_table(self, biases: Sequence[torch.Tensor | None]) -> int | None:
        present = [bias.float() for bias in biases if bias is not None]
        if not present:
            return None
        assert len(present) == len(biases), "all experts have a bias, or none"
        self._tables.append(torch.stack(present).contiguous())
        return self._tables[-1].data_ptr()
