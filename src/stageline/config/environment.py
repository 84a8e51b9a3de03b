"""The only place that reads environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping


def pp_layer_partition(environ: Mapping[str, str] = os.environ) -> str | None:
    """STAGELINE_PP_LAYER_PARTITION, or VLLM_PP_LAYER_PARTITION, which users may have set already."""
    return environ.get("STAGELINE_PP_LAYER_PARTITION") or environ.get("VLLM_PP_LAYER_PARTITION") or None


def log_level(environ: Mapping[str, str] = os.environ) -> str:
    """STAGELINE_LOG_LEVEL: DEBUG, INFO, WARNING or ERROR."""
    return environ.get("STAGELINE_LOG_LEVEL", "INFO").upper()
