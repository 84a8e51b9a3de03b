"""The head's one socket: what lies there is heard before anybody is gone, and a lost node is told by its cause."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from stageline.checkpoint.checkpoint import Checkpoint
from stageline.checkpoint.open import open_checkpoint
from stageline.clock import VirtualClock
from stageline.cluster.handshake import this_software
from stageline.cluster.head import Head
from stageline.cluster.membership import SILENCE_S
from stageline.cluster.messages import (
    AreYouThere,
    FromNode,
    Hello,
    Here,
    Leaving,
    Offer,
    Ready,
    StageEnded,
    ToNode,
    Welcome,
)
from stageline.config.cluster_config import ClusterConfig
from stageline.config.engine_config import EngineConfig
from stageline.errors import WorkerLost
from stageline.executor.messages import LinkAccess
from stageline.links.frames import MessageDecoder, encode_message
from stageline.links.sockets import Links
from tests.unit.checkpoint_files import write_gguf_model
from tests.unit.test_node_stages import FIRST

PATIENCE_MS = 20_000


class Node:
    """One that joins, by hand."""

    def __init__(self, links: Links, head: Head, url: str, node_id: str) -> None:
        self._head = head
        self._socket = links.caller(url, identity=f"node.{secrets.token_hex(12)}".encode())
        self._decoder: MessageDecoder[ToNode] = MessageDecoder(ToNode)
        self.node_id = node_id

    def say(self, message: FromNode) -> None:
        """Returns when it lies at the head's socket."""
        self._socket.send(encode_message(message))
        assert self._head.socket.poll(PATIENCE_MS)

    def hear(self, kind: type[Any]) -> Any:
        while self._socket.poll(PATIENCE_MS):
            if isinstance(message := self._decoder.decode(self._socket.recv()), kind):
                return message
        raise AssertionError(f"the head sent no {kind.__name__}")

    def say_hello(self) -> None:
        hello = Hello(
            software=this_software(), node_id=self.node_id, host_name=self.node_id, rank=1, num_stages=1,
            address="127.0.0.1:5", settings={},
        )  # fmt: skip
        self.say(hello)
        self._head.receive()

    def join(self) -> None:
        self.say_hello()
        self.say(Here(self.hear(AreYouThere).question, time.time()))
        self._head.receive()
        self.say(Ready(self.hear(Offer).model_digest))
        self._head.receive()
        self.hear(Welcome)


class Place:
    def __init__(self, checkpoint: Checkpoint, stack: ExitStack) -> None:
        self.clock = VirtualClock()
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        cluster = ClusterConfig(master_addr="127.0.0.1", master_port=port, nnodes=2).check()
        config = EngineConfig(model=checkpoint.path, pipeline_parallel_size=2)
        self.head = Head(config, cluster, checkpoint, LinkAccess(), self.clock)
        stack.callback(self.head.close)
        self._links = Links()
        stack.callback(self._links.close)
        self._url = f"tcp://127.0.0.1:{cluster.master_port}"

    def node(self, node_id: str) -> Node:
        return Node(self._links, self.head, self._url, node_id)

    def run(self) -> Node:
        """A node that runs stage 1."""
        node = self.node("b")
        node.join()
        self.head._shares = self.head._membership.shares()
        self.head.start([msgspec.structs.replace(FIRST, num_stages=2, num_ranks=1, caller_name="")])
        return node


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with ExitStack() as stack:
        yield Place(open_checkpoint(str(write_gguf_model(tmp_path / "m.gguf"))), stack)


def test_an_answer_that_lies_there_counts_however_late_it_is_read(place: Place) -> None:
    node = place.node("b")
    node.say_hello()
    node.say(Here(node.hear(AreYouThere).question, 0.0))
    place.clock.advance_to(10 * SILENCE_S)
    place.head.receive()
    assert list(place.head._membership.members) == [1]


def test_a_lost_node_is_told_by_its_cause(place: Place) -> None:
    node = place.run()
    assert place.head.is_machine_connected(1)
    node.say(Leaving())
    with pytest.raises(WorkerLost, match=r"stage 1 .* lost: node 1 \(b, 127.0.0.1:5; stage 1\): it was stopped"):
        place.head.receive()


def test_a_node_that_comes_back_under_another_connection_has_lost_its_stages(place: Place) -> None:
    place.run()
    again = place.node("b")
    with pytest.raises(WorkerLost, match=r"node 1 \(b, .*: it lost its connection and is back"):
        again.say_hello()


def test_a_stage_that_ended_is_told_when_its_own_words_had_time_to_come(place: Place) -> None:
    node = place.run()
    node.say(StageEnded(1, 1, "its process 7 was killed by SIGKILL"))
    assert place.head.receive() is None
    due_s = place.head.due_s()
    assert due_s is not None and 0 < due_s < 1
    place.clock.advance_to(due_s)
    with pytest.raises(WorkerLost, match=r"node 1 \(b, .*; stage 1\): its process 7 was killed by SIGKILL"):
        place.head.receive()


def test_a_clock_that_was_set_on_all_machines_is_no_nodes_fault(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    set_ahead_s = time.time() + 3600.0
    monkeypatch.setattr(time, "time", lambda: set_ahead_s)
    with caplog.at_level("INFO", "stageline"):
        place.node("b").join()
    told = [record.getMessage() for record in caplog.records]
    assert any("joined; round trip" in line for line in told)
    assert not any("clock of" in line and "wrong" in line for line in told)


def test_who_is_asked_and_has_not_answered_is_not_counted_as_there(place: Place) -> None:
    place.node("b").join()
    assert place.head._who_is_missing(4.0).startswith("2 of 2 machines are there")
    place.head._membership.ask_all(place.clock.now_s())
    assert place.head._who_is_missing(4.0).startswith("1 of 2 machines are there after 4 s, missing: rank 1;")
