"""Every family with experts gives `transformers`' logits in float32: cut into stages, in chunks, from shared blocks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from stageline import kernels
from stageline.checkpoint import open_checkpoint
from stageline.models.decoder import DecoderStage
from tests.model.chain import CPU, PROMPTS, Chain, cut, logits_in_mixed_batches, sequence
from tests.model.tiny_experts import EXPERT_FAMILIES
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


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Reference]:
    known: dict[str, Reference] = {}

    def of(family: str) -> Reference:
        if family not in known:
            path = tmp_path_factory.mktemp(family.replace(" ", "-"))
            known[family] = Reference(EXPERT_FAMILIES[family].write(path))
        return known[family]

    return of


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())
    assert torch.equal(found.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_logits_equal_transformers_at_every_depth(family: str, reference: Callable[[str], Reference]) -> None:
    expected = reference(family)
    one_stage = logits_in_mixed_batches(Chain(expected.path, CUTS[1]))
    for number in PROMPTS:
        assert_near(one_stage[number], expected.logits[number])
    for num_stages in (2, 3):
        found = logits_in_mixed_batches(Chain(expected.path, CUTS[num_stages]))
        assert all(torch.equal(found[number], one_stage[number]) for number in PROMPTS), f"{num_stages} stages differ"


@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_a_shared_prefix_gives_the_same_logits(family: str, reference: Callable[[str], Reference]) -> None:
    expected = reference(family)
    chain = Chain(expected.path, CUTS[2])
    tokens = sequence(0, PROMPTS[0])
    chain.requests.add(0, tokens)
    chain.run({0: 40})
    chain.requests.add_sharing(1, tokens, other=0, num_blocks=2)
    shared = chain.limits.block_size * 2
    assert_near(chain.run({1: len(tokens) - shared})[1], expected.logits[0][shared:])


@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_without_kernels_torch_gives_the_same_logits(
    family: str, reference: Callable[[str], Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = reference(family)
    monkeypatch.setattr(kernels, "library", lambda device, dtype: None)
    found = logits_in_mixed_batches(Chain(expected.path, CUTS[1]))
    for number in PROMPTS:
        assert_near(found[number], expected.logits[number])


@pytest.mark.parametrize("family", EXPERT_FAMILIES)
@pytest.mark.skipif(not has_kernels_for_all(), reason="on this machine linear layers are torch's")
def test_blocks_are_recorded_as_one_program(family: str, reference: Callable[[str], Reference]) -> None:
    stage: DecoderStage = Chain(reference(family).path, CUTS[1], torch.bfloat16).stages[0]
    assert stage._recorded is not None


@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_every_tensor_of_the_checkpoint_is_read_once(family: str, reference: Callable[[str], Reference]) -> None:
    path = reference(family).path
    checkpoint = open_checkpoint(str(path))
    num_bytes = sum(entry.num_bytes for entry in checkpoint.tensors.values())
    assert Chain(path, CUTS[1]).num_bytes_read == num_bytes
