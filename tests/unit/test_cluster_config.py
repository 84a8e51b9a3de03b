"""What is asked about machines: what cannot work is refused before anything starts, with the value and the way out."""

from __future__ import annotations

import argparse
import errno
import socket
from typing import Any

import msgspec
import pytest
import zmq

from stageline.cli.join import add_parser, run
from stageline.cli.main import build_parser
from stageline.cluster.ports import HeldPort, check_port
from stageline.cluster.start import check_head, link_access
from stageline.config.cluster_config import ClusterConfig
from stageline.config.engine_config import EngineConfig
from stageline.config.flags import cluster_config_from_args
from stageline.errors import ConfigError
from stageline.executor.messages import LinkAccess
from stageline.links.keys import ClusterKey
from stageline.links.sockets import Links, _words_for

HEAD = {"master_addr": "127.0.0.1", "nnodes": 2}


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"nnodes": 2}, ["--master-addr is missing"]),
        ({**HEAD, "node_rank": 2, "headless": True}, ["--node-rank is 2", "--nnodes 2", "0 to 1"]),
        ({**HEAD, "node_rank": 1}, ["--node-rank 1 without --headless"]),
        ({**HEAD, "headless": True}, ["--headless with --node-rank 0"]),
        ({**HEAD, "master_port": 70000}, ["--master-port is 70000"]),
        ({**HEAD, "join_timeout_s": 0.0}, ["--join-timeout is 0"]),
        ({**HEAD, "port_range": "5-1"}, ["--port-range is '5-1'", "30000-30010"]),
        ({**HEAD, "stages": 0}, ["--stages is 0"]),
        ({"on_worker_lost": "hope"}, ["--on-worker-lost is 'hope'", "fail, wait"]),
    ],
)
def test_what_cannot_work_is_refused(asked: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        ClusterConfig(**asked).check()
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("engine", "cluster", "words"),
    [
        ({"pipeline_parallel_size": 1}, HEAD, ["--pipeline-parallel-size 1", "2 machines", "-pp 2"]),
        ({"pipeline_parallel_size": 2}, {**HEAD, "stages": 2}, ["--stages is 2", "at most 1"]),
        (
            {"pipeline_parallel_size": 2},
            {**HEAD, "master_port": 29876, "port_range": "29870-29880"},
            ["--port-range 29870-29880", "--master-port 29876"],
        ),
        ({"distributed_executor_backend": "in_process"}, HEAD, ["in_process"]),
        ({"pipeline_parallel_size": 2}, {**HEAD, "master_addr": "10.77.99.1"}, ["10.77.99.1", "--cluster-key-file"]),
        ({"pipeline_parallel_size": 2}, {**HEAD, "master_addr": "no.such.invalid"}, ["--master-addr no.such.invalid"]),
    ],
)
def test_a_head_that_could_not_run_is_refused(
    engine: dict[str, Any], cluster: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        check_head(EngineConfig(model="m", **engine), ClusterConfig(**cluster).check(), LinkAccess())
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_port_that_is_in_use_is_refused_and_a_range_is_searched_for_a_free_one() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        cluster = ClusterConfig(**HEAD, master_port=port).check()
        with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1 is in use.*--master-port"):
            check_head(EngineConfig(model="m", pipeline_parallel_size=2), cluster, LinkAccess())
        with pytest.raises(ConfigError, match="--port-range"):
            HeldPort("127.0.0.1", range(port, port + 1))
        engine = EngineConfig(model="m", pipeline_parallel_size=2)
        with pytest.raises(ConfigError, match=f"--port and --master-port are both {port}: .*give two"):
            check_head(engine, cluster, LinkAccess(), api_port=port)
        ranged = ClusterConfig(**HEAD, master_port=_free_port(), port_range=str(port)).check()
        for api_port, words in ((None, f"ports {port} to {port} of 127.0.0.1 are all in use"), (port, "is --port")):
            with pytest.raises(ConfigError, match=f"{words}.*range"):
                check_head(engine, ranged, LinkAccess(), api_port=api_port)
    first = HeldPort("127.0.0.1", range(port, port + 1))
    # Held, and not listened on: another machine's agent passes it by, a stage's socket may have it.
    second = HeldPort("127.0.0.1", range(port, port + 50))
    assert second.address.port > port
    with pytest.raises(ConfigError, match="all in use"):
        HeldPort("127.0.0.1", range(port, port + 1))
    links = Links()
    links.receiver(first.address.url)
    links.close()
    first.close()
    second.close()


def _as_a_user(monkeypatch: pytest.MonkeyPatch, first_free: int) -> None:
    """Let the system refuse ports below one, as it does to who is not root."""
    bind = socket.socket.bind

    def bind_as_user(self: socket.socket, address: tuple[str, int]) -> None:
        if address[1] < first_free:
            raise PermissionError(errno.EACCES, "Permission denied")
        bind(self, address)

    monkeypatch.setattr(socket.socket, "bind", bind_as_user)


def test_a_port_that_needs_privileges_is_told_as_that(monkeypatch: pytest.MonkeyPatch) -> None:
    _as_a_user(monkeypatch, 1024)
    engine = EngineConfig(model="m", pipeline_parallel_size=2)
    for cluster, flag in (({"master_port": 80}, "--master-port"), ({"port_range": "80-90"}, "--port-range")):
        asked = ClusterConfig(**HEAD, **cluster).check()
        with pytest.raises(ConfigError, match=f"below 1024 need privileges; .*{flag}") as caught:
            check_head(engine, asked, LinkAccess())
        assert "in use" not in str(caught.value)
    words = _words_for("tcp://127.0.0.1:80", zmq.ZMQError(errno.EACCES))
    assert "below 1024 need privileges" in words and "in use" not in words
    _as_a_user(monkeypatch, 40_000)
    with pytest.raises(ConfigError, match=r"port 30000 .*: this system does not permit it"):
        check_port("127.0.0.1", 30_000, "--master-port")


def test_a_range_is_searched_beyond_the_ports_that_need_privileges(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        _as_a_user(monkeypatch, port)
        with pytest.raises(ConfigError, match=f"up to {port - 1} they cannot be listened on.*the others are in use"):
            HeldPort("127.0.0.1", range(port - 2, port + 1))
    held = HeldPort("127.0.0.1", range(port - 2, port + 50))
    assert held.address.port >= port
    held.close()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def test_ranks_are_given_for_all_stages_or_for_each() -> None:
    assert EngineConfig(model="m", tensor_parallel_size=2).check().ranks_per_stage == (2,)
    assert EngineConfig(model="m", pipeline_parallel_size=3, tensor_parallel_size="2,1,1").ranks_per_stage == (2, 1, 1)
    assert EngineConfig(model="m", pipeline_parallel_size=3, tensor_parallel_size="2").ranks_per_stage == (2, 2, 2)


@pytest.mark.parametrize(
    ("sizes", "others", "reason"),
    [
        ("2,1", {"pipeline_parallel_size": 3}, "has 2 numbers for 3 stages; give 1 or 3"),
        ("0", {}, "give a number of at least 1"),
        ("two", {}, "give a number of at least 1"),
        ("2", {"distributed_executor_backend": "in_process"}, "in_process runs all in one process"),
    ],
)
def test_ranks_that_cannot_work_are_refused(sizes: str, others: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        EngineConfig(model="m", tensor_parallel_size=sizes, **others).check()


def test_vllms_flags_are_understood() -> None:
    words = "serve m -tp 1 -pp 2 --nnodes 2 --node-rank 1 --master-addr 10.0.0.1 --master-port 29501 --headless"
    cluster = cluster_config_from_args(build_parser().parse_args(words.split()))
    assert cluster == ClusterConfig(
        nnodes=2, node_rank=1, master_addr="10.0.0.1", master_port=29501, headless=True
    )
    assert cluster.is_spread and cluster.ports.start == 29502


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--distributed-executor-backend ray", "ray starts the stages on other machines itself; leave --headless out"),
        ("--master-addr 127.0.0.1 --node-rank 1 -dp 2", "-dp 2: .* a balancer before them"),
    ],
)
def test_headless_with_what_makes_no_sense_is_refused_with_the_way_out(words: str, reason: str) -> None:
    args = build_parser().parse_args(f"serve m -pp 2 --headless {words}".split())
    with pytest.raises(ConfigError, match=reason):
        args.run(args)


@pytest.mark.parametrize("head", ["", ":1", "a:b", "a:0", "a:99999", "[::1]x"])
def test_join_wants_a_head(head: str) -> None:
    commands = argparse.ArgumentParser().add_subparsers()
    add_parser(commands)
    with pytest.raises(ConfigError, match="HEAD:PORT"):
        run(commands.choices["join"].parse_args([head]))


def test_a_key_is_used_and_never_shown(tmp_path: Any) -> None:
    key = ClusterKey.new()
    (tmp_path / "key").touch(mode=0o600)
    (tmp_path / "key").write_text(key.text())
    access = link_access(ClusterConfig(**HEAD, cluster_key_file=str(tmp_path / "key")), is_insecure=False)
    assert access.key == key.text() and key.text() not in repr(access)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(access), type=LinkAccess).security() is not None
    assert link_access(ClusterConfig(**HEAD), is_insecure=False).security() is None
