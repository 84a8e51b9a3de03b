"""A looking process: `python -m stageline.worker.device_report auto|cpu|cuda` prints what stages would find here.

One idea: it asks what a stage asks, so it also shows whether torch can be loaded and finds its devices.
"""

from __future__ import annotations

import os
import platform
import sys

import msgspec
import torch

from stageline.errors import ConfigError
from stageline.pipeline.host_devices import HostDevices
from stageline.worker.device import free_memory_bytes, resolve_device


def report(asked: str) -> HostDevices:
    """Args: asked: as `--device`. Raises: ConfigError."""
    first = resolve_device(asked)
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if first.type == "cpu":
        return HostDevices("cpu", num_cores, [free_memory_bytes(first)], platform.machine())
    devices = [resolve_device(asked, index) for index in range(torch.cuda.device_count())]
    free = [free_memory_bytes(device) for device in devices]
    return HostDevices("cuda", num_cores, free, torch.cuda.get_device_name(first))


if __name__ == "__main__":
    try:
        print(msgspec.json.encode(report(sys.argv[1])).decode())
    except ConfigError as error:
        sys.exit(str(error))
