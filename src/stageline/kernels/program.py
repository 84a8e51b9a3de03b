"""Kernels called from Python, one at a time, or recorded once as a program that runs with one call.

One idea: between two kernels Python costs as much as a small microbatch's arithmetic, and says the same every time.
So a stage's layers are run once without computing: every kernel call is written down, with its arguments as addresses
and numbers, and only what differs from microbatch to microbatch (how many tokens, where its input lies) is filled in
later. Results lie in memory that is allocated then, and used again as soon as nothing refers to it any more.
"""

from __future__ import annotations

import ctypes
import math
import struct
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from ctypes import c_float, c_int32, c_int64, c_void_p
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stageline.kernels.huge_pages import zeroed_bytes

_recording: ContextVar[Recording | None] = ContextVar("recording", default=None)


_STEP_BYTES = 16


class Argument(Enum):
    """What an argument of a kernel is. The last three are sizes that a program fills in for every run."""

    POINTER = "pointer"
    SIZE = "size"
    FLAG = "flag"
    FLOAT = "float"
    NUM_TOKENS = "tokens of the microbatch"
    NUM_ROWS = "rows of the microbatch"
    TABLE_WIDTH = "blocks of its longest block table"

    @property
    def ctype(self) -> type[Any]:
        return _CTYPES.get(self, c_int64)


_CTYPES: dict[Argument, type[Any]] = {
    Argument.POINTER: c_void_p,
    Argument.FLAG: c_int32,
    Argument.FLOAT: c_float,
}


class CannotRecord(Exception):
    """What was to be recorded does more than call kernels."""


class Kernel:
    """A function of the compiled library.

    Args:
        function: to be called with arguments as in `signature`.
        by_words: address of the same function taking its arguments as words; None if it cannot be recorded.
    """

    def __init__(self, name: str, function: Any, signature: Sequence[Argument], by_words: int | None) -> None:
        function.argtypes, function.restype = [argument.ctype for argument in signature], None
        self.name = name
        self.signature = tuple(signature)
        self.by_words = by_words
        self._function = function

    def __call__(self, *arguments: Any) -> None:
        recording = _recording.get()
        if recording is None:
            self._function(*arguments)
        else:
            recording.add(self, arguments)

    def now(self, *arguments: Any) -> None:
        """Call it, also while recording."""
        self._function(*arguments)


def result(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Memory on the CPU for a kernel's result, uninitialised."""
    recording = _recording.get()
    return torch.empty(shape, dtype=dtype) if recording is None else recording.memory.empty(shape, dtype)


class _Memory:
    """Hands out memory that is free again when the last tensor in it is gone."""

    def __init__(self) -> None:
        self._all: list[torch.Tensor] = []
        self._free: list[npt.NDArray[np.uint8]] = []

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        num_bytes = math.prod(shape) * dtype.itemsize
        fitting = [(run.nbytes, place) for place, run in enumerate(self._free) if run.nbytes >= num_bytes]
        if fitting:
            run = self._free.pop(min(fitting)[1])
        else:
            self._all.append(zeroed_bytes(num_bytes))
            run = self._all[-1].numpy()
        # torch holds the array as long as a tensor lies in it.
        part = run[:num_bytes]
        weakref.finalize(part, self._free.append, run)
        return torch.from_numpy(part).view(dtype).view(shape)


class _OnlyViews(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own hooks are not typed
    """Refuses whatever torch would compute: a program would not compute it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Told that its compiler shall leave this alone, torch would import it first: as long as torch itself takes."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            raise CannotRecord(f"{func} is computed by torch")
        return func(*args, **(kwargs or {}))


class Recording:
    """Writes calls down.

    Args:
        sizes: those that differ from run to run, as they are while recording.
        inputs: tensors whose addresses differ from run to run.
    """

    def __init__(self, sizes: dict[Argument, int], inputs: Sequence[torch.Tensor]) -> None:
        self.memory = _Memory()
        self._sizes = sizes
        self._places = {tensor.data_ptr(): len(sizes) + index for index, tensor in enumerate(inputs)}
        self._inputs = tuple(inputs)
        self._steps: list[tuple[int, int]] = []
        self._words: list[int] = []
        self._variables: list[tuple[int, int]] = []
        self._marks: list[int] = []

    @contextmanager
    def active(self) -> Iterator[None]:
        """While entered, kernels of this thread are recorded instead of called."""
        token = _recording.set(self)
        try:
            with _OnlyViews():  # type: ignore[no-untyped-call]
                yield
        finally:
            _recording.reset(token)

    def add(self, kernel: Kernel, arguments: Sequence[Any]) -> None:
        """Raises: CannotRecord."""
        if kernel.by_words is None:
            raise CannotRecord(f"{kernel.name} cannot be recorded")
        self._steps.append((kernel.by_words, len(self._words)))
        for kind, value in zip(kernel.signature, arguments, strict=True):
            place = self._place_of(kind, value)
            if place is not None:
                self._variables.append((len(self._words), place))
            self._words.append(_word(kind, value))

    def mark(self) -> None:
        """Whoever runs the program can be told when it gets here."""
        self._marks.append(len(self._steps))

    def _place_of(self, kind: Argument, value: Any) -> int | None:
        """Where in a run's values this argument will be found; None if it is always the same."""
        if kind in self._sizes:
            if value != self._sizes[kind]:
                raise CannotRecord(f"{value} is not the number of {kind.value}")
            return list(self._sizes).index(kind)
        if kind is Argument.POINTER and value is not None:
            for tensor in self._inputs:
                if tensor.data_ptr() < value < tensor.data_ptr() + tensor.nbytes:
                    raise CannotRecord("a part of an input is given to a kernel")
            return self._places.get(value)
        return None

    def compiled(self, run: Any) -> CompiledCalls:
        """What was recorded, ready to run. run: the library's function that runs programs."""
        return CompiledCalls(run, self._steps, self._words, self._variables, self._marks)


class CompiledCalls:
    """Recorded calls as C reads them."""

    def __init__(
        self,
        run: Any,
        steps: list[tuple[int, int]],
        words: list[int],
        variables: list[tuple[int, int]],
        marks: list[int],
    ) -> None:
        self._run = run
        self._words = np.array(words, dtype=np.int64)
        first = self._words.ctypes.data
        self._steps = np.array([(call, first + 8 * place) for call, place in steps], dtype=np.int64)
        self._variables = np.array([(first + 8 * word, place) for word, place in variables], dtype=np.int64)
        self._addresses = self._steps.ctypes.data, self._variables.ctypes.data
        self._num_steps = len(steps)
        self._marks = marks

    def __call__(self, values: ctypes.Array[c_int64], on_mark: Callable[[], None] | None = None) -> None:
        """Args:
        values: of the sizes, then the inputs' addresses.
        on_mark: called at every mark of the recording.
        """
        start = 0
        if on_mark is not None:
            for mark in self._marks:
                self._run_steps(start, mark, values)
                on_mark()
                start = mark
        self._run_steps(start, self._num_steps, values)

    def _run_steps(self, start: int, end: int, values: ctypes.Array[c_int64]) -> None:
        steps, variables = self._addresses
        self._run(steps + start * _STEP_BYTES, end - start, variables, len(self._variables), values)


def _word(kind: Argument, value: Any) -> int:
    if kind is Argument.FLOAT:
        return int.from_bytes(struct.pack("<f", value), "little")
    return 0 if value is None else int(value)
