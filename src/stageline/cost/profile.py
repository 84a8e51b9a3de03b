"""Measured costs that are kept: a JSON file per model, machine and way of computing, in the cache folder.

One idea: a profile is found by what it was measured of, and never believed for anything else. The key is in the file
too, so that a file that was moved or edited is noticed.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from stageline.checkpoint.checkpoint import Checkpoint
from stageline.checkpoint.digest import model_digest
from stageline.config import environment
from stageline.pipeline.item_times import PlannedMicrobatch
from stageline.pipeline.partition_by_cost import ItemCosts, StageRoom

_CPU_INFO = Path("/proc/cpuinfo")
_NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")
_Kept = TypeVar("_Kept", bound=msgspec.Struct)


class ProfileKey(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a profile is of.

    Args:
        model_digest: of the model's shape and its tensors' names, shapes and encodings; not of the weights.
        machine: its processor, and its GPUs if the device is not "cpu".
        device, dtype, quantization, threads_per_stage, kernels: as asked for.
        ranks: that share a stage's layers; one number if it is every stage's, else one for each stage. None if nobody
            shares any.
    """

    model_digest: str
    machine: str
    device: str
    dtype: str
    quantization: str
    threads_per_stage: int
    kernels: str
    ranks: tuple[int, ...] | None = None

    @property
    def path(self) -> Path:
        name = hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:32]
        return environment.cache_directory() / "profiles" / f"{name}.json"


class Profile(msgspec.Struct, frozen=True):
    """Costs of every item, as measured.

    Args:
        model: path of the checkpoint, for people who read the file.
        planned: the microbatch they were measured at.
        rooms: the stages they were measured on; they say nothing of a pipeline with another number of stages.
    """

    key: ProfileKey
    model: str
    planned: PlannedMicrobatch
    costs: ItemCosts
    rooms: tuple[StageRoom, ...]

    def rooms_for(self, num_stages: int) -> tuple[StageRoom, ...]:
        return self.rooms if len(self.rooms) == num_stages else (StageRoom(),) * num_stages


def profile_key(
    checkpoint: Checkpoint,
    device: str,
    dtype: str,
    quantization: str,
    threads_per_stage: int,
    ranks_per_stage: Sequence[int] = (1,),
) -> ProfileKey:
    """The key for this machine."""
    machine = describe_machine(with_gpus=device != "cpu")
    digest, kernels = model_digest(checkpoint), environment.kernels()
    ranks = tuple(ranks_per_stage if len(set(ranks_per_stage)) > 1 else ranks_per_stage[:1])
    shared = None if ranks == (1,) else ranks
    return ProfileKey(digest, machine, device, dtype, quantization, threads_per_stage, kernels, shared)


def load_profile(key: ProfileKey) -> Profile | None:
    """The profile kept under this key; None if there is none, or the file there is not one."""
    profile = load_kept(key.path, Profile)
    return profile if profile is not None and profile.key == key else None


def save_profile(profile: Profile) -> Path:
    """Keep a profile in place of any other of its key. Returns: the file. Raises: OSError."""
    return save_kept(profile.key.path, profile)


def load_kept(path: Path, kind: type[_Kept]) -> _Kept | None:
    """What was measured and kept there; None if there is nothing, or something else."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None


def save_kept(path: Path, measured: msgspec.Struct) -> Path:
    """Keep what was measured, in place of what is there. Returns: the file. Raises: OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Written beside and moved: whoever reads meanwhile finds the old one or the new one, whole.
    part = path.with_suffix(f".{os.getpid()}")
    part.write_bytes(msgspec.json.format(msgspec.json.encode(measured)) + b"\n")
    part.replace(path)
    return path


def describe_machine(with_gpus: bool) -> str:
    """Such as "AMD EPYC 9554" or "AMD EPYC 9554, NVIDIA H200"."""
    names = [_processor()]
    if with_gpus:
        files = sorted(_NVIDIA_GPUS.glob("*/information"))
        names += [match for file in files if (match := _field(file, "Model"))]
    return ", ".join(names)


def _processor() -> str:
    parts = [_field(_CPU_INFO, name) for name in ("model name", "cpu family", "model", "stepping")]
    return " ".join(part for part in parts if part) or platform.processor() or platform.machine()


def _field(file: Path, name: str) -> str:
    """The first value of "name : value" lines; empty if there is none."""
    try:
        match = re.search(rf"^{re.escape(name)}[ \t]*:[ \t]*(.*?)\s*$", file.read_text(), flags=re.M)
    except OSError:
        return ""
    return match.group(1) if match else ""
