"""Replicas divide a machine evenly; what cannot be divided is refused with numbers, before anything starts."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from stageline.config.engine_config import EngineConfig
from stageline.engine.messages import ReplicaPlace
from stageline.engine.replica_places import Machine, divide
from stageline.errors import ConfigError
from stageline.kv.kv_plan import parse_kv_cache_memory

EIGHT_CORES = Machine([0, 1, 2, 3, 4, 5, 6, 9], [])


def engine(**settings: object) -> EngineConfig:
    return EngineConfig(model="m", **settings).check()  # type: ignore[arg-type]


def test_one_replica_is_left_as_it_is() -> None:
    config = engine(pipeline_parallel_size=4)
    found = divide(config, 1, EIGHT_CORES)
    assert (found.engine, found.places) == (config, (None,))


def test_cores_are_divided_and_none_is_shared() -> None:
    found = divide(engine(pipeline_parallel_size=2), 2, EIGHT_CORES)
    assert found.places == (ReplicaPlace([0, 1, 2, 3], []), ReplicaPlace([4, 5, 6, 9], []))
    assert found.topology == (
        "data parallel 2 x pipeline parallel 2 x tensor parallel 1 = 4 processes; replica 0 on cores 0-3; replica 1 on "
        "cores 4-6,9"
    )


def test_stages_that_must_take_turns_are_not_bound() -> None:
    found = divide(engine(pipeline_parallel_size=2), 2, Machine([0, 1], []))
    assert found.places == (None, None) and found.engine.bind_cores is False
    assert "their 4 processes take turns on 2 CPU cores" in found.topology


def test_a_fraction_of_memory_is_shared_and_bytes_are_each_replicas_own() -> None:
    found = divide(engine(pipeline_parallel_size=2, kv_cache_memory="0.3,1MiB"), 3, EIGHT_CORES)
    one, other = parse_kv_cache_memory(found.engine.kv_cache_memory, 2)
    assert one.fraction_of_free == pytest.approx(0.1) and other.num_bytes == 2**20


def test_too_few_cores_are_refused_with_numbers() -> None:
    with pytest.raises(ConfigError, match=r"size is 9 and .* at least 9 CPU cores, but there are 8; give at most 8"):
        divide(engine(), 9, EIGHT_CORES)
    with pytest.raises(ConfigError, match=r"at least 6 CPU cores, but there are 2; give at most 2 threads"):
        divide(engine(threads_per_stage=3), 2, Machine([0, 1], []))


def test_gpus_are_divided_by_name_and_too_few_are_refused() -> None:
    gpus = Machine([0], ["0", "2", "GPU-a", "5", "6"])
    found = divide(engine(pipeline_parallel_size=2), 2, gpus)
    assert found.places == (ReplicaPlace([], ["0", "2"]), ReplicaPlace([], ["GPU-a", "5"]))
    assert found.engine.kv_cache_memory == engine().kv_cache_memory, "each has memory of its own"
    with pytest.raises(ConfigError, match=r"with 2 processes each, which is 6 GPUs, but there are 5; give at most 2"):
        divide(engine(pipeline_parallel_size=2), 3, gpus)
    with pytest.raises(ConfigError, match=r"but there are 0; give .* --device cpu"):
        divide(engine(device="cuda"), 2, Machine([0, 1], []))


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system does not bind processes to cores")
def test_a_process_that_took_its_place_sees_that_part_only() -> None:
    core = min(os.sched_getaffinity(0))
    words = (
        "import os; from stageline.engine.messages import ReplicaPlace\n"
        "from stageline.engine.replica_places import Machine, take_place\n"
        f"take_place(ReplicaPlace([{core}], ['3', '4'])); print(Machine.here())"
    )
    told = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True, timeout=60).stdout
    assert told.strip() == f"Machine(cores=[{core}], cuda_devices=['3', '4'])"
