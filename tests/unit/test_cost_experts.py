"""What layers with experts are estimated to cost: chosen experts are multiplied, and read once whoever chose them."""

from __future__ import annotations

import pytest

from stageline.checkpoint.checkpoint import Checkpoint, TensorEntry
from stageline.checkpoint.model_spec import ModelSpec, MoeSpec, RopeSpec
from stageline.cost.layer_costs import analytic_costs, item_bytes, layer_kinds
from stageline.pipeline.item_times import PlannedMicrobatch

NUM_EXPERTS, CHOSEN = 16, 2


def checkpoint() -> Checkpoint:
    """A dense first layer, and one with experts of the same matrix."""
    spec = ModelSpec(
        family="mixtral", num_layers=2, hidden_size=8, num_heads=2, num_kv_heads=1, head_dim=4, intermediate_size=32,
        vocab_size=100, max_position_embeddings=64, rms_norm_eps=1e-5, rope=RopeSpec(), tie_word_embeddings=False,
        moe=MoeSpec(
            num_experts=NUM_EXPERTS, num_experts_per_token=CHOSEN, intermediate_size=32, dense_layers=(0,)
        ),
    )  # fmt: skip
    names = ["model.layers.0.mlp.up_proj.weight"]
    names += [f"model.layers.1.mlp.experts.{expert}.up_proj.weight" for expert in range(NUM_EXPERTS)]
    names += ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    return Checkpoint("/m", spec, {name: TensorEntry(name, "f", 0, 2, (32, 8), "BF16", name) for name in names})


def ratio_of_layers(num_rows: int) -> float:
    """How many times as long the layer with experts takes."""
    opened = checkpoint()
    costs = analytic_costs(opened, PlannedMicrobatch(num_rows, 0), item_bytes(opened, 2, False, 0), 16)
    return costs.layers_s[1] / costs.layers_s[0]


def test_a_few_rows_read_the_experts_they_chose() -> None:
    assert ratio_of_layers(1) == pytest.approx(CHOSEN)
    assert CHOSEN < ratio_of_layers(4) < 4 * CHOSEN


def test_many_rows_are_multiplied_by_the_experts_they_chose() -> None:
    assert ratio_of_layers(100_000) == pytest.approx(CHOSEN)


def test_all_experts_are_kept_in_memory() -> None:
    sizes = item_bytes(checkpoint(), 2, False, 0)
    assert sizes.layers[1] == NUM_EXPERTS * sizes.layers[0]


def test_a_dense_first_layer_is_of_another_kind() -> None:
    assert layer_kinds(checkpoint()) == (0, 1)
