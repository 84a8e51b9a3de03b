"""The ways a CPU can compute, as a fixture: a test that takes `variant` runs once for each that this machine has."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from stageline import kernels
from stageline.errors import ConfigError

COMPILED = ("avx512", "avx2", "portable")


def load_or_skip(variant: str) -> kernels.CpuKernels:
    """The compiled kernels of this variant."""
    try:
        library = kernels.load_kernels(variant)
    except ConfigError as error:
        pytest.skip(str(error))
    if library is None:
        pytest.skip("there is no C++ compiler here")
    return library


@pytest.fixture(params=[*COMPILED, "torch"])
def variant(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Everything that chooses by `kernels.library` uses this variant while the test runs."""
    if request.param != "torch":
        load_or_skip(request.param)
    monkeypatch.setenv("STAGELINE_KERNELS", request.param)
    kernels.library.cache_clear()
    yield request.param
    kernels.library.cache_clear()


@pytest.fixture(params=COMPILED)
def library(request: pytest.FixtureRequest) -> kernels.CpuKernels:
    """A variant's kernels themselves."""
    return load_or_skip(request.param)
