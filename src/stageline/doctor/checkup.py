"""The whole look: this machine, the model, other machines, in the order in which a start would stumble."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from stageline.cluster.handshake import HandshakeError, share_stages
from stageline.doctor.devices import ask_devices, judge_devices, ranks_of
from stageline.doctor.finding import Finding, failed, skipped
from stageline.doctor.links import TYPICAL_NEED, need_of
from stageline.doctor.machine import check_cluster, check_machine
from stageline.doctor.model import check_memory, check_model
from stageline.doctor.patient import Asked, Model
from stageline.doctor.peers import PeerCheck
from stageline.doctor.ray import look_at_ray
from stageline.errors import ConfigError
from stageline.pipeline.host_devices import HostDevices

OnFinding = Callable[[Finding], None]


class CheckUp:
    """Args: on_finding: hears of each as soon as it is known."""

    def __init__(self, asked: Asked, on_finding: OnFinding) -> None:
        self._asked = asked
        self._on_finding = on_finding
        self.findings: list[Finding] = []

    def run(self, peers: Sequence[str]) -> None:
        """Look at all there is. Args: peers: other machines that listen."""
        asked = self._asked
        self._tell(check_machine(asked))
        try:
            devices = ask_devices(asked.engine.device)
        except ConfigError as error:
            devices = None
            self._tell([failed("devices", str(error))])
        model = self._look_at_model()
        if asked.engine.distributed_executor_backend == "ray":
            # It alone knows the machines, and counts their devices.
            self._tell([look_at_ray(asked)])
            return
        shares: Mapping[int, int] = self._expected_shares(len(peers))
        known = {} if devices is None else {asked.own_rank: devices}
        if asked.cluster.is_spread or peers:
            shares = self._look_at_machines(peers, model, known) or shares
        self._look_at_room(model, shares, known)

    def _look_at_room(self, model: Model | None, shares: Mapping[int, int], known: Mapping[int, HostDevices]) -> None:
        """Devices and memory for what would run on each machine."""
        asked = self._asked
        try:
            per_stage = asked.engine.ranks_per_stage
        except ConfigError:
            return  # told as `flags`
        first = 0
        for rank, num_stages in sorted(shares.items()):
            if (devices := known.get(rank)) is not None:
                ranks = ranks_of(per_stage, range(first, first + num_stages), asked.serve.data_parallel_size)
                where = "" if rank == asked.own_rank else f"node {rank}"
                self._tell([judge_devices(devices, ranks, asked.engine.threads_per_stage, where)])
            first += num_stages
        if model is not None and asked.is_head and shares:
            self._tell([check_memory(asked, model, shares, known)])

    def _tell(self, findings: Sequence[Finding]) -> None:
        self.findings += findings
        for finding in findings:
            self._on_finding(finding)

    def _look_at_model(self) -> Model | None:
        if not self._asked.has_model:
            self._tell([skipped("weights", "no MODEL was given: weights, layers and memory are not looked at")])
            return None
        try:
            self._asked.engine.check()
        except ConfigError:
            return None  # told as `flags`
        findings, model = check_model(self._asked)
        self._tell(findings)
        return model

    def _expected_shares(self, num_peers: int) -> Mapping[int, int]:
        """Stages by rank before anybody was asked; empty if the numbers do not fit."""
        cluster, num_stages = self._asked.cluster, self._asked.engine.pipeline_parallel_size
        num_nodes = (cluster.nnodes or num_peers + 1) if cluster.is_spread else 1
        wanted: dict[int, int | None] = dict.fromkeys(range(num_nodes), None)
        wanted[self._asked.own_rank] = cluster.stages if cluster.is_spread else num_stages
        try:
            return share_stages(wanted, num_stages)
        except HandshakeError as error:
            self._tell([failed(error.step, error.reason)])
            return {}

    def _look_at_machines(
        self, peers: Sequence[str], model: Model | None, known: dict[int, HostDevices]
    ) -> Mapping[int, int]:
        """Returns: stages by rank; empty if nobody was asked, or not all would be there."""
        findings, security = check_cluster(self._asked)
        self._tell(findings)
        if not peers or any(finding.check == "key" and finding.status == "failed" for finding in findings):
            return {}
        is_cpu = all(devices.kind == "cpu" for devices in known.values())
        need = TYPICAL_NEED if model is None else need_of(self._asked.engine, model, is_cpu)
        report = PeerCheck(self._asked, model, need, security).run(peers)
        self._tell(report.findings)
        known |= report.devices
        return report.shares
