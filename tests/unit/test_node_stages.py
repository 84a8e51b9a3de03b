"""What a node starts for its head: whole stages that follow one another, or nothing."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from stageline.cluster.local_stages import check_row
from stageline.errors import FrameError
from stageline.executor.messages import WorkerConfig

FIRST = WorkerConfig(
    model="",
    stage_index=1,
    num_stages=4,
    first_layer=2,
    end_layer=4,
    dtype="float32",
    device="cpu",
    quantization="none",
    max_model_len=64,
    max_num_seqs=4,
    max_num_batched_tokens=64,
    num_threads=1,
    cores=[],
    log_level="INFO",
    socket_folder="",
    engine_address="",
    control_address="",
    ping_address="",
    input_address="tcp://127.0.0.1:1",
    output_address="tcp://127.0.0.1:2",
    num_ranks=2,
    caller_name="a1",
)


def _row(*places: tuple[int, int, int]) -> list[WorkerConfig]:
    """Args: places: stage, rank, and number of ranks of each."""
    return [replace(FIRST, stage_index=stage, rank=rank, num_ranks=count) for stage, rank, count in places]


def test_whole_stages_in_a_row_are_started() -> None:
    check_row(_row((1, 0, 2), (1, 1, 2), (2, 0, 1), (3, 0, 3), (3, 1, 3), (3, 2, 3)))


@pytest.mark.parametrize(
    "places",
    [
        [],
        [(0, 0, 1)],
        [(1, 0, 2)],
        [(1, 0, 2), (2, 0, 1)],
        [(1, 1, 2), (1, 0, 2)],
        [(1, 0, 2), (1, 1, 3), (1, 2, 3)],
        [(1, 0, 0)],
        [(1, 0, 1), (3, 0, 1)],
        [(3, 0, 1), (4, 0, 1)],
        [(1, -1, 1)],
    ],
)
def test_a_part_of_a_stage_or_a_gap_is_refused(places: list[tuple[int, int, int]]) -> None:
    with pytest.raises(FrameError):
        check_row(_row(*places))


def test_a_way_that_is_not_over_a_network_is_refused() -> None:
    with pytest.raises(FrameError, match="not over TCP"):
        check_row([replace(FIRST, num_ranks=1, output_address="ipc:///elsewhere")])
