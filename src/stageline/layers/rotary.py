"""Rotary position embedding: cosines and sines of every position up to the model's length, computed once.

One idea: pairs are (i, i + half), half of the numbers that rotate, as in Hugging Face checkpoints, so a rotation is
x * cos + swap(x) * sin with the two halves swapped and the sine of the first half negated in the table.
"""

from __future__ import annotations

import math

import torch

from stageline.checkpoint.model_spec import RopeSpec
from stageline.errors import CheckpointError


def inverse_frequencies(spec: RopeSpec, head_dim: int, max_model_len: int = 0) -> torch.Tensor:
    """Returns: float32 [pairs that rotate] radians per position.

    Args:
        max_model_len: tokens of the longest sequence, by which "longrope" chooses between its two sets of divisors.
    Raises: CheckpointError for an unknown kind, an odd head_dim or a wrong number of divisors.
    Source: RoFormer (arXiv 2104.09864); "llama3" as in the Llama 3.1 release, rounded as `transformers` rounds.
    """
    rotary_dim = spec.rotary_dim or head_dim
    if rotary_dim % 2 or rotary_dim > head_dim:
        raise CheckpointError(
            f"rotary embedding needs an even number of at most head_dim {head_dim}, the model has {rotary_dim}"
        )
    frequencies = 1.0 / spec.theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)
    is_short = spec.kind == "longrope" and max_model_len <= spec.original_max_position_embeddings
    if divisors := spec.short_divisors if is_short else spec.frequency_divisors:
        if len(divisors) != rotary_dim // 2:
            raise CheckpointError(
                f"the model gives {len(divisors)} rotary frequency divisors; a head with {rotary_dim} rotating numbers "
                f"needs {rotary_dim // 2}"
            )
        return frequencies / torch.tensor(divisors, dtype=torch.float32)
    if spec.kind == "default":
        return frequencies
    if spec.kind == "linear":
        return frequencies / spec.factor
    if spec.kind == "llama3":
        return _llama3_bands(frequencies, spec)
    if spec.kind == "yarn":
        return _yarn_ramp(frequencies, spec, rotary_dim)
    raise CheckpointError(f"rope scaling {spec.kind!r} is not supported; default, linear, llama3 and yarn are")


def _yarn_ramp(frequencies: torch.Tensor, spec: RopeSpec, rotary_dim: int) -> torch.Tensor:
    """Fast frequencies are kept, slow ones divided by `factor`, those between blended. Source: arXiv 2309.00071."""

    def place_of(rotations: float) -> float:
        """Which frequency turns so often within the original length."""
        wavelength = spec.original_max_position_embeddings / (rotations * 2 * math.pi)
        return rotary_dim * math.log(wavelength) / (2 * math.log(spec.theta))

    first, last = place_of(spec.beta_fast), place_of(spec.beta_slow)
    if spec.rounds_ramp:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    width = last - first or 0.001
    divided = ((torch.arange(rotary_dim // 2, dtype=torch.float32) - first) / width).clamp(0, 1)
    return frequencies / spec.factor * divided + frequencies * (1 - divided)


def _llama3_bands(frequencies: torch.Tensor, spec: RopeSpec) -> torch.Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    wavelengths = 2 * math.pi / frequencies
    longest_kept = spec.original_max_position_embeddings / spec.high_freq_factor
    shortest_stretched = spec.original_max_position_embeddings / spec.low_freq_factor
    stretched = torch.where(wavelengths > shortest_stretched, frequencies / spec.factor, frequencies)
    kept_fraction = (spec.original_max_position_embeddings / wavelengths - spec.low_freq_factor) / (
        spec.high_freq_factor - spec.low_freq_factor
    )
    blended = (1 - kept_fraction) * stretched / spec.factor + kept_fraction * stretched
    is_between = (wavelengths >= longest_kept) & (wavelengths <= shortest_stretched)
    return torch.where(is_between, blended, stretched)


class Rotary:
    """Rotates queries and keys by their positions. One instance serves all layers of a stage.

    Args:
        spec, head_dim: the model's.
        max_model_len: tokens; positions reach from 0 to one less.
    """

    def __init__(self, spec: RopeSpec, head_dim: int, max_model_len: int, device: torch.device) -> None:
        positions = torch.arange(max_model_len, dtype=torch.float32)
        angles = torch.outer(positions, inverse_frequencies(spec, head_dim, max_model_len))
        cos, sin = angles.cos() * spec.magnitude, angles.sin() * spec.magnitude
        self._cos = torch.cat((cos, cos), -1).to(device)
        self._signed_sin = torch.cat((-sin, sin), -1).to(device)
        self._half = (spec.rotary_dim or head_dim) // 2
        self._latest: _Rotation | None = None
        self._tables: dict[torch.dtype, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x: [tokens, heads, head_dim]; positions: [tokens] int64. Returns: rotated, a new tensor of x's shape."""
        rotation = self._rotation(positions, x.dtype)
        turned, kept = x[..., : 2 * self._half], x[..., 2 * self._half :]
        swapped = torch.cat((turned[..., self._half :], turned[..., : self._half]), -1)
        rotated = (turned * rotation.cos).add_(swapped.mul_(rotation.signed_sin))
        return rotated if kept.shape[-1] == 0 else torch.cat((rotated, kept), -1)

    def tables(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of every position, each [max_model_len, pairs that rotate], rounded to `dtype`."""
        if dtype not in self._tables:
            halves = self._cos[:, : self._half], self._signed_sin[:, self._half :]
            self._tables[dtype] = halves[0].to(dtype).contiguous(), halves[1].to(dtype).contiguous()
        return self._tables[dtype]

    def _rotation(self, positions: torch.Tensor, dtype: torch.dtype) -> _Rotation:
        """The table rows of these positions; all layers ask for the same ones, so the latest are kept."""
        latest = self._latest
        if latest is None or latest.positions is not positions or latest.cos.dtype != dtype:
            cos, signed_sin = (table[positions].unsqueeze(1).to(dtype) for table in (self._cos, self._signed_sin))
            self._latest = latest = _Rotation(positions, cos, signed_sin)
        return latest


class _Rotation:
    """cos, signed_sin: [tokens, 1, head_dim] for `positions`."""

    def __init__(self, positions: torch.Tensor, cos: torch.Tensor, signed_sin: torch.Tensor) -> None:
        self.positions = positions
        self.cos = cos
        self.signed_sin = signed_sin
