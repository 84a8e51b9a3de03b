"""Which module holds which model family. A family's module is imported when a stage builds its model, not before."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, cast

from stageline.errors import CheckpointError

if TYPE_CHECKING:
    from stageline.models.family import FamilyType

_MODULES = {
    "llama": "stageline.models.llama",
}


def family_names() -> tuple[str, ...]:
    """Every family that can be run, as `ModelSpec.family` spells it."""
    return tuple(_MODULES)


def load_family(name: str) -> FamilyType:
    """Import the family's module. Raises: CheckpointError if there is none."""
    if name not in _MODULES:
        raise CheckpointError(f"model family {name!r} is not supported; these are: {', '.join(_MODULES)}")
    return cast("FamilyType", importlib.import_module(_MODULES[name]).FAMILY)
