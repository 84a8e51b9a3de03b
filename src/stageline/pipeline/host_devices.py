"""What a host can compute on: the words of the process that looks, and of whoever asked it."""

from __future__ import annotations

import msgspec


class HostDevices(msgspec.Struct, frozen=True):
    """Args:
    kind: "cpu" or "cuda".
    num_cores: CPU cores that a process may run on.
    free_bytes: [devices] memory that could be allocated now; of a CPU, one number for all stages.
    name: of the first device, for people.
    """

    kind: str
    num_cores: int
    free_bytes: list[int]
    name: str
