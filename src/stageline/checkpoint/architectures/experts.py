"""Architectures with mixtures of experts."""

from __future__ import annotations

from stageline.checkpoint.architectures.common import Reader

READERS: dict[str, Reader] = {}
