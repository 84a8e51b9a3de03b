"""Ray on the machines of a test's network, started as users start it: `ray start --block`, one raylet a machine.

One idea: everything that Ray starts is a descendant of a process of ours or carries our folder in its command line, so
all of it can be ended, whatever became of the test.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

from tests.cluster.network import Network
from tests.pipeline.failing import wait_for_end

GCS_PORT = 6400
_ENVIRON = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_health_check_initial_delay_ms": "0",
}


class RayNodes:
    """Args: folder: Ray's own, for sockets and logs; short, as sockets' names have to be."""

    def __init__(self, network: Network, folder: str) -> None:
        self._network = network
        self._folder = folder
        self._nodes: dict[int, subprocess.Popen[str]] = {}

    @property
    def address(self) -> str:
        """Of the cluster: what RAY_ADDRESS has to be."""
        return f"{self._network.address(0)}:{GCS_PORT}"

    def start(self, machine: int, num_devices: int) -> None:
        """A raylet with so many CPUs, and what it takes for GPUs; on machine 0 the cluster begins."""
        where = ["--head", "--port", str(GCS_PORT), "--temp-dir", self._folder, "--include-dashboard=false"]
        where = where if machine == 0 else ["--address", self.address]
        words = ["start", "--block", *where, "--node-ip-address", self._network.address(machine)]
        words += ["--num-cpus", str(num_devices), "--num-gpus", str(num_devices), "--disable-usage-stats"]
        words += ["--object-store-memory", str(80 * 2**20)]
        with self._network.inside(machine):
            process = self._nodes[machine] = subprocess.Popen(
                [sys.executable, "-u", "-c", "from ray.scripts.scripts import main; main()", *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**os.environ, **_ENVIRON},
                text=True,
            )
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if "Ray runtime started" in line:
                return
        raise AssertionError(f"ray start on machine {machine} ended:\n{''.join(said)}")

    def kill(self, machine: int) -> None:
        """All of Ray on a machine and all that it started there, as if it were switched off."""
        process = self._nodes.pop(machine)
        tree = self._tree(process.pid)
        for one in [*tree, psutil.Process(process.pid)]:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
        for one in tree:
            wait_for_end(one.pid)

    def _tree(self, pid: int) -> list[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(pid).children(recursive=True)
        return []

    def close(self) -> None:
        for machine in list(self._nodes):
            self.kill(machine)
        for one in psutil.process_iter():
            with suppress(psutil.Error):
                if any(self._folder in word for word in one.cmdline()):
                    one.kill()
        shutil.rmtree(self._folder, ignore_errors=True)


@contextmanager
def ray_nodes(network: Network) -> Iterator[RayNodes]:
    made = RayNodes(network, tempfile.mkdtemp(prefix="ray-", dir="/tmp"))
    try:
        yield made
    finally:
        made.close()
