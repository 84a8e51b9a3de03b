"""What the tests of families share: a checkpoint with `transformers`' answers, and how near to them is near."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from stageline import kernels
from tests.model.chain import CPU, PROMPTS, cut, sequence
from tests.model.tiny_families import TinyFamily
from tests.tiny_models import load_reference, reference_logits

CUTS = {1: cut(4), 2: cut(1, 3), 3: cut(1, 2, 1)}


def has_kernels_for_all() -> bool:
    library = kernels.library(CPU, torch.bfloat16)
    return library is not None and library.has_fast_linear and not torch.cpu._is_amx_tile_supported()


class Reference:
    """A checkpoint and what `transformers` answers for it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        model = load_reference(path)
        self.logits = {n: reference_logits(model, sequence(n, length)) for n, length in PROMPTS.items()}


class References:
    """By the name of a family; each is made when it is first asked for."""

    def __init__(self, families: Mapping[str, TinyFamily], directories: pytest.TempPathFactory) -> None:
        self._families, self._directories = families, directories
        self._known: dict[str, Reference] = {}

    def __call__(self, family: str) -> Reference:
        if family not in self._known:
            path = self._directories.mktemp(family.replace(" ", "-"))
            self._known[family] = Reference(self._families[family].write(path))
        return self._known[family]


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())
    assert torch.equal(found.argmax(-1), expected.argmax(-1))
