"""A mixture of experts in place of an MLP: a router chooses a few of many gated MLPs for each token.

One idea: choosing and computing are one step with the router's logits as input, so that one kernel can do both; beside
it stands the same in torch. A token's result does not depend on what other tokens of the microbatch chose.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
import torch.nn.functional as F

from stageline import kernels
from stageline.checkpoint.model_spec import MoeSpec
from stageline.errors import CheckpointError
from stageline.kernels.experts import Expert, PackedExperts, QuantizedExpert
from stageline.kernels.gemm import Gemm


class SharedMLP(Protocol):
    """An MLP that computes every token."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [tokens, hidden]. Returns: the same shape."""
        ...


class Router:
    """The experts' scores of each token, in float32 whatever the compute dtype: small differences choose.

    Args:
        weight: [experts, hidden], or [1, hidden] for a gate.
        bias: [experts] or None.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.device, self.dtype = weight.device, weight.dtype
        library = kernels.library(weight.device, weight.dtype)
        self._gemm: Gemm | None = None
        if library is not None and weight.dtype == torch.bfloat16 and weight.shape[1] % 2 == 0:
            self._gemm = library.gemm
            self._packed = library.gemm.pack(weight, bias)
        else:
            self._weight = weight.float()
            self._bias = None if bias is None else bias.float()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [tokens, hidden]. Returns: float32 [tokens, experts]."""
        if self._gemm is not None:
            return self._gemm.linear(x, self._packed, torch.float32)
        return F.linear(x.float(), self._weight, self._bias)


class MoeMLP:
    """The weighted sum of the chosen experts, as far as they are there, and of what is shared.

    Args:
        spec: which experts are there, how experts are chosen and what they compute.
        experts: all that are there, in order; each is asked for once, so that one is in memory twice at a time.
        selection_bias: float32 [experts], takes part in choosing only; or None.
        shared: computes every token besides; or None.
        shared_gate: its output's weight is the sigmoid of this; or None.
    """

    def __init__(
        self,
        spec: MoeSpec,
        router: Router,
        experts: Iterator[Expert | QuantizedExpert],
        selection_bias: torch.Tensor | None = None,
        shared: SharedMLP | None = None,
        shared_gate: Router | None = None,
    ) -> None:
        self._router = router
        self._experts = _all_experts(spec, experts, selection_bias, router.device, router.dtype)
        self._shared = shared
        self._shared_gate = shared_gate

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [tokens, hidden]. Returns: the same shape."""
        logits = self._router(x)
        shared = None if self._shared is None else self._shared(x)
        gate = None if self._shared_gate is None else self._shared_gate(x)
        return self._experts(x, logits, shared, gate)


class _Experts(Protocol):
    def __call__(
        self, x: torch.Tensor, logits: torch.Tensor, shared: torch.Tensor | None, shared_gate: torch.Tensor | None
    ) -> torch.Tensor: ...


def _all_experts(
    spec: MoeSpec,
    experts: Iterator[Expert | QuantizedExpert],
    selection_bias: torch.Tensor | None,
    device: torch.device,
    dtype: torch.dtype,
) -> _Experts:
    first = next(experts)
    library, hidden = kernels.library(device, dtype), first.down.shape[0]
    if library is None or hidden % 2 or spec.intermediate_size % 2:
        dense = [e.dequantized(dtype) if isinstance(e, QuantizedExpert) else e for e in (first, *experts)]
        return TorchExperts(spec, dense, selection_bias)
    packed = PackedExperts(library.experts, spec, hidden, selection_bias, dtype)
    packed.add(first)
    for expert in experts:
        if isinstance(expert, QuantizedExpert) != isinstance(first, QuantizedExpert):
            raise CheckpointError(
                "some experts of a layer can stay quantised and some cannot; give --quantization none"
            )
        packed.add(expert)
    packed.finish()
    return packed


class TorchExperts:
    """The same as `PackedExperts` by torch, on any device."""

    def __init__(self, spec: MoeSpec, experts: list[Expert], selection_bias: torch.Tensor | None) -> None:
        self._spec = spec
        self._experts = experts
        self._selection_bias = selection_bias

    def __call__(
        self, x: torch.Tensor, logits: torch.Tensor, shared: torch.Tensor | None, shared_gate: torch.Tensor | None
    ) -> torch.Tensor:
        """See `PackedExperts`."""
        chosen, weights = choose_experts(self._spec, logits, self._selection_bias)
        num_tokens, num_chosen = chosen.shape
        own = self._spec.own
        all_counts = torch.bincount(chosen.flatten(), minlength=self._spec.num_experts).tolist()
        first, counts = sum(all_counts[: own.start]), all_counts[own.start : own.stop]
        order = chosen.flatten().argsort(stable=True)[first : first + sum(counts)]
        rows = x.index_select(0, order // num_chosen)
        parts, start = [], 0
        for expert, count in zip(self._experts, counts, strict=True):
            if count:
                parts.append(self._compute(expert, rows[start : start + count]))
                start += count
        results = torch.zeros(num_tokens * num_chosen, x.shape[1], dtype=torch.float32, device=x.device)
        if parts:
            results.index_copy_(0, order, torch.cat(parts).float())
        total = (results.view(num_tokens, num_chosen, x.shape[1]) * weights.unsqueeze(-1)).sum(1)
        if shared is not None:
            total += shared.float() if shared_gate is None else shared.float() * shared_gate.sigmoid()
        return total.to(x.dtype)

    def _compute(self, expert: Expert, rows: torch.Tensor) -> torch.Tensor:
        gate, up = F.linear(rows, expert.gate_up, expert.gate_up_bias).chunk(2, dim=-1)
        if self._spec.activation == "clamped_swiglu":
            limit = self._spec.swiglu_limit
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            gated = gate * torch.sigmoid(gate * self._spec.swiglu_alpha) * (up + 1)
        else:
            gated = F.silu(gate) * up
        return F.linear(gated, expert.down, expert.down_bias)


def choose_experts(
    spec: MoeSpec, logits: torch.Tensor, selection_bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Args: logits: float32 [tokens, experts]. selection_bias: float32 [experts] or None.
    Returns: int64 and float32 [tokens, experts per token]: the chosen experts, best first, and their weights.
    """
    scores = logits.sigmoid() if spec.scoring == "sigmoid" else logits.softmax(-1)
    ranks = scores if selection_bias is None else scores + selection_bias
    if spec.num_groups_per_token < spec.num_groups:
        grouped = ranks.view(ranks.shape[0], spec.num_groups, -1)
        group_scores = grouped.topk(spec.group_score_experts, dim=-1).values.sum(-1)
        best = _largest(group_scores, spec.num_groups_per_token)
        is_kept = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(1, best, True)
        ranks = grouped.masked_fill(~is_kept.unsqueeze(-1), -torch.inf).flatten(1)
    chosen = _largest(ranks, spec.num_experts_per_token)
    weights = scores.gather(1, chosen)
    if spec.normalizes_weights:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return chosen, weights * spec.weight_factor


def _largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """The places of each row's largest, largest first, of equals the first."""
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :count]
