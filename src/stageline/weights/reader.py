"""Reads tensors of a checkpoint one by one: only their own bytes, decoded to the compute dtype run by run.

Reads are `pread` calls, not a memory map: what was read can be counted exactly, a file cut short under us is an error
and not a SIGBUS, and no page stays mapped after loading.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Sequence
from types import TracebackType

import torch
from msgspec.structs import replace

from stageline.checkpoint.checkpoint import Checkpoint, TensorEntry
from stageline.checkpoint.encodings import ENCODINGS
from stageline.checkpoint.stage_tensors import can_stay_quantized
from stageline.errors import CheckpointError
from stageline.kernels.huge_pages import HugePages
from stageline.kernels.quantized import QuantizedMatrix
from stageline.weights.ggml_types import FLOAT_DTYPES, decode
from stageline.weights.packed_checkpoints import pack_blocks, pack_parts
from stageline.weights.quantized import pack_matrix
from stageline.weights.quantized_checkpoints import RAW_DTYPES, dequantize

# Large enough that a run's fixed cost is nothing, small enough that its float32 form (1 MiB) stays in the cache. A
# multiple of every block size.
RUN_ELEMENTS = 2**18
DIRECT_RUN_BYTES = 2**22
# What malloc takes from the system, and gives back, piece by piece.
_LARGEST_ON_HEAP_BYTES = 2**25
_ALIGNMENT_BYTES = 64


class CheckpointReader:
    """Reads weights for one stage; a `WeightReader`. Close it, or use it in a `with` statement.

    Args:
        dtype: what every tensor is converted to.
        device: where every tensor ends up; decoding itself is done on the CPU.
        on_bytes: called with the number of bytes of each read, for progress.
        keeps_quantized: `read_matrix` gives matrices as they are quantised in the file where it can.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        on_bytes: Callable[[int], None] | None = None,
        keeps_quantized: bool = False,
    ) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device
        self._on_bytes = on_bytes
        self._keeps_quantized = keeps_quantized
        self._packed_memory = HugePages()
        # Taken anew for each of many small matrices, memory for what is stored would not be used again: what stays of a
        # matrix splits it.
        self._kept_scratch = torch.empty(0, dtype=torch.uint8)
        self._descriptors: dict[str, int] = {}
        self._num_bytes_read = 0

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def packed_memory(self) -> HugePages:
        """Where what stays quantised lies."""
        return self._packed_memory

    @property
    def num_bytes_read(self) -> int:
        """Bytes read from the checkpoint's files so far."""
        return self._num_bytes_read

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """Args: name: Hugging Face's. shape: what the model needs.
        Returns: the tensor, in the compute dtype on the device.
        Raises: CheckpointError if it is missing, of another shape, of an unsupported type, or cut off.
        """
        return self.read_entry(self.entry(name, shape), self._dtype)

    def read_float32(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """As `read`, but float32 whatever the compute dtype."""
        return self.read_entry(self.entry(name, shape), torch.float32)

    def read_part(self, name: str, shape: tuple[int, ...], index: int) -> torch.Tensor:
        """One of the parts that lie one behind the other in a tensor, such as one expert's matrix.

        Args:
            shape: of the whole tensor.
            index: along its first dimension.
        Returns: as `read`, of shape[1:].
        """
        return self.read_entry(part_of(self.entry(name, shape), index), self._dtype)

    def read_transposed_part(
        self,
        name: str,
        shape: tuple[int, int, int],
        index: int,
        runs: Sequence[slice],
        memory: HugePages | None = None,
    ) -> list[torch.Tensor] | list[QuantizedMatrix]:
        """As `read_part`, of the transposed part these runs of rows, each a matrix.

        Args: memory: for those that stay quantised, instead of `packed_memory`.
        Returns: all may come as they are quantised in the checkpoint.
        """
        part = part_of(self.entry(name, shape), index)
        if self._keeps_quantized and can_stay_quantized(part):
            stored = self._read_stored(part)
            numbers, scales = stored["numbers"], stored["scales"]
            kept = [pack_blocks(numbers[rows], scales[rows], memory or self._packed_memory) for rows in runs]
            if all(matrix is not None for matrix in kept):
                return [matrix for matrix in kept if matrix is not None]
        transposed = self.read_entry(part, self._dtype).T
        return [transposed[rows].contiguous() for rows in runs]

    def read_matrix(self, name: str, shape: tuple[int, int]) -> torch.Tensor | QuantizedMatrix:
        """As `read`, but a matrix whose type integer products can work on stays quantised if that was asked for."""
        return self.read_matrix_entry(self.entry(name, shape))

    def read_matrix_entry(self, entry: TensorEntry, memory: HugePages | None = None) -> torch.Tensor | QuantizedMatrix:
        """As `read_matrix`, of what lies there. Args: memory: if it stays quantised, instead of `packed_memory`."""
        if not self._keeps_quantized or not can_stay_quantized(entry):
            return self.read_entry(entry, self._dtype)
        memory = memory or self._packed_memory
        if entry.parts:
            kept = pack_parts(entry, self._read_stored(entry), memory)
            return self.read_entry(entry, self._dtype) if kept is None else kept
        data = self._scratch(entry.num_bytes)
        self._read_directly(entry, data)
        rows = data.view(entry.shape[0], -1)
        if entry.rope_permuted_heads:
            rows = undo_rope_interleaving(rows, entry.rope_permuted_heads, entry.rope_permuted_dim)
        packed = pack_matrix(rows, entry.encoding, memory)
        return self.read_entry(entry, self._dtype) if packed is None else packed

    def close(self) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def entry(self, name: str, shape: tuple[int, ...]) -> TensorEntry:
        """Where a tensor lies. Raises: CheckpointError, as `read`."""
        entry = self._checkpoint.tensors.get(name)
        if entry is None:
            raise self._missing(name)
        label = f"{entry.file}: tensor {_label(entry)}"
        if entry.shape != tuple(shape):
            raise CheckpointError(f"{label} has shape {list(entry.shape)}; the model needs {list(shape)}")
        if entry.encoding not in ENCODINGS and not entry.parts:
            raise CheckpointError(
                f"{label} is of type {entry.encoding}, which is not supported; supported are {', '.join(ENCODINGS)}"
            )
        heads = entry.rope_permuted_heads
        if heads and entry.shape[0] % (2 * heads):
            raise CheckpointError(f"{label} has {entry.shape[0]} rows, which {heads} heads of even size cannot share")
        return entry

    def read_entry(self, entry: TensorEntry, dtype: torch.dtype) -> torch.Tensor:
        """What lies there. Raises: CheckpointError if it is cut off."""
        if entry.parts:
            stored = {name: self._read_raw(part) for name, part in entry.parts.items()}
            tensor = dequantize(entry, stored).to(self._device, dtype)
        elif FLOAT_DTYPES.get(entry.encoding) == dtype and self._device.type == "cpu":
            tensor = self._read_direct(entry, dtype)
        else:
            tensor = self._read_in_runs(entry, dtype)
        tensor = tensor.view(entry.shape)
        if entry.rope_permuted_heads:
            return undo_rope_interleaving(tensor, entry.rope_permuted_heads, entry.rope_permuted_dim)
        return tensor

    def _read_raw(self, entry: TensorEntry) -> torch.Tensor:
        return self._read_direct(entry, RAW_DTYPES[entry.encoding]).view(entry.shape)

    def _read_stored(self, entry: TensorEntry) -> dict[str, torch.Tensor]:
        """A quantised matrix's parts as they are stored, in memory that the next call overwrites."""
        sizes = [-(-part.num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for part in entry.parts.values()]
        places = self._scratch(sum(sizes)).split_with_sizes(sizes)
        stored = {}
        for (name, part), place in zip(entry.parts.items(), places, strict=True):
            data = place[: part.num_bytes]
            self._read_directly(part, data)
            stored[name] = data.view(RAW_DTYPES[part.encoding]).view(part.shape)
        return stored

    def _scratch(self, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes], which the next call may give again."""
        if num_bytes > _LARGEST_ON_HEAP_BYTES:
            return torch.empty(num_bytes, dtype=torch.uint8)
        if num_bytes > self._kept_scratch.numel():
            self._kept_scratch = torch.empty(num_bytes, dtype=torch.uint8)
        return self._kept_scratch[:num_bytes]

    def _missing(self, name: str) -> CheckpointError:
        tensors = self._checkpoint.tensors
        files = sorted({entry.file for entry in tensors.values()})
        where = files[0] if len(files) == 1 else f"{self._checkpoint.path} ({len(files)} files)"
        close = difflib.get_close_matches(name, tensors, n=3, cutoff=0.8)
        hint = f"; there is {', '.join(close)}" if close else ""
        return CheckpointError(f"tensor {name} is missing in {where}{hint}")

    def _read_direct(self, entry: TensorEntry, dtype: torch.dtype) -> torch.Tensor:
        """No conversion: the file's bytes go straight into the tensor's memory."""
        tensor = torch.empty(entry.num_elements, dtype=dtype)
        self._read_directly(entry, tensor.view(torch.uint8))
        return tensor

    def _read_directly(self, entry: TensorEntry, data: torch.Tensor) -> None:
        for begin in range(0, entry.num_bytes, DIRECT_RUN_BYTES):
            self._read_into(entry, begin, data[begin : begin + DIRECT_RUN_BYTES])

    def _read_in_runs(self, entry: TensorEntry, dtype: torch.dtype) -> torch.Tensor:
        encoding = ENCODINGS[entry.encoding]
        tensor = torch.empty(entry.num_elements, dtype=dtype, device=self._device)
        buffer = torch.empty(encoding.num_bytes(min(RUN_ELEMENTS, entry.num_elements)), dtype=torch.uint8)
        for first in range(0, entry.num_elements, RUN_ELEMENTS):
            run = tensor[first : first + RUN_ELEMENTS]
            data = buffer[: encoding.num_bytes(run.numel())]
            self._read_into(entry, encoding.num_bytes(first), data)
            run.copy_(decode(data, entry.encoding, encoding.block_bytes))
        return tensor

    def _read_into(self, entry: TensorEntry, begin: int, data: torch.Tensor) -> None:
        """Fill `data`, uint8, from the tensor's bytes beginning at `begin`."""
        if not entry.run_bytes:
            self._read_bytes(entry, entry.offset_bytes + begin, data)
            return
        while data.numel():
            row, within = divmod(begin, entry.run_bytes)
            part = data[: entry.run_bytes - within]
            self._read_bytes(entry, entry.offset_bytes + row * entry.stride_bytes + within, part)
            begin, data = begin + part.numel(), data[part.numel() :]

    def _read_bytes(self, entry: TensorEntry, offset: int, data: torch.Tensor) -> None:
        """From this place in its file."""
        view = data.numpy().data
        descriptor = self._descriptor(entry.file)
        done = 0
        while done < len(view):
            count = os.preadv(descriptor, [view[done:]], offset + done)
            if count == 0:
                raise CheckpointError(
                    f"{entry.file} is truncated: tensor {_label(entry)} needs {entry.num_bytes} bytes up to byte "
                    f"{entry.offset_bytes + entry.num_bytes}, the file has {os.fstat(descriptor).st_size}"
                )
            done += count
        self._num_bytes_read += done
        if self._on_bytes is not None:
            self._on_bytes(done)

    def _descriptor(self, file: str) -> int:
        if file not in self._descriptors:
            try:
                self._descriptors[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise CheckpointError(f"cannot read {file}: {error.strerror}") from error
        return self._descriptors[file]


def undo_rope_interleaving(tensor: torch.Tensor, num_heads: int, rotary_dim: int = 0) -> torch.Tensor:
    """Rows of each head from pair by pair (x0 y0 x1 y1 ...) to halves (x0 x1 ... y0 y1 ...), Hugging Face's order.

    Args:
        tensor: [num_heads * head_dim, ...], a weight or a bias.
        rotary_dim: how many rows of each head are in pairs, the first ones; 0 for all.
    Returns: the same shape.
    """
    head_dim = tensor.shape[0] // num_heads
    rotary_dim = rotary_dim or head_dim
    heads = tensor.view(num_heads, head_dim, *tensor.shape[1:])
    pairs = heads[:, :rotary_dim].reshape(num_heads, rotary_dim // 2, 2, *tensor.shape[1:])
    halves = pairs.transpose(1, 2).reshape(num_heads, rotary_dim, *tensor.shape[1:])
    return torch.cat((halves, heads[:, rotary_dim:]), dim=1).reshape(tensor.shape)


def part_of(entry: TensorEntry, index: int) -> TensorEntry:
    """The entry of what lies at `index` along the first dimension; of a quantised tensor, of all its parts."""
    count, *shape = entry.shape
    if any(part.shape[:1] != entry.shape[:1] for part in entry.parts.values()):
        shapes = ", ".join(f"{name} {list(part.shape)}" for name, part in entry.parts.items())
        raise CheckpointError(f"{entry.file}: the parts of {entry.name} do not fit together: {shapes}")
    num_bytes = entry.num_bytes // count
    parts = {name: part_of(part, index) for name, part in entry.parts.items()}
    return replace(
        entry,
        offset_bytes=entry.offset_bytes + index * num_bytes,
        num_bytes=num_bytes,
        shape=tuple(shape),
        parts=parts,
    )


def _label(entry: TensorEntry) -> str:
    return entry.name if entry.stored_name == entry.name else f"{entry.name} (stored as {entry.stored_name})"
