"""How hidden states lie in a frame: as they are computed, or in 8 bits for links that are slow.

One idea: both ends derive every size from the microbatch and the configuration, so a frame says nothing about itself.
In 8 bits each row of a token is cut into groups with a scale of their own, for a few of a token's numbers are hundreds
of times larger than the others, and with one scale per row would leave no bits for those.
"""

from __future__ import annotations

import logging

import torch

from stageline.errors import FrameError

logger = logging.getLogger(__name__)

_GROUP_SIZES = (64, 32, 16)
_SCALE = torch.float32


class ActivationCodec:
    """Args:
    wire: auto (as computed), int8 or fp8 (e4m3, which keeps small numbers better, large ones worse).
    hidden_size: numbers per token.
    dtype: what stages compute in.
    """

    def __init__(self, wire: str, hidden_size: int, dtype: torch.dtype) -> None:
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._wire_dtype = {"auto": dtype, "int8": torch.int8, "fp8": torch.float8_e4m3fn}[wire]
        self._is_plain = wire == "auto"
        self._largest = 127.0 if wire == "int8" else torch.finfo(torch.float8_e4m3fn).max
        group_size = next((size for size in _GROUP_SIZES if hidden_size % size == 0), hidden_size)
        self._num_groups = hidden_size // group_size
        self._is_loss_told = self._is_plain

    def num_bytes(self, num_tokens: int) -> int:
        """Of the frame with the hidden states of so many tokens."""
        body_bytes = num_tokens * self._hidden_size * self._wire_dtype.itemsize
        return body_bytes if self._is_plain else body_bytes + num_tokens * self._num_groups * _SCALE.itemsize

    def encode(self, hidden_states: torch.Tensor) -> memoryview:
        """Args: hidden_states: [tokens, hidden]. Returns: the frame; without a copy if nothing is to be done."""
        if self._is_plain:
            return _bytes_of(hidden_states).numpy().data
        groups = hidden_states.cpu().float().reshape(len(hidden_states), self._num_groups, -1)
        scales = groups.abs().amax(-1, keepdim=True) / self._largest
        # A group of zeros has a scale of zero.
        scaled = groups / scales.clamp_min(torch.finfo(_SCALE).tiny)
        if self._wire_dtype == torch.int8:
            scaled = scaled.round_()
        packed = torch.cat((_bytes_of(scales), _bytes_of(scaled.to(self._wire_dtype))))
        if not self._is_loss_told:
            self._tell_loss(hidden_states, packed.numpy().data)
        return packed.numpy().data

    def _tell_loss(self, hidden_states: torch.Tensor, frame: memoryview) -> None:
        """Once: how much smaller a frame is, and what of the hidden states is lost in it."""
        self._is_loss_told = True
        exact = hidden_states.cpu().float()
        rounding_error = self.decode(frame, len(exact)).float() - exact
        lost = rounding_error.norm() / exact.norm().clamp_min(torch.finfo(_SCALE).tiny)
        logger.info(
            "hidden states leave in 8 bits (%s): %.0f %% of their bytes, and %.2f %% of their size is rounding error",
            str(self._wire_dtype).removeprefix("torch."), 100 * len(frame) / (exact.numel() * self._dtype.itemsize),
            100 * float(lost),
        )  # fmt: skip

    def decode(self, body: memoryview, num_tokens: int) -> torch.Tensor:
        """The hidden states of a frame of `num_bytes(num_tokens)` bytes: [tokens, hidden], as they are computed.

        Raises: FrameError if a scale is no finite number of at least 0.
        """
        shape = (num_tokens, self._hidden_size)
        if self._is_plain:
            return torch.frombuffer(body, dtype=self._dtype).view(shape)
        num_scales = num_tokens * self._num_groups
        scales = torch.frombuffer(body, dtype=_SCALE, count=num_scales)
        if not (scales.isfinite() & (scales >= 0)).all():
            raise FrameError("an activation with a scale that is no finite number of at least 0")
        values = torch.frombuffer(body, dtype=self._wire_dtype, offset=num_scales * _SCALE.itemsize)
        groups = values.view(num_tokens, self._num_groups, -1).float() * scales.view(num_tokens, self._num_groups, 1)
        return groups.view(shape).to(self._dtype)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes in row-major order, [bytes], without a copy if it lies so on the host."""
    return tensor.contiguous().cpu().view(torch.uint8).view(-1)
