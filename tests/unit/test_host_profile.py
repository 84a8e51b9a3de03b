"""A host's profile is kept and found again, and stages' times follow from it in proportion to what they hold."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from stageline.cost.host_profile import (
    Curve,
    EngineCosts,
    Factors,
    HostKey,
    HostProfile,
    LayerShape,
    RunCosts,
    load_host_profile,
    save_host_profile,
    stage_times_of,
)
from stageline.pipeline.microbatch import Microbatch
from stageline.pipeline.partition import stages_of
from stageline.planner.host_pipeline import host_pipeline

SHAPE = LayerShape((1e6,) * 6, 2e6, 512.0, 1024.0)
RUN = RunCosts(
    prepare_s=2e-4,
    prepare_row_s=1e-6,
    begin_s=5e-5,
    send_s=1e-4,
    hand_on_s=4e-5,
    result_send_s=6e-5,
    to_stages_s=7e-5,
    to_next_stage_s=8e-5,
    to_engine_s=9e-5,
)


def profile() -> HostProfile:
    return HostProfile(
        key=HostKey("A processor", 4, "auto", "bfloat16", "none", 2, "auto"),
        model="model.gguf",
        shape=SHAPE,
        layer_s=Curve((1, 4, 64, 512), (1e-3, 1.5e-3, 4e-3, 32e-3)),
        head_s=Curve((1, 64), (2e-3, 8e-3)),
        stage_s=1e-4,
        attention_token_s=1e-8,
        prefill_attention_s=2e-9,
        contention=(Factors((1, 9), (1.8, 1.0)),),
        run=RUN,
        crowded_run=msgspec.structs.replace(
            RUN, to_next_stage_s=9e-5, work=Factors((1, 4), (1.25, 1.0)), core_share=Factors((4,), (0.9,))
        ),
        message_send_s=1e-5,
        link_bytes_per_s=1e9,
        engine=EngineCosts(1e-4, 1e-6, 2e-5, 3e-6, 1e-5, 2e-6),
        memory_bytes_per_s=1e10,
        memory_bytes=1e10,
    )


def decodes(rows: int, context: int) -> Microbatch:
    return Microbatch(
        0, 0, [], [], [], list(range(rows)), [context] * rows, [1] * rows, [0] * rows, list(range(rows))
    )


def chunk(cached: int, new: int) -> Microbatch:
    return Microbatch(0, 0, [], [], [], [1], [cached], [new], [0] * new, [])


def test_a_curve_is_straight_between_its_points_and_in_proportion_beyond_them() -> None:
    curve = Curve((2, 4, 8), (1.0, 2.0, 3.0))
    assert [curve.at(number) for number in (0, 1, 2, 3, 4, 6, 8, 16)] == [0.0, 1.0, 1.0, 1.5, 2.0, 2.5, 3.0, 6.0]


def test_a_stage_takes_its_layers_their_attention_and_what_it_holds_besides() -> None:
    times = stage_times_of(profile(), SHAPE, stages_of((2, 4)))
    attention_s = 4 * 100 * 1e-8
    assert times(decodes(4, 100)) == pytest.approx(
        [1e-4 + 2 * (1.5e-3 + attention_s), 1e-4 + 4 * (1.5e-3 + attention_s) + profile().head_s.at(4)]
    )
    # A chunk that is not a prompt's last needs no token, so no head.
    attention_s = (2 * 300 * 64 + 64 * 64) * 2e-9
    assert times(chunk(300, 64)) == pytest.approx([1e-4 + 2 * (4e-3 + attention_s), 1e-4 + 4 * (4e-3 + attention_s)])


def test_another_models_layers_cost_in_proportion_to_their_weights_and_its_cache() -> None:
    larger = LayerShape((3e6, 3e6, 1e6), 4e6, 1024.0, 2048.0)
    first, last = stage_times_of(profile(), larger, stages_of((2, 1)))(decodes(1, 1000))
    assert first == pytest.approx(1e-4 + 6 * 1e-3 + 2 * 2 * 1000 * 1e-8)
    assert last == pytest.approx(1e-4 + 1e-3 + 2 * 1000 * 1e-8 + 2 * 2e-3)


def test_the_host_is_a_pipeline_whose_stages_share_its_cores() -> None:
    pipeline = host_pipeline(profile(), SHAPE, stages_of((2, 2, 2)))
    assert pipeline.host is not None
    assert pipeline.host.num_cores == 2, "two threads a stage, four cores"
    assert [pipeline.host.slowdowns(number)[0] for number in (1, 5, 9)] == [1.0, 1.0, 1.0]
    assert [pipeline.host.slowdowns(number)[1] for number in (1, 5, 99)] == pytest.approx([1.8, 1.4, 1.0])
    assert pipeline.launch_s == pytest.approx(1e-4 + 2 * 1e-5), "the first stage's message is in the engine's time"


def test_stages_that_outnumber_the_cores_pay_for_it() -> None:
    assert profile().key.num_places == 2
    for counts, has_own_cores in (((6,), True), ((3, 3), True), ((2, 2, 2), False)):
        pipeline = host_pipeline(profile(), SHAPE, stages_of(counts))
        assert pipeline.host is not None
        run = profile().run if has_own_cores else profile().crowded_run
        assert (pipeline.to_stages_s, pipeline.host.core_share(9)) == (run.to_stages_s, run.core_share.at(9))
        [first, *_] = stage_times_of(profile(), SHAPE, stages_of(counts))(decodes(1, 0))
        assert first == pytest.approx(run.work.at(1) * (1e-4 + counts[0] * 1e-3 + (len(counts) == 1) * 2e-3))


def test_what_was_kept_is_found_again_and_nothing_else(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept = profile()
    assert load_host_profile(kept.key) is None
    path = save_host_profile(kept)
    assert path.is_relative_to(tmp_path) and load_host_profile(kept.key) == kept
    other = msgspec.structs.replace(kept.key, machine="Another")
    other.path.write_bytes(path.read_bytes())
    assert load_host_profile(other) is None, "measured on another machine"
    path.write_bytes(b"{}")
    assert load_host_profile(kept.key) is None
