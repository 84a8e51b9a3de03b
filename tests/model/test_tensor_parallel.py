"""Every family gives the same logits when ranks share its layers, and each rank reads its own part of the weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from stageline.checkpoint import open_checkpoint, stage_file_bytes
from stageline.checkpoint.tensor_shards import as_shared
from stageline.parallel.tensor_parallel import TensorParallel
from tests.model.chain import PROMPTS, Chain, cut, logits_in_mixed_batches
from tests.model.ranks_under_test import SharedChain, in_ranks
from tests.model.test_families import has_kernels_for_all
from tests.model.tiny_experts import EXPERT_FAMILIES
from tests.model.tiny_families import FAMILIES

ALL_FAMILIES = {**FAMILIES, **EXPERT_FAMILIES}
LAYOUTS = {"TP2": (cut(4), [2]), "PP2 x TP2": (cut(1, 3), [2, 2]), "PP3 x TP2,1,1": (cut(1, 2, 1), [2, 1, 1])}
REPLICATED = ["llama", "phi3", "olmo2", "gpt-oss"]
"""Families whose queries, keys and values are read in different ways."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    known: dict[str, Path] = {}

    def of(family: str) -> Path:
        if family not in known:
            known[family] = ALL_FAMILIES[family].write(tmp_path_factory.mktemp(family.replace(" ", "-")))
        return known[family]

    return of


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_logits_are_those_of_one_rank(family: str, checkpoint: Callable[[str], Path]) -> None:
    expected = logits_in_mixed_batches(Chain(checkpoint(family), cut(4)))
    ways = [(layout, False) for layout in LAYOUTS]
    if family in EXPERT_FAMILIES:
        ways += [("TP2", True), ("PP3 x TP2,1,1", True)]
    for layout, deals_experts in ways:
        cuts, sizes = LAYOUTS[layout]
        found = logits_in_mixed_batches(SharedChain(checkpoint(family), cuts, sizes, deals_experts=deals_experts))
        shown = f"{layout}, experts dealt" if deals_experts else layout
        for number, logits in expected.items():
            near = {"rtol": 1e-4, "atol": 1e-4 * logits.abs().max().item()}
            torch.testing.assert_close(found[number], logits, **near, msg=lambda text: f"{shown}: {text}")  # noqa: B023
            assert torch.equal(found[number].argmax(-1), logits.argmax(-1)), shown


@pytest.mark.parametrize("family", REPLICATED)
def test_kv_heads_are_copied_where_ranks_are_more(family: str, tmp_path: Path) -> None:
    path = ALL_FAMILIES[family].changed({"num_attention_heads": 4, "num_key_value_heads": 2}).write(tmp_path)
    expected = logits_in_mixed_batches(Chain(path, cut(4)))
    found = logits_in_mixed_batches(SharedChain(path, cut(4), [4]))
    for number in PROMPTS:
        torch.testing.assert_close(
            found[number], expected[number], rtol=1e-4, atol=1e-4 * expected[number].abs().max().item()
        )


@pytest.mark.parametrize(
    ("family", "deals_experts"),
    [
        ("llama", False),
        ("gemma3", False),
        ("mixtral", False),
        ("mixtral", True),
        ("deepseek v3", False),
        ("deepseek v3", True),
        ("gpt-oss", True),
    ],
)
def test_each_rank_reads_its_own_part(
    family: str, deals_experts: bool, checkpoint: Callable[[str], Path]
) -> None:
    """What is counted before loading is what is read, and twice that is little more than the file."""
    path = checkpoint(family)
    opened = as_shared(open_checkpoint(str(path)), deals_experts)
    [[first, second]] = SharedChain(path, cut(4), [2], deals_experts=deals_experts).num_bytes_read
    assert first == stage_file_bytes(opened, range(4), True, True, num_ranks=2)
    whole = sum(entry.num_bytes for entry in opened.tensors.values())
    assert whole <= first + second < 1.35 * whole
    assert abs(first - second) < 0.02 * whole


@pytest.mark.skipif(not has_kernels_for_all(), reason="on this machine linear layers are torch's")
@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3 moe"])
def test_shared_blocks_are_recorded_as_one_program(family: str, checkpoint: Callable[[str], Path]) -> None:
    chain = SharedChain(checkpoint(family), cut(4), [2], torch.bfloat16)
    assert all(stage._recorded is not None for stage in chain.stages[0])
    alone = logits_in_mixed_batches(Chain(checkpoint(family), cut(4), torch.bfloat16))
    found = logits_in_mixed_batches(chain)
    for number in PROMPTS:
        assert (found[number] - alone[number]).norm() / alone[number].norm() < 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_is_the_same_on_every_rank_whatever_its_size(dtype: torch.dtype) -> None:
    sizes = [(1, 1), (3, 17), (64, 72), (1500, 1000)]  # the last one takes several steps

    def work(ranks: TensorParallel) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(ranks.rank)
        return [ranks.all_reduce(torch.randn(size, generator=generator).to(dtype)) for size in sizes for _ in range(3)]

    found = in_ranks(3, work)
    generators = [torch.Generator().manual_seed(rank) for rank in range(3)]
    for place, size in enumerate(size for size in sizes for _ in range(3)):
        parts = [torch.randn(size, generator=generator).to(dtype).float() for generator in generators]
        assert all(torch.equal(rank[place], ((parts[0] + parts[1]) + parts[2]).to(dtype)) for rank in found)


def test_what_ranks_tell_one_another_arrives_in_order() -> None:
    def work(ranks: TensorParallel) -> list[int]:
        heard = []
        for number in range(200):
            told = torch.full((700_000 if number == 7 else 3,), number if ranks.rank == 0 else -1)
            ranks.broadcast(told)  # the first rank may be ahead of the others
            heard.append(int(told[-1]))
            if number % 50 == 0:
                heard += ranks.all_gather(torch.tensor([ranks.rank]))[:, 0].tolist()
        return heard

    expected = [step for number in range(200) for step in ([number, 0, 1] if number % 50 == 0 else [number])]
    assert in_ranks(2, work) == [expected, expected]
