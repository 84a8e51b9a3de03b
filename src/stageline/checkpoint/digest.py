"""Whether two machines have the same model: a digest of its shape and of every tensor's name, shape and encoding.

Not of the weights, which would have to be read for it; nor of where the files are.
"""

from __future__ import annotations

import hashlib

import msgspec

from stageline.checkpoint.checkpoint import Checkpoint


def model_digest(checkpoint: Checkpoint) -> str:
    """64 hexadecimal digits."""
    tensors = sorted((entry.name, entry.shape, entry.encoding) for entry in checkpoint.tensors.values())
    return hashlib.sha256(msgspec.json.encode((checkpoint.spec, tensors))).hexdigest()
