"""Everything an operator can ask about the machines of a pipeline, with the defaults and the words of `--help`."""

from __future__ import annotations

from dataclasses import dataclass

from stageline.config.settings import at_least, check_types, flag_of, one_of, setting
from stageline.errors import ConfigError

DEFAULT_CLUSTER_PORT = 29500
ON_WORKER_LOST = ("fail", "wait")
MODEL_SOURCES = ("local", "peer")
HIGHEST_PORT = 65535
_GROUP = "machines"


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """What was asked for. `check()` refuses what cannot work whatever the other machines are."""

    nnodes: int | None = setting(
        None, "number of machines (default: one; with --master-addr as many as bring all the stages)", group=_GROUP,
        metavar="MACHINES",
    )
    node_rank: int = setting(
        0, "this machine's place in the pipeline; 0 is the head, which serves the API", group=_GROUP, metavar="RANK"
    )
    master_addr: str | None = setting(
        None, "the head's address, by number or name; on the head it is the one to listen on for the other machines",
        group=_GROUP, metavar="ADDRESS",
    )
    master_port: int = setting(
        DEFAULT_CLUSTER_PORT, "the head's TCP port for the other machines", group=_GROUP, metavar="PORT"
    )
    headless: bool = setting(
        False, "bring this machine's stages to the head instead of serving an API", group=_GROUP
    )
    stages: int | None = setting(
        None, "how many of the stages run on this machine (default: an equal share)", group=_GROUP
    )
    node_address: str | None = setting(
        None, "this machine's address for the other ones (default: the one that it reaches the head from)",
        group=_GROUP, metavar="ADDRESS",
    )
    interface: str | None = setting(
        None, "interfaces that activations may use, as NCCL_SOCKET_IFNAME names them: eth,ib are beginnings of names, "
        "=eth0 is one, ^docker all but those; the best is taken (default: the variable STAGELINE_INTERFACE or "
        "NCCL_SOCKET_IFNAME, or else all)", group=_GROUP, metavar="NAMES",
    )
    port_range: str | None = setting(
        None, "TCP ports of which this machine takes one, for activations, such as 30000-30010 (default: the next free "
        "one behind the head's port)", group=_GROUP, metavar="FIRST-LAST",
    )
    cluster_key_file: str | None = setting(
        None, "file with the key that protects the links between machines, the same on every one; the variables "
        "STAGELINE_CLUSTER_KEY_FILE and STAGELINE_CLUSTER_KEY do the same", group=_GROUP, metavar="FILE",
    )
    model_source: str = setting(
        "local",
        "where a machine that brings stages finds the model: local is its own disk; with peer the machines that have "
        "it send the layers that its stages need, and they are kept in the cache folder, see `stageline cache`",
        choices=MODEL_SOURCES,
        group=_GROUP,
    )
    join_timeout_s: float = setting(
        600.0, "how long to wait for the other machines", flags=("--join-timeout",), group=_GROUP, metavar="SECONDS"
    )
    on_worker_lost: str = setting(
        "fail", "what becomes of requests when a stage is lost: fail answers them with status 503, wait keeps them "
        "until the pipeline is complete again", choices=ON_WORKER_LOST, group=_GROUP,
    )

    @property
    def is_spread(self) -> bool:
        """More than this machine takes part."""
        return self.headless or self.master_addr is not None or (self.nnodes or 1) > 1

    @property
    def ports(self) -> range:
        """Those that activations may arrive at."""
        if self.port_range is None:
            return range(self.master_port + 1, min(self.master_port + 100, HIGHEST_PORT) + 1)
        return parse_port_range(self.port_range)

    def check(self) -> ClusterConfig:
        """Return self, or raise ConfigError naming the first setting that cannot work."""
        check_types(self)
        for name in ("nnodes", "stages"):
            if (value := getattr(self, name)) is not None:
                at_least(name, value, 1)
        at_least("node_rank", self.node_rank, 0)
        if not 1 <= self.master_port < HIGHEST_PORT:
            raise ConfigError(f"--master-port is {self.master_port}; it must be between 1 and {HIGHEST_PORT - 1}")
        if not self.join_timeout_s > 0:
            raise ConfigError(f"{flag_of('join_timeout')} is {self.join_timeout_s}; it must be above 0 seconds")
        one_of("on_worker_lost", self.on_worker_lost, ON_WORKER_LOST)
        one_of("model_source", self.model_source, MODEL_SOURCES)
        if self.port_range is not None:
            parse_port_range(self.port_range)
        self._check_roles()
        return self

    def _check_roles(self) -> None:
        if self.nnodes is not None and self.node_rank >= self.nnodes:
            raise ConfigError(
                f"--node-rank is {self.node_rank} of --nnodes {self.nnodes}; ranks count from 0 to {self.nnodes - 1}"
            )
        if self.is_spread and self.master_addr is None:
            raise ConfigError(
                "--master-addr is missing: give the head's address, the same on every machine, such as 10.0.0.1"
            )
        if self.headless and self.node_rank == 0:
            raise ConfigError("--headless with --node-rank 0: the head serves the API; give this machine its own rank")
        if self.node_rank > 0 and not self.headless:
            raise ConfigError(
                f"--node-rank {self.node_rank} without --headless: only the head, rank 0, serves the API; add it"
            )


def parse_port_range(text: str) -> range:
    """Of `30000-30010`, or of one port. Raises: ConfigError."""
    first, _, last = text.partition("-")
    last = last or first
    if not (first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last) <= HIGHEST_PORT):
        raise ConfigError(f"--port-range is {text!r}; give a port or a first and a last one, such as 30000-30010")
    return range(int(first), int(last) + 1)
