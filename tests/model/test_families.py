"""Every family gives `transformers`' logits in float32: cut into stages, in chunks, from shared blocks."""

from __future__ import annotations

import pytest
import torch

from stageline import kernels
from stageline.checkpoint import open_checkpoint
from stageline.checkpoint.stage_tensors import stage_weight_bytes
from stageline.cost.model_costs import model_costs
from stageline.models.decoder import DecoderStage
from tests.model.chain import PROMPTS, Chain, logits_in_mixed_batches, sequence
from tests.model.family_reference import CUTS, References, assert_near, has_kernels_for_all
from tests.model.tiny_experts import EXPERT_FAMILIES
from tests.model.tiny_families import FAMILIES

ALL_FAMILIES = {**FAMILIES, **EXPERT_FAMILIES}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(ALL_FAMILIES, tmp_path_factory)


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_logits_equal_transformers_at_every_depth(family: str, reference: References) -> None:
    expected = reference(family)
    one_stage = logits_in_mixed_batches(Chain(expected.path, CUTS[1]))
    for number in PROMPTS:
        assert_near(one_stage[number], expected.logits[number])
    for num_stages in (2, 3):
        found = logits_in_mixed_batches(Chain(expected.path, CUTS[num_stages]))
        assert all(torch.equal(found[number], one_stage[number]) for number in PROMPTS), f"{num_stages} stages differ"


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_a_shared_prefix_gives_the_same_logits(family: str, reference: References) -> None:
    expected = reference(family)
    chain = Chain(expected.path, CUTS[2])
    tokens = sequence(0, PROMPTS[0])
    chain.requests.add(0, tokens)
    chain.run({0: 40})
    chain.requests.add_sharing(1, tokens, other=0, num_blocks=2)
    shared = chain.limits.block_size * 2
    assert_near(chain.run({1: len(tokens) - shared})[1], expected.logits[0][shared:])


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_without_kernels_torch_gives_the_same_logits(
    family: str, reference: References, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = reference(family)
    monkeypatch.setattr(kernels, "library", lambda device, dtype: None)
    found = logits_in_mixed_batches(Chain(expected.path, CUTS[1]))
    for number in PROMPTS:
        assert_near(found[number], expected.logits[number])


@pytest.mark.parametrize("family", ALL_FAMILIES)
@pytest.mark.skipif(not has_kernels_for_all(), reason="on this machine linear layers are torch's")
def test_blocks_are_recorded_as_one_program(family: str, reference: References) -> None:
    stage: DecoderStage = Chain(reference(family).path, CUTS[1], torch.bfloat16).stages[0]
    assert stage._recorded is not None


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_logits_stay_near_float32_ones(family: str, reference: References) -> None:
    expected = reference(family)
    found = logits_in_mixed_batches(Chain(expected.path, CUTS[1], torch.bfloat16))
    for number in PROMPTS:
        exact = expected.logits[number]
        assert (found[number] - exact).norm() / exact.norm() < 0.05


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_a_plan_counts_what_a_rank_keeps_of_every_layer(family: str, reference: References) -> None:
    """But for norms and biases, which a plan takes to be shared like the matrices beside them."""
    checkpoint = open_checkpoint(str(reference(family).path))
    costs = model_costs(checkpoint.spec)
    for size in (size for size in (1, 2, 3, 6) if costs.why_not_shared(size) is None):
        for layer, item in enumerate(costs.layers):
            prefix = f"model.layers.{layer}."
            entries = [entry for name, entry in checkpoint.tensors.items() if name.startswith(prefix)]
            is_small = [len(entry.shape) == 1 or entry.name.endswith("bias") for entry in entries]
            num_small = sum(entry.num_elements for entry, small in zip(entries, is_small, strict=True) if small)
            counted = stage_weight_bytes(checkpoint, range(layer, layer + 1), False, False, 2, num_ranks=size)
            assert abs(item.weight_bytes(size) - counted) <= 2 * num_small, f"layer {layer}, {size} ranks"


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_every_tensor_of_the_checkpoint_is_read_once(family: str, reference: References) -> None:
    path = reference(family).path
    checkpoint = open_checkpoint(str(path))
    chain = Chain(path, CUTS[1])
    num_bytes = sum(entry.num_bytes for entry in checkpoint.tensors.values())
    assert chain.num_bytes_read == num_bytes
