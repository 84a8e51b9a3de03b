"""What a layout's KV caches hold, and who limits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from stageline.cost.capacity import best_layer_move, capacity
from stageline.cost.hardware import shipped_hardware
from stageline.cost.model_costs import model_costs
from stageline.cost.placement import Placement
from stageline.cost.roofline import StageDevices
from stageline.errors import ConfigError
from stageline.planner.known_models import find_model

TABLE = shipped_hardware()


def _placement(name: str, counts: tuple[int, ...], size: int, device: str = "h100-sxm") -> Placement:
    stage = StageDevices(TABLE.device(device), size, TABLE.link("nvlink4"))
    model = find_model(name)
    links = (TABLE.link("infiniband-ndr"),) * (len(counts) - 1)
    return Placement(model_costs(model.spec, model.weights), counts, (stage,) * len(counts), links)


@pytest.mark.parametrize(("counts", "size", "num_requests"), [((80,), 16, 43), ((40, 40), 8, 87)])
def test_70b_at_32k_on_16_cards_of_80_gb_holds_twice_as_many_requests_on_two_stages_of_eight(
    counts: tuple[int, ...], size: int, num_requests: int
) -> None:
    """Eight KV heads: sixteen devices in a stage keep everything twice."""
    held = capacity(_placement("llama-3.1-70b", counts, size), 32768)
    assert held.num_requests == num_requests
    assert held.num_tokens // 32768 == num_requests


def test_the_stage_with_the_head_limits_and_giving_away_a_layer_helps_only_as_far_as_the_neighbour_has_room() -> None:
    placement = _placement("llama-3.1-8b", (16, 16), 1)
    larger = _placement("llama-3.1-8b", (12, 20), 1)
    held, uneven = capacity(placement, 8192), capacity(larger, 8192)
    assert uneven.limiting_stage == 1
    assert uneven.num_requests < held.num_requests
    move = best_layer_move(larger, 8192)
    assert move is not None and move.layer_counts == (13, 19)
    moved = capacity(replace(larger, layer_counts=(13, 19)), 8192)
    assert move.num_requests == moved.num_requests > uneven.num_requests
    back = best_layer_move(placement, 8192)
    assert back is not None and back.num_requests <= held.num_requests


def test_weights_that_do_not_fit_hold_no_request() -> None:
    held = capacity(_placement("llama-3.1-70b", (80,), 1), 1024)
    assert held.num_requests == 0
    assert not held.stages[0].fits


def test_activations_of_large_microbatches_leave_less_room_once_they_exceed_what_is_reserved() -> None:
    placement = _placement("llama-3.1-8b", (32,), 1)
    layer = placement.model.layers[0]
    assert layer.activation_bytes() == (3 * 4096 + 2 * 14336) * 2
    assert layer.activation_bytes(4) == (3 * 4096 + 2 * 14336 / 4) * 2
    room = capacity(placement, 1024).stages[0].room_bytes
    fits_in_reserve = int(4 * 2**30 / layer.activation_bytes())
    assert capacity(placement, 1024, batched_tokens=fits_in_reserve).stages[0].room_bytes == room
    assert capacity(placement, 1024, batched_tokens=2 * fits_in_reserve).stages[0].room_bytes < room


def test_one_stage_has_no_layer_to_move() -> None:
    assert best_layer_move(_placement("llama-3.1-8b", (32,), 1), 1024) is None


def test_a_tied_head_is_kept_once_on_one_stage_and_twice_on_two() -> None:
    one = capacity(_placement("llama-3.2-1b", (16,), 1), 1024).stages[0].weight_bytes
    two = sum(stage.weight_bytes for stage in capacity(_placement("llama-3.2-1b", (8, 8), 1), 1024).stages)
    assert two - one == 128256 * 2048 * 2


def test_a_partition_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="40,41 must give every stage a layer and sum to the model's 80"):
        _placement("llama-3.1-70b", (40, 41), 8)
