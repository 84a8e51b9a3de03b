"""What layers take is found again in the times of processes that compute by known laws."""

from __future__ import annotations

from typing import cast

import pytest

from stageline.pipeline.host_measurement import Measured, TimeMicrobatch
from stageline.planner.measure_layers import FittedLayers, LayerTimes, MeasuringProcesses

NUM_LAYERS = 3
READING_S, TOKEN_S, STAGE_S = 2e-3, 5e-5, 3e-4
DECODE_ATTENTION_S, CHUNK_ATTENTION_S = 2e-7, 3e-9


class _TwoStages:
    """Two processes: memory, which few tokens wait for, is shared; the processor, which many wait for, is not."""

    num_processes = 2

    def time(self, order: TimeMicrobatch, num_at_once: int) -> list[Measured]:
        layer_s = max(READING_S * num_at_once, TOKEN_S * order.num_tokens)
        if order.new_tokens == 1:
            layer_s += DECODE_ATTENTION_S * order.num_rows * order.cached_tokens
        else:
            pairs = order.num_rows * (2 * order.cached_tokens * order.new_tokens + order.new_tokens**2)
            layer_s += CHUNK_ATTENTION_S * pairs
        return [Measured(NUM_LAYERS * layer_s, layer_s + STAGE_S)] * num_at_once


@pytest.fixture
def fitted() -> FittedLayers:
    times = LayerTimes(cast(MeasuringProcesses, _TwoStages()), NUM_LAYERS, num_rounds=2, point_s=0.0)
    for _ in range(2):
        times.go_round()
    return times.fit()


def test_weights_and_attention_are_told_apart(fitted: FittedLayers) -> None:
    for num_tokens in (1, 16, 64, 128, 512, 1024):
        assert fitted.layer_s.at(num_tokens) == pytest.approx(max(READING_S, TOKEN_S * num_tokens))
    assert fitted.attention_token_s == pytest.approx(DECODE_ATTENTION_S)
    assert fitted.prefill_attention_s == pytest.approx(CHUNK_ATTENTION_S)
    assert fitted.stage_s == pytest.approx(STAGE_S)


def test_few_tokens_wait_for_the_memory_that_stages_share_and_a_chunk_does_not(fitted: FittedLayers) -> None:
    [two_at_once] = fitted.contention
    assert two_at_once.at(1) > 1.9 and two_at_once.at(32) > 1.7
    assert two_at_once.at(128) == pytest.approx(1.0) == two_at_once.at(2048)
