"""The only place that reads environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

_SECRETS = ("STAGELINE_CLUSTER_KEY", "STAGELINE_API_KEY")


@dataclass(frozen=True)
class Variable:
    """One that is set. `name` is for messages."""

    name: str
    value: str


def pp_layer_partition(environ: Mapping[str, str] = os.environ) -> Variable | None:
    """STAGELINE_PP_LAYER_PARTITION, or VLLM_PP_LAYER_PARTITION, which users may have set already."""
    return _variable("STAGELINE_PP_LAYER_PARTITION", environ) or _variable("VLLM_PP_LAYER_PARTITION", environ)


def log_level(environ: Mapping[str, str] = os.environ) -> str:
    """STAGELINE_LOG_LEVEL: DEBUG, INFO, WARNING or ERROR."""
    return environ.get("STAGELINE_LOG_LEVEL", "INFO").upper()


def kernels(environ: Mapping[str, str] = os.environ) -> str:
    """STAGELINE_KERNELS: auto, avx512, avx2, portable or torch; how the CPU computes. For tests and comparisons."""
    return environ.get("STAGELINE_KERNELS") or "auto"


def inject_slowdown(environ: Mapping[str, str] = os.environ) -> Variable | None:
    """STAGELINE_INJECT_SLOWDOWN: stages and links to make slower, such as s1:1.5,link0:2ms; for tests, benchmarks."""
    return _variable("STAGELINE_INJECT_SLOWDOWN", environ)


def api_keys(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """STAGELINE_API_KEY: a key that clients of the server must send, or several with commas between them."""
    return tuple(key.strip() for key in environ.get("STAGELINE_API_KEY", "").split(",") if key.strip())


def cluster_key(environ: Mapping[str, str] = os.environ) -> Variable | None:
    """STAGELINE_CLUSTER_KEY: the cluster key itself, as `stageline key new` prints it."""
    return _variable("STAGELINE_CLUSTER_KEY", environ)


def cluster_key_file(environ: Mapping[str, str] = os.environ) -> Variable | None:
    """STAGELINE_CLUSTER_KEY_FILE: the file that holds the cluster key."""
    return _variable("STAGELINE_CLUSTER_KEY_FILE", environ)


def interface(environ: Mapping[str, str] = os.environ) -> Variable | None:
    """STAGELINE_INTERFACE, or NCCL_SOCKET_IFNAME, which users may have set already: interfaces for links."""
    return _variable("STAGELINE_INTERFACE", environ) or _variable("NCCL_SOCKET_IFNAME", environ)


def ray_address(environ: Mapping[str, str] = os.environ) -> str | None:
    """RAY_ADDRESS: the cluster that Ray connects to; Ray reads it itself."""
    return environ.get("RAY_ADDRESS") or None


def client_api_key(environ: Mapping[str, str] = os.environ) -> str | None:
    """The first of STAGELINE_API_KEY, or OPENAI_API_KEY: what this process sends to a server as its client."""
    return next(iter(api_keys(environ)), None) or environ.get("OPENAI_API_KEY") or None


def for_children(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What this process's own children inherit: all but keys, which they get by their standard input if at all."""
    return {name: value for name, value in environ.items() if name not in _SECRETS}


def notify_socket(environ: Mapping[str, str] = os.environ) -> str | None:
    """NOTIFY_SOCKET: where systemd, if it started this process, hears that a service is ready or stopping."""
    return environ.get("NOTIFY_SOCKET") or None


def cache_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Where compiled kernels and copied weights are kept: stageline in XDG_CACHE_HOME, or in ~/.cache."""
    home = environ.get("XDG_CACHE_HOME", "")
    base = Path(home) if os.path.isabs(home) else Path.home() / ".cache"
    return base / "stageline"


def cuda_visible_devices(environ: Mapping[str, str] = os.environ) -> list[str] | None:
    """CUDA_VISIBLE_DEVICES: the names of the GPUs that this process may use; None if all."""
    text = environ.get("CUDA_VISIBLE_DEVICES")
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]


def show_cuda_devices(names: list[str], environ: MutableMapping[str, str] = os.environ) -> None:
    """Let the processes that are started from now on see these GPUs only."""
    environ["CUDA_VISIBLE_DEVICES"] = ",".join(names)


def _variable(name: str, environ: Mapping[str, str]) -> Variable | None:
    value = environ.get(name)
    return Variable(name, value) if value else None
