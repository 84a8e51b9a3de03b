"""What a node starts for its head: whole stages that follow one another, or nothing; and what it leaves behind."""

from __future__ import annotations

import signal
import tempfile
from pathlib import Path

import pytest
from msgspec.structs import replace

from stageline.checkpoint.digest import model_digest
from stageline.checkpoint.open import open_checkpoint
from stageline.cluster.local_stages import check_row
from stageline.cluster.messages import MOST_PATIENCE_S, EndStages, Offer, Ready, ToNode
from stageline.cluster.node import NodeSettings, _Node, run_node
from stageline.errors import ConfigError, FrameError
from stageline.executor.messages import LinkAccess, WorkerConfig
from stageline.links.frames import MessageDecoder, encode_message
from tests.unit.checkpoint_files import write_gguf_model

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


def test_no_stage_of_a_node_listens_where_the_head_says_on_its_disk(tmp_path: Path) -> None:
    with pytest.raises(FrameError, match="shall get tokens at"):
        check_row([replace(FIRST, num_ranks=1, token_input_address=f"ipc://{tmp_path}/x")])


@pytest.mark.parametrize("patience_s", [-1.0, MOST_PATIENCE_S + 1, float("inf"), float("nan")])
def test_a_node_is_not_made_deaf_for_longer_than_agreed(patience_s: float) -> None:
    decoder: MessageDecoder[ToNode] = MessageDecoder(ToNode)
    assert decoder.decode(encode_message(EndStages(2.0))) == EndStages(2.0)
    with pytest.raises(FrameError):
        decoder.decode(encode_message(EndStages(patience_s)))


def test_a_node_that_cannot_start_leaves_no_folder_and_signals_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    # An address of documentation: found out before anything is sent.
    asked = NodeSettings(
        head="192.0.2.1", port=29500, ports=range(29501, 29510), access=LinkAccess(is_insecure=True),
        join_timeout_s=1.0, interface="=no-such", settings={},
    )  # fmt: skip
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ConfigError, match="no-such"):
        run_node(asked)
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is handler
    assert signal.set_wakeup_fd(-1) == -1


def test_a_head_that_comes_back_with_another_model_is_followed(tmp_path: Path) -> None:
    models = [
        open_checkpoint(str(write_gguf_model(tmp_path / f"{has_head}.gguf", has_head=has_head)))
        for has_head in (True, False)
    ]
    asked = NodeSettings(
        head="127.0.0.1", port=29500, ports=range(29501, 29600), access=LinkAccess(), join_timeout_s=1.0, settings={}
    )
    node, said = _Node(asked, signal_fd=-1), []
    try:
        node._connect()
        node._send = said.append
        for model in models:
            node._take_offer(Offer(model=model.path, model_digest=model_digest(model)))
    finally:
        node.close()
    assert said == [Ready(model_digest(model)) for model in models] and said[0] != said[1]
