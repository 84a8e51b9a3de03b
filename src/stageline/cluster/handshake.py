"""What has to fit before a node may take part: checked on both sides, before anything is started.

One idea: each check is a step with a name, and what it finds is one line with both values and the way out. The steps
are, in order: connection, key, software, settings, rank, stages, model.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping

from stageline.checkpoint.checkpoint import Checkpoint
from stageline.checkpoint.digest import model_digest
from stageline.cluster.messages import PROTOCOL, Offer, Software
from stageline.config.cluster_config import ClusterConfig
from stageline.config.engine_config import EngineConfig
from stageline.errors import ConfigError

_SHOWN_DIGITS = 16


class HandshakeError(ConfigError):
    """A node and its head do not fit.

    Args:
        step: the one that failed.
        reason: one line.
    """

    def __init__(self, step: str, reason: str) -> None:
        super().__init__(f"joining failed at the step `{step}`: {reason}")
        self.step = step
        self.reason = reason


def this_software() -> Software:
    """Of this installation; torch is not imported for it."""
    torch = importlib.metadata.version("torch").partition("+")[0]
    return Software(PROTOCOL, importlib.metadata.version("stageline"), torch)


def settings_of(config: EngineConfig, cluster: ClusterConfig) -> dict[str, str]:
    """The flags that every machine has to agree on."""
    values = {
        "--pipeline-parallel-size": config.pipeline_parallel_size,
        "--tensor-parallel-size": _ranks_text(config),
        "--nnodes": cluster.nnodes,
        "--pp-layer-partition": config.pp_layer_partition,
        "--dtype": config.dtype,
        "--quantization": config.quantization,
        "--block-size": config.block_size,
        "--max-model-len": config.max_model_len,
    }
    return {name: "not given" if value is None else str(value) for name, value in values.items()}


def _ranks_text(config: EngineConfig) -> str:
    """Of all stages, as short as it can be said."""
    sizes = config.ranks_per_stage
    return str(sizes[0]) if len(set(sizes)) == 1 else ",".join(map(str, sizes))


def check_software(node: Software, head: Software) -> None:
    """Raises: HandshakeError."""
    for name in ("protocol", "stageline", "torch"):
        its, ours = getattr(node, name), getattr(head, name)
        if its != ours:
            what = "the protocol" if name == "protocol" else name
            raise HandshakeError(
                "software", f"{what} is {its} on the node and {ours} on the head; install the same on both"
            )


def check_settings(node: Mapping[str, str], head: Mapping[str, str]) -> None:
    """Raises: HandshakeError."""
    for name, value in node.items():
        if value != (ours := head.get(name, "unknown")):
            raise HandshakeError(
                "settings", f"{name} is {value} on the node and {ours} on the head; give both the same"
            )


def check_model(checkpoint: Checkpoint, offer: Offer) -> str:
    """On the node. Returns: its model's digest. Raises: HandshakeError."""
    digest = model_digest(checkpoint)
    if digest != offer.model_digest:
        raise HandshakeError(
            "model",
            f"{checkpoint.path} on the node (digest {digest[:_SHOWN_DIGITS]}) is not {offer.model} on the head (digest "
            f"{offer.model_digest[:_SHOWN_DIGITS]}): shape or types of tensors differ; give both the same files",
        )
    return digest


def share_stages(asked: Mapping[int, int | None], num_stages: int) -> dict[int, int]:
    """How many stages each node runs: as many as it asked for, the others an equal share of what is left.

    Args:
        asked: by rank.
    Raises: HandshakeError if that cannot be.
    """
    left = num_stages - sum(count or 0 for count in asked.values())
    open_ranks = sorted(rank for rank, count in asked.items() if count is None)
    if left < len(open_ranks) or (left and not open_ranks):
        brought = ", ".join(f"node {rank} {count or '1 or more'}" for rank, count in sorted(asked.items()))
        few = "many" if left < len(open_ranks) else "few"
        raise HandshakeError(
            "stages",
            f"the nodes bring too {few} stages for --pipeline-parallel-size {num_stages}: {brought}; "
            "change --stages of a node, --nnodes, or --pipeline-parallel-size",
        )
    shares = {rank: count for rank, count in asked.items() if count is not None}
    for place, rank in enumerate(open_ranks):
        shares[rank] = left // len(open_ranks) + (place < left % len(open_ranks))
    return shares
