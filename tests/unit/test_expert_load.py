"""What a rank does of a layer with experts: in parts or dealt whole, as the engine shares them and as tokens choose."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest

from stageline.checkpoint.checkpoint import Checkpoint, TensorEntry
from stageline.checkpoint.model_spec import ModelSpec, MoeSpec, RopeSpec
from stageline.checkpoint.stage_tensors import stage_weight_bytes
from stageline.checkpoint.tensor_shards import as_shared
from stageline.cost.expert_load import busiest_draws, busiest_experts, busiest_rows, num_experts_hit
from stageline.cost.hardware import Device, Link, MatmulRate
from stageline.cost.model_costs import ItemShape, WeightFormat, model_costs
from stageline.cost.roofline import StageDevices, item_parts, matrices_s
from stageline.cost.stage_time import MicrobatchShape
from stageline.planner.known_models import find_model

SPEC = ModelSpec(
    family="mixtral", num_layers=2, hidden_size=16, num_heads=4, num_kv_heads=2, head_dim=4, intermediate_size=48,
    vocab_size=100, max_position_embeddings=64, rms_norm_eps=1e-5, rope=RopeSpec(), tie_word_embeddings=False,
    moe=MoeSpec(num_experts=8, num_experts_per_token=2, intermediate_size=24, shared_intermediate_size=40),
)  # fmt: skip
ATTENTION = {"q_proj": (16, 16), "k_proj": (8, 16), "v_proj": (8, 16), "o_proj": (16, 16)}
MLP = {"gate_proj": 0, "up_proj": 0, "down_proj": 1}
NORM_NUMBERS = 2 * SPEC.hidden_size


def _drawn(num_experts: int, num_chosen: int, num_tokens: int, num_ranks: int) -> tuple[float, float]:
    """Distinct experts and rows of the busiest rank, means of many random choices."""
    generator = np.random.default_rng(0)
    experts, rows = [], []
    for _ in range(1500):
        chosen = np.argsort(generator.random((num_tokens, num_experts)), axis=1)[:, :num_chosen]
        of_ranks = np.bincount(chosen.ravel(), minlength=num_experts).reshape(num_ranks, -1)
        experts.append((of_ranks > 0).sum(axis=1).max())
        rows.append(of_ranks.sum(axis=1).max())
    return float(np.mean(experts)), float(np.mean(rows))


@pytest.mark.parametrize(("num_slots", "num_drawn", "num_ranks"), [(8, 2, 2), (8, 3, 4), (12, 5, 3), (6, 6, 2)])
def test_the_busiest_of_few_slots_is_the_mean_over_all_draws(num_slots: int, num_drawn: int, num_ranks: int) -> None:
    own = num_slots // num_ranks
    largest = [
        max(sum(slot // own == rank for slot in slots) for rank in range(num_ranks))
        for slots in combinations(range(num_slots), num_drawn)
    ]
    assert busiest_draws(num_drawn, num_slots, num_ranks) == pytest.approx(float(Fraction(sum(largest), len(largest))))


@pytest.mark.parametrize(
    ("num_experts", "num_chosen", "num_tokens", "num_ranks"),
    [(8, 2, 1, 2), (8, 2, 4, 8), (8, 2, 16, 4), (128, 8, 4, 8), (32, 4, 100, 4)],
)
def test_the_busiest_rank_has_what_random_choices_give_it(
    num_experts: int, num_chosen: int, num_tokens: int, num_ranks: int
) -> None:
    experts, rows = _drawn(num_experts, num_chosen, num_tokens, num_ranks)
    assert busiest_experts(num_experts, num_chosen, num_tokens, num_ranks) == pytest.approx(experts, rel=0.015)
    assert busiest_rows(num_experts, num_chosen, num_tokens, num_ranks) == pytest.approx(rows, rel=0.015)


def test_no_rank_has_more_than_there_is_and_many_tokens_even_out() -> None:
    for num_tokens in (1, 2, 7, 64, 5000):
        hit = num_experts_hit(64, 6, num_tokens)
        busiest = busiest_experts(64, 6, num_tokens, 8)
        assert hit / 8 <= busiest <= min(8.0, hit)
        assert num_tokens * 6 / 8 <= busiest_rows(64, 6, num_tokens, 8) <= num_tokens * 6
        assert busiest_rows(8, 2, num_tokens, 8) <= num_tokens, "one expert each, and a token takes it once"
    assert busiest_rows(64, 6, 5000, 8) == pytest.approx(5000 * 6 / 8, rel=0.03)
    # The number of draws from which on they are taken to be normal makes no step.
    assert busiest_draws(257, 2048, 8) - busiest_draws(256, 2048, 8) == pytest.approx(1 / 8, abs=0.25)


def _checkpoint() -> Checkpoint:
    """One layer's tensors, two bytes a number."""
    shapes = {f"self_attn.{name}": shape for name, shape in ATTENTION.items()}
    shapes |= dict.fromkeys(("input_layernorm", "post_attention_layernorm"), (16,))
    shapes["mlp.gate"] = (8, 16)
    for prefix, size in [(f"experts.{expert}", 24) for expert in range(8)] + [("shared_expert", 40)]:
        shapes |= {f"mlp.{prefix}.{part}": ((16, size), (size, 16))[1 - is_down] for part, is_down in MLP.items()}
    names = {f"model.layers.0.{name}.weight": shape for name, shape in shapes.items()}
    entries = {name: TensorEntry(name, "f", 0, 2, shape, "BF16", name) for name, shape in names.items()}
    return Checkpoint("/m", SPEC, entries)


@pytest.mark.parametrize("is_dealt", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_a_rank_keeps_what_the_engine_counts_for_it(is_dealt: bool, num_ranks: int) -> None:
    checkpoint = as_shared(_checkpoint(), is_dealt)
    counted = stage_weight_bytes(checkpoint, range(1), False, False, 2, num_ranks=num_ranks)
    costs = model_costs(SPEC)
    layer = (costs.dealt() if is_dealt else costs).layers[0]
    # Norms are on every rank; the plan counts them as shared, for they are nothing beside the rest.
    copies_of_norms = 2 * NORM_NUMBERS * (1 - 1 / num_ranks)
    assert layer.weight_bytes(num_ranks) + copies_of_norms == pytest.approx(counted)


def test_experts_in_parts_of_blocks_are_kept_in_16_bits_and_dealt_ones_as_they_are() -> None:
    """gpt-oss: 2,880 inner numbers; a half is 45 blocks of 32, a quarter is 22.5."""
    model = find_model("gpt-oss-20b")
    costs = model_costs(model.spec, model.weights)
    parts, dealt = costs.layers[0], costs.dealt().layers[0]
    assert parts.weight_bytes(2) == pytest.approx(dealt.weight_bytes(2))
    experts = 32 * 3 * 2880 * 2880 / 4
    assert parts.weight_bytes(4) - dealt.weight_bytes(4) == pytest.approx(experts * (2 - 4.25 / 8))
    assert model_costs(model.spec, WeightFormat()).layers[0].keeps_blocks(4)


DEVICE = Device(
    memory_bytes=1e12, memory_bytes_per_s=1000.0, flops_per_s={"bf16": 1e9}, source="x", memory_efficiency=1.0,
    compute_efficiency=1.0, microbatch_overhead_s=0.0,
)  # fmt: skip
LINK = Link(bytes_per_s=1e12, latency_s=0.5, source="x", latency_source="x")
PARTS = ItemShape(num_experts=8, num_experts_per_token=2, num_per_expert=500.0, num_all_reduces=2)
DEALT = ItemShape(
    num_experts=8, num_experts_per_token=2, num_per_expert=500.0, num_all_reduces=2, is_dealt=True
)  # fmt: skip


def test_a_rank_reads_its_experts_whole_or_a_part_of_every_chosen_one() -> None:
    """One token, two of eight experts, two ranks: 1,000 bytes an expert, 1,000 a second.

    In parts each reads half of both, 1 s. Dealt, both are one rank's in 3 of 7 cases: 1 + 3/7 experts.
    """
    two = StageDevices(DEVICE, 2, LINK)
    assert matrices_s(PARTS, two, 1) == pytest.approx(1.0)
    assert matrices_s(DEALT, two, 1) == pytest.approx(1 + 3 / 7)
    assert matrices_s(DEALT, StageDevices(DEVICE, 1, LINK), 1) == pytest.approx(2.0)


def test_measured_rates_are_those_of_the_rows_that_meet_in_an_expert() -> None:
    rates = (MatmulRate(1.0, 100.0), MatmulRate(64.0, 100.0))
    device = Device(
        memory_bytes=1e12, memory_bytes_per_s=1.0, flops_per_s={"bf16": 1.0}, source="x", matmul_rates=rates
    )  # fmt: skip
    two = StageDevices(device, 2, LINK)
    assert matrices_s(PARTS, two, 4) == pytest.approx(2 * 4 * 2 * 500 / 2 / 100)
    assert matrices_s(DEALT, two, 4) == pytest.approx(2 * busiest_rows(8, 2, 4, 2) * 500 / 100)


def test_both_ways_add_up_over_ranks_alike_and_launch_what_they_compute() -> None:
    """The engine sums a layer's output over the ranks, whichever experts it came from."""
    launching = Device(
        memory_bytes=1e12, memory_bytes_per_s=1e15, flops_per_s={"bf16": 1e15}, source="x", expert_overhead_s=1.0,
        microbatch_overhead_s=0.0,
    )  # fmt: skip
    shape = MicrobatchShape(1, 0, 1, 0)
    parts, dealt = (item_parts(item, 32.0, StageDevices(launching, 2, LINK), shape) for item in (PARTS, DEALT))
    assert parts.communication_s == dealt.communication_s > 0
    assert (parts.overhead_s, dealt.overhead_s) == (pytest.approx(2.0), pytest.approx(1 + 3 / 7))
