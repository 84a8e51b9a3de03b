"""Every family gives the same logits when ranks share its layers, and each rank reads its own part of the weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.model.chain import PROMPTS, Chain, cut, logits_in_mixed_batches
from tests.model.ranks_under_test import SharedChain, in_ranks
from tests.model.tiny_experts import EXPERT_FAMILIES
from tests.model.tiny_families import FAMILIES

ALL_FAMILIES = {**FAMILIES, **EXPERT_FAMILIES}
LAYOUTS = {"TP2": (cut(4), [2]), "PP3 x TP2,1,1": (cut(1, 2, 1), [2, 1, 1])}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    known: dict[str, Path] = {}

    def of(family: str) -> Path:
        if family not in known:
            known[family] = ALL_FAMILIES[family].write(tmp_path_factory.mktemp(family.replace(" ", "-")))
        return known[family]

    return of


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_logits_are_those_of_one_rank(family: str, layout: str, checkpoint: Callable[[str], Path]) -> None:
    expected = logits_in_mixed_batches(Chain(checkpoint(family), cut(4)))
    cuts, sizes = LAYOUTS[layout]
    found = logits_in_mixed_batches(SharedChain(checkpoint(family), cuts, sizes))
    for number in PROMPTS:
        torch.testing.assert_close(
            found[number], expected[number], rtol=1e-4, atol=1e-4 * expected[number].abs().max().item()
        )
        assert torch.equal(found[number].argmax(-1), expected[number].argmax(-1))
