"""What a stage tells of a link that broke: whom it led to, once, and only after others had the time to say more."""

from __future__ import annotations

import select

import msgspec
import pytest

from stageline.clock import VirtualClock
from stageline.executor.messages import WorkerConfig
from stageline.worker.broken_links import GRACE_S, BrokenLinks, neighbour_at

NEXT = "tcp://10.0.0.2:0;10.0.0.3:29501"
FIRST = "tcp://10.0.0.1:29501"
HEAD = "tcp://10.0.0.1:29500"
OF = {"stage_index": 1, "output_address": NEXT, "token_output_address": FIRST, "engine_address": HEAD}


@pytest.fixture
def config() -> WorkerConfig:
    needed = [field for field in msgspec.structs.fields(WorkerConfig) if field.required]
    nothing = {field.name: {int: 0, list[int]: []}.get(field.type, "") for field in needed}
    return WorkerConfig(**{**nothing, **OF})


def test_a_break_is_told_once_and_late(config: WorkerConfig) -> None:
    clock = VirtualClock()
    broken = BrokenLinks(config, clock)
    assert not select.select([broken.fd], [], [], 0)[0]
    broken.on_broken(NEXT)
    broken.on_broken(HEAD)
    assert select.select([broken.fd], [], [], 0)[0] and broken.take_due() is None
    broken.heard()
    assert not select.select([broken.fd], [], [], 0)[0] and broken.due_s == GRACE_S
    assert broken.take_due() is None
    clock.advance_to(GRACE_S)
    assert broken.take_due() == "its link to stage 2, at 10.0.0.3:29501, broke"
    assert broken.take_due() is None and broken.due_s is None


def test_neighbours_are_known_by_where_links_lead(config: WorkerConfig) -> None:
    words = [neighbour_at(config, address).split(",")[0] for address in (NEXT, FIRST, HEAD)]
    assert words == ["stage 2", "stage 0", "the head"]
