"""The doctor finds what only the machines themselves can show: who reaches whom, in both directions."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from stageline.cli.main import main
from stageline.config.cluster_config import ClusterConfig
from stageline.config.engine_config import EngineConfig
from stageline.config.serve_config import ServeConfig
from stageline.doctor.finding import Finding
from stageline.doctor.patient import Asked
from stageline.doctor.peer import Peer
from stageline.links.key_file import given_security
from stageline.links.tcp_address import TcpAddress
from stageline.pipeline.host_devices import HostDevices
from tests.cluster.network import Network
from tests.server.served import wait_until

PORT = 29900
CPU = HostDevices("cpu", 4, [2**33], "x86_64")


def test_a_machine_that_is_reached_and_does_not_reach_back_is_told_by_name(
    network: Network,
    tiny_model: str,
    key_file: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The head's address is on a cable that only machine 2 is at; machine 1 is on the switch."""
    for name in ("STAGELINE_INTERFACE", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("stageline.doctor.checkup.ask_devices", lambda _: CPU)
    asked = Asked(EngineConfig(model=tiny_model), ClusterConfig(), ServeConfig(), has_model=True)
    security = given_security(str(key_file), is_insecure=False)
    with network.second_link((0, 2)) as (head, _), ExitStack() as stack:
        for machine in (1, 2):
            with network.inside(machine):
                peer = Peer(TcpAddress(network.address(machine), PORT + 1), asked, security, CPU)
                stack.callback(peer.close)
        with network.inside(0):
            wait_until(lambda: psutil.net_if_stats()["eth1"].isup)
            status = main([
                "doctor", tiny_model, "-pp", "3", "--nnodes", "3", "--master-addr", head, "--master-port", str(PORT),
                "--cluster-key-file", str(key_file), "--port", "0", "--json",
                "--peers", network.address(1), network.address(2),
            ])  # fmt: skip
    found = [Finding(**one) for one in json.loads(capsys.readouterr().out)]
    failed = {(one.check, one.where): one.message for one in found if one.status == "failed"}
    assert status == 1 and set(failed) == {("way back", network.address(1))}, failed
    assert f"let TCP port {PORT} through" in failed["way back", network.address(1)]
    words = "\n".join(one.message for one in found)
    assert "node 1 to node 2: " in words and "come back from node 2 to node 0" in words
