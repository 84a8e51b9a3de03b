"""What a node starts for its head: whole stages that follow one another, or nothing; and what it leaves behind."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from msgspec.structs import replace

from stageline.checkpoint.digest import model_digest
from stageline.checkpoint.open import open_checkpoint
from stageline.cluster import node as node_module
from stageline.cluster import places as places_module
from stageline.cluster import probe
from stageline.cluster.local_stages import check_row
from stageline.cluster.messages import (
    MOST_PATIENCE_S,
    AreYouThere,
    EndStages,
    FindWay,
    FromNode,
    Hello,
    Here,
    Offer,
    Ready,
    StageEnded,
    StartStages,
    ToNode,
)
from stageline.cluster.node import NodeSettings, _Node, run_node
from stageline.errors import ConfigError, FrameError
from stageline.executor.messages import LinkAccess, WorkerConfig
from stageline.links.frames import MessageDecoder, encode_message
from stageline.links.sockets import Links, Socket, bound_address
from stageline.links.tcp_address import TcpAddress
from tests.unit.checkpoint_files import write_gguf_model

PATIENCE_MS = 20_000

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


@pytest.fixture
def node(tmp_path: Path) -> Iterator[tuple[_Node, Links, Socket, int]]:
    """A node, and its head by hand: the head's sockets, the one that hears the node, and what wakes it at a signal."""
    head = Links()
    listener = head.listener("tcp://127.0.0.1:0")
    asked = NodeSettings(
        head="127.0.0.1", port=TcpAddress.parse(bound_address(listener)).port, ports=range(29501, 29600),
        access=LinkAccess(), join_timeout_s=60.0, settings={},
    )  # fmt: skip
    reader, writer = os.pipe()
    node = _Node(asked, reader)
    try:
        node._connect()
        yield node, head, listener, writer
    finally:
        node.close()
        head.close()
        os.close(reader)
        os.close(writer)


@pytest.mark.parametrize("farewell", ["a signal", "its head leaves"])
def test_a_node_that_measures_ways_hears_everything_else(
    node: tuple[_Node, Links, Socket, int], farewell: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "_REACH_S", 4 * PATIENCE_MS / 1000)
    agent, head, listener, bell = node
    heard: list[bytes] = []

    def play_head(silent: socket.socket) -> None:
        name, _ = listener.recv_multipart()
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        listener.send_multipart([name, encode_message(FindWay(1, [address], 1000))])
        silent.accept()[0].detach()
        listener.send_multipart([name, encode_message(AreYouThere(7))])
        if listener.poll(PATIENCE_MS):
            heard.append(listener.recv_multipart()[1])
        if farewell == "a signal":
            agent.stop(signal.SIGTERM, None)
            os.write(bell, b"\0")
        else:
            head.close()

    with socket.create_server(("127.0.0.1", 0)) as silent, ThreadPoolExecutor(1) as pool:
        agent._send(agent._hello())
        playing = pool.submit(play_head, silent)
        began_s = time.monotonic()
        agent._serve()
        agent.close()
        assert time.monotonic() - began_s < PATIENCE_MS / 1000
        playing.result()
    answers: MessageDecoder[FromNode] = MessageDecoder(FromNode)
    assert [type(answers.decode(frame)) for frame in heard] == [Here]


def test_a_node_that_opens_its_model_for_long_can_be_stopped(
    node: tuple[_Node, Links, Socket, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be downloaded for it, by a library that knows nothing of the node's signals."""
    agent, _, listener, _ = node

    def download(_model: str) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("it went on")

    monkeypatch.setattr(node_module, "open_checkpoint", download)
    before = signal.signal(signal.SIGTERM, agent.stop)
    try:
        agent._send(agent._hello())
        name, _ = listener.recv_multipart()
        listener.send_multipart([name, encode_message(Offer(model="org/model", model_digest="1"))])
        assert not agent._join(deadline_s=time.monotonic() + 60)
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("moving", ["the node", "its head"])
def test_who_comes_back_at_another_address_is_found_there(
    node: tuple[_Node, Links, Socket, int], moving: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, head, listener, bell = node
    port = TcpAddress.parse(bound_address(listener)).port
    elsewhere = head.listener(f"tcp://127.0.0.2:{port}")
    places = {"own": "127.0.0.1", "head.test": "127.0.0.1"}
    monkeypatch.setattr(places_module, "own_address_towards", lambda _: places["own"])
    monkeypatch.setattr(places_module, "resolve", lambda name, _: places[name])
    agent._places = places_module.Places("head.test", port, None, None)
    told: list[Hello] = []

    def play_head() -> None:
        hellos: MessageDecoder[FromNode] = MessageDecoder(FromNode)
        try:
            assert listener.poll(PATIENCE_MS)
            told.append(hellos.decode(listener.recv_multipart()[1]))
            places["own" if moving == "the node" else "head.test"] = "127.0.0.2"
            where = listener if moving == "the node" else elsewhere
            assert where.poll(PATIENCE_MS)
            told.append(hellos.decode(where.recv_multipart()[1]))
        finally:
            agent.stop(signal.SIGTERM, None)
            os.write(bell, b"\0")

    with ThreadPoolExecutor(1) as pool:
        playing = pool.submit(play_head)
        agent.run()
        playing.result()
    assert [hello.node_id for hello in told] == [agent._node_id] * 2
    hosts = [TcpAddress.parse(hello.address).host for hello in told]
    assert hosts == ["127.0.0.1", "127.0.0.2" if moving == "the node" else "127.0.0.1"]


def test_a_node_that_can_start_no_process_tells_its_head_and_stays(
    node: tuple[_Node, Links, Socket, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    agent, _, listener, _ = node
    address = f"tcp://{agent._port.address}"
    monkeypatch.setattr(subprocess, "Popen", refuse)
    agent._start_stages(StartStages(7, [replace(FIRST, num_ranks=1, input_address=address)]))
    assert listener.poll(PATIENCE_MS)
    said = MessageDecoder[FromNode](FromNode).decode(listener.recv_multipart()[1])
    assert isinstance(said, StageEnded) and (said.pipeline, said.stage_index) == (7, 1)
    assert "Resource temporarily unavailable" in said.how and "ulimit" in said.how
