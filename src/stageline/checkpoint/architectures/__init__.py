"""What the config.json of each architecture means: an architecture is a function from its fields to a ModelSpec.

`common` reads what nearly all have alike; a reader starts from it and replaces what its architecture has otherwise.
"""

from stageline.checkpoint.architectures import dense, experts
from stageline.checkpoint.architectures.assumed import ASSUMED
from stageline.checkpoint.architectures.common import Reader

__all__ = ["ASSUMED", "READERS", "Reader"]

READERS: dict[str, Reader] = {**dense.READERS, **experts.READERS}
"""By the name that config.json has under `architectures`."""
