"""What a stage tells of a link that broke: whom it led to, once."""

from __future__ import annotations

import select

import msgspec
import pytest

from stageline.executor.messages import WorkerConfig
from stageline.worker.broken_links import BrokenLinks, neighbour_at

NEXT = "tcp://10.0.0.2:0;10.0.0.3:29501"
FIRST = "tcp://10.0.0.1:29501"
HEAD = "tcp://10.0.0.1:29500"
OF = {"stage_index": 1, "output_address": NEXT, "token_output_address": FIRST, "engine_address": HEAD}


@pytest.fixture
def config() -> WorkerConfig:
    needed = [field for field in msgspec.structs.fields(WorkerConfig) if field.required]
    nothing = {field.name: {int: 0, list[int]: []}.get(field.type, "") for field in needed}
    return WorkerConfig(**{**nothing, **OF})


def test_a_break_is_told_once(config: WorkerConfig) -> None:
    broken = BrokenLinks(config)
    assert not select.select([broken.fd], [], [], 0)[0]
    broken.on_broken(NEXT)
    broken.on_broken(HEAD)
    assert select.select([broken.fd], [], [], 0)[0]
    told = broken.take()
    assert told is not None and (told.stage_index, told.link_to) == (1, 2)
    assert told.message == "its link to stage 2, at 10.0.0.3:29501, broke"
    assert not select.select([broken.fd], [], [], 0)[0]
    broken.on_broken(FIRST)
    assert broken.take() is None


def test_neighbours_are_known_by_where_links_lead(config: WorkerConfig) -> None:
    found = [neighbour_at(config, address) for address in (NEXT, FIRST, HEAD)]
    assert [stage_index for stage_index, _ in found] == [2, 0, None]
    assert [words.split(",")[0] for _, words in found] == ["stage 2", "stage 0", "the head"]
