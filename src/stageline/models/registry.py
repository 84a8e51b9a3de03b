"""Which module holds which model family. A family's module is imported when a stage builds its model, not before."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, cast

from stageline.errors import CheckpointError

if TYPE_CHECKING:
    from stageline.models.family import FamilyType

_MODULES = {
    "llama": "stageline.models.llama",
    "qwen3": "stageline.models.qwen3",
    "gemma2": "stageline.models.gemma",
    "gemma3": "stageline.models.gemma",
    "phi3": "stageline.models.phi3",
    "glm4": "stageline.models.glm4",
    "olmo2": "stageline.models.olmo2",
    "mixtral": "stageline.models.mixtral",
    "qwen2_moe": "stageline.models.qwen2_moe",
    "qwen3_moe": "stageline.models.qwen3_moe",
    "deepseek": "stageline.models.deepseek",
    "gpt_oss": "stageline.models.gpt_oss",
}


def family_names() -> tuple[str, ...]:
    """Every family that can be run, as `ModelSpec.family` spells it."""
    return tuple(_MODULES)


def load_family(name: str) -> FamilyType:
    """Import the family's module. Raises: CheckpointError if there is none."""
    if name not in _MODULES:
        raise CheckpointError(f"model family {name!r} is not supported; these are: {', '.join(_MODULES)}")
    return cast("FamilyType", importlib.import_module(_MODULES[name]).FAMILY)
