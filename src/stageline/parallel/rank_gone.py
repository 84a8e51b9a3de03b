"""What a rank raises when the others that share its stage do not answer. One idea: it is rarely the one at fault."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class RankGone(ConnectionError):
    """A rank that shares the stage is gone, as far as this one can tell."""


@contextmanager
def telling_of_a_lost_rank() -> Iterator[None]:
    """torch says with a RuntimeError that another rank hung up."""
    try:
        yield
    except RuntimeError as error:
        said = str(error).partition("\n")[0]
        raise RankGone(f"the other ranks of this stage cannot be reached: {said}") from error
