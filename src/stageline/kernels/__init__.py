"""The CPU's hot loops in C++, compiled at installation or at first use. Whoever finds no library here uses torch.

One place decides: `library(x)` gives the kernels that can take a tensor, or None.
"""

from __future__ import annotations

import functools
import logging

import torch

from stageline.config import environment
from stageline.errors import ConfigError
from stageline.kernels.build import KernelBuildError, build_library, variant_flags
from stageline.kernels.cpu import DTYPES, CpuKernels, KernelLibrary

logger = logging.getLogger(__name__)

_CHOICES = ("auto", "avx512", "avx2", "portable", "torch")


@functools.cache
def library(device: torch.device, dtype: torch.dtype) -> CpuKernels | None:
    """The kernels for tensors of this kind; None if torch has to do. Raises: ConfigError as `load_kernels`."""
    return load_kernels(environment.kernels()) if device.type == "cpu" and dtype in DTYPES else None


@functools.cache
def load_kernels(choice: str) -> CpuKernels | None:
    """Compile if necessary, and load.

    Args:
        choice: "auto" (the fastest variant this machine can run), a variant, or "torch" (none).
    Returns: None for "torch", and if there is no library; the log says why.
    Raises: ConfigError for an unknown choice, or a variant this machine cannot run.
    """
    if choice not in _CHOICES:
        raise ConfigError(f"STAGELINE_KERNELS is {choice!r}; choose from {', '.join(_CHOICES)}")
    if choice == "torch":
        return None
    try:
        loaded = KernelLibrary(build_library(environment.cache_directory(), None if choice == "auto" else choice))
    except (KernelBuildError, OSError) as error:
        logger.warning("no compiled CPU kernels, torch computes instead, several times slower: %s", error)
        return None
    runnable = [variant for variant in variant_flags() if loaded.can_run(variant)]
    if choice != "auto" and choice not in runnable:
        raise ConfigError(f"STAGELINE_KERNELS is {choice!r}, but this machine can run only {', '.join(runnable)}")
    held = [variant for variant in runnable if loaded.holds(variant)]
    return loaded.variant(held[0] if choice == "auto" else choice)
