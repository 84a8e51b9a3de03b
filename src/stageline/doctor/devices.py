"""What this machine can compute on, and whether that is enough for the ranks it would run."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from stageline.doctor.finding import Finding, failed, ok, warning
from stageline.errors import ConfigError
from stageline.pipeline.host_devices import HostDevices

_LIMIT_S = 120.0


def ask_devices(device: str) -> HostDevices:
    """Of a process of its own, for torch is loaded for it. Args: device: of `--device`. Raises: ConfigError."""
    command = [sys.executable, "-m", "stageline.worker.device_report", device]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"loading torch and looking for devices took more than {_LIMIT_S:g} s; is a disk slow, or a "
                          "driver stuck?") from None  # fmt: skip
    if run.returncode != 0:
        lines = run.stderr.strip().splitlines() or [f"exit status {run.returncode}"]
        raise ConfigError(f"no stage could start here: {lines[-1]}")
    try:
        return msgspec.json.decode(run.stdout.strip().splitlines()[-1], type=HostDevices)
    except (IndexError, msgspec.DecodeError) as error:
        raise ConfigError(f"the process that looks for devices said nothing that makes sense: {error}") from None


def num_devices(devices: HostDevices, threads_per_stage: int) -> int:
    """How many ranks can compute at the same time."""
    return len(devices.free_bytes) if devices.kind == "cuda" else devices.num_cores // threads_per_stage


@dataclass(frozen=True)
class Ranks:
    """Processes that would compute on one machine.

    Args:
        count: of all stages there, and of all replicas.
        words: which flags make so many, such as `-tp 2 x 2 stages`.
        shares_layers: several of them compute each layer together.
    """

    count: int
    words: str
    shares_layers: bool


def ranks_of(per_stage: Sequence[int], stages: range, num_replicas: int) -> Ranks:
    """Args: per_stage: [stages] of the whole pipeline. stages: those on the machine."""
    here = per_stage[stages.start : stages.stop]
    words = f"{len(here)} stage{'s' if len(here) != 1 else ''}"
    if max(per_stage) > 1:
        words = f"-tp {','.join(map(str, here)) if len(set(here)) > 1 else here[0]} x {words}"
    if num_replicas > 1:
        words = f"-dp {num_replicas} x {words}"
    return Ranks(num_replicas * sum(here), words, max(per_stage) > 1)


def judge_devices(devices: HostDevices, ranks: Ranks, threads_per_stage: int, where: str = "") -> Finding:
    """Whether there are as many devices as ranks on a machine."""
    there = num_devices(devices, threads_per_stage)
    what = f"{describe(devices)}, {sum(devices.free_bytes) / 2**30:.1f} GiB free"
    if ranks.count <= there:
        return ok("devices", f"{what}, for {ranks.words}", where)
    threads = f" of {threads_per_stage} threads each" if threads_per_stage > 1 else ""
    few = f"too few: {what}, and {ranks.words} want {ranks.count}{threads}, one for each rank"
    way_out = "give a smaller -tp or -pp, or more machines (--nnodes)"
    if devices.kind == "cuda" and ranks.shares_layers:
        return failed("devices", f"{few}; {way_out}", where)
    return warning("devices", f"{few}, so they take turns: {way_out}", where)


def describe(devices: HostDevices) -> str:
    """Such as `4 CPU cores (x86_64)`."""
    if devices.kind == "cuda":
        return f"{len(devices.free_bytes)} GPU{'s' if len(devices.free_bytes) > 1 else ''} ({devices.name})"
    return f"{devices.num_cores} CPU core{'s' if devices.num_cores > 1 else ''} ({devices.name})"
