"""Which part of a machine each of several equal pipelines has: CPU cores, GPUs, memory for its KV cache.

One idea: parts are even and none is shared, so that replicas do not take turns; where that cannot be, it is refused
with numbers before anything starts, or said where it only costs speed.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from stageline.config import environment
from stageline.config.engine_config import EngineConfig
from stageline.engine.messages import ReplicaPlace
from stageline.errors import ConfigError
from stageline.executor.stage_processes import available_cores
from stageline.kv.kv_plan import parse_kv_cache_memory

_DEVICE_NODES = Path("/dev")
_T = TypeVar("_T")


@dataclass(frozen=True)
class Machine:
    """Args:
    cores: CPU cores that may be used; None if the system does not tell.
    cuda_devices: names of GPUs that may be used.
    """

    cores: list[int] | None
    cuda_devices: list[str]

    @classmethod
    def here(cls) -> Machine:
        visible = environment.cuda_visible_devices()
        if visible is None:
            numbers = [path.name.removeprefix("nvidia") for path in _DEVICE_NODES.glob("nvidia[0-9]*")]
            visible = sorted((number for number in numbers if number.isdecimal()), key=int)
        return cls(available_cores(), visible)


@dataclass(frozen=True)
class Replicas:
    """Args:
    engine: what each of them runs.
    places: one per replica; None where there is nothing to divide.
    topology: for an operator, one line.
    """

    engine: EngineConfig
    places: tuple[ReplicaPlace | None, ...]
    topology: str


def divide(engine: EngineConfig, num_replicas: int, machine: Machine) -> Replicas:
    """The parts of a machine. Raises: ConfigError if there are not enough of them."""
    num_ranks = sum(engine.ranks_per_stage)
    topology = _topology(engine, num_replicas, num_ranks)
    if num_replicas == 1:
        return Replicas(engine, (None,), topology)
    if engine.device == "cuda" or (engine.device == "auto" and machine.cuda_devices):
        places = _divide_devices(num_replicas, num_ranks, machine.cuda_devices)
        told = "; ".join(f"replica {index} on GPU {','.join(one.cuda_devices)}" for index, one in enumerate(places))
        return Replicas(engine, places, f"{topology}; {told}")
    return _divide_cores(_with_part_of_memory(engine, num_replicas), num_replicas, num_ranks, machine, topology)


def _divide_devices(num_replicas: int, num_ranks: int, devices: Sequence[str]) -> tuple[ReplicaPlace, ...]:
    parts = _even_parts(devices, num_replicas)
    if len(parts[0]) < num_ranks:
        most = len(devices) // num_ranks
        way_out = f"at most {most} replicas" if most else f"stages and ranks for {len(devices)} GPUs"
        raise ConfigError(
            f"--data-parallel-size is {num_replicas} with {num_ranks} {_processes(num_ranks)} each, which is "
            f"{num_replicas * num_ranks} GPUs, but there are {len(devices)}; give {way_out}, or --device cpu"
        )
    return tuple(ReplicaPlace([], names[:num_ranks]) for names in parts)


def _divide_cores(
    engine: EngineConfig, num_replicas: int, num_ranks: int, machine: Machine, topology: str
) -> Replicas:
    threads, num_cores = engine.threads_per_stage, len(machine.cores or ()) or os.cpu_count() or 1
    if num_replicas * threads > num_cores:
        most = num_cores // threads
        way_out = f"at most {most} replicas" if most else f"at most {num_cores} threads"
        raise ConfigError(
            f"--data-parallel-size is {num_replicas} and --threads-per-stage is {threads}, which is at least "
            f"{num_replicas * threads} CPU cores, but there are {num_cores}; give {way_out}"
        )
    parts = _even_parts(machine.cores or [], num_replicas)
    if len(parts[0]) < num_ranks * threads:
        topology += f"; their {num_replicas * num_ranks} processes take turns on {num_cores} CPU cores"
        return Replicas(replace(engine, bind_cores=False), (None,) * num_replicas, topology)
    if not engine.bind_cores:
        return Replicas(engine, (None,) * num_replicas, topology)
    told = "; ".join(f"replica {index} on cores {_spans(cores)}" for index, cores in enumerate(parts))
    return Replicas(engine, tuple(ReplicaPlace(cores, []) for cores in parts), f"{topology}; {told}")


def take_place(place: ReplicaPlace | None) -> None:
    """Keep this process, and those that it will start, to its part of the machine."""
    if place is not None and place.cores:
        os.sched_setaffinity(0, place.cores)
    if place is not None and place.cuda_devices:
        environment.show_cuda_devices(place.cuda_devices)


def _topology(engine: EngineConfig, num_replicas: int, num_ranks: int) -> str:
    ranks = set(engine.ranks_per_stage)
    tensor = f"{max(ranks)}" if len(ranks) == 1 else f"({','.join(map(str, engine.ranks_per_stage))})"
    total = num_replicas * num_ranks
    return (
        f"data parallel {num_replicas} x pipeline parallel {engine.pipeline_parallel_size} x tensor parallel {tensor} "
        f"= {total} {_processes(total)}"
    )


def _processes(count: int) -> str:
    return "process" if count == 1 else "processes"


def _even_parts(things: Sequence[_T], num_parts: int) -> list[list[_T]]:
    """Equally many for each, neighbours together; what does not divide is left over."""
    size = len(things) // num_parts
    return [list(things[index * size : (index + 1) * size]) for index in range(num_parts)]


def _with_part_of_memory(engine: EngineConfig, num_replicas: int) -> EngineConfig:
    """A fraction is of memory that all replicas share; a number of bytes is per replica."""
    asked = parse_kv_cache_memory(engine.kv_cache_memory, engine.pipeline_parallel_size)
    parts = [
        f"{one.num_bytes}" if one.fraction_of_free is None else f"{one.fraction_of_free / num_replicas:.6f}"
        for one in asked
    ]
    return replace(engine, kv_cache_memory=",".join(parts))


def _spans(numbers: Sequence[int]) -> str:
    """Such as 0-3,8."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)
