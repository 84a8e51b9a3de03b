"""Fields of a request that this server does not know: they are ignored, and the log names each one once.

One idea: OpenAI refuses them, vLLM ignores them, and clients written for either send what is newer or another server's.
Refusing would shut them out for what often changes nothing; saying nothing would hide a misspelt name.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Sequence

import msgspec

logger = logging.getLogger(__name__)

# OpenAI's, and without a meaning for a server that keeps nothing and writes text only.
_MEANINGLESS = frozenset(
    {"metadata", "modalities", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier",
     "store", "user", "verbosity"}
)  # fmt: skip
_LONGEST_NAME = 64
_members = msgspec.json.Decoder(dict[str, msgspec.Raw])


class UnknownFields:
    """Which were told already. Clients choose the names, so it stops after `most`."""

    def __init__(self, most: int = 100) -> None:
        self._most = most
        self._told: set[tuple[str, str]] = set()

    def look_for(self, path: str, body: bytes, known: Sequence[str]) -> None:
        """Args: body: a JSON object that was decoded already. known: the fields that its route has."""
        unknown = _members.decode(body).keys() - set(known) - _MEANINGLESS
        for name in sorted(unknown):
            if (path, name) not in self._told and len(self._told) < self._most:
                self._told.add((path, name))
                logger.warning("%s", _line(path, name, known))


def _line(path: str, name: str, known: Sequence[str]) -> str:
    shown = name[:_LONGEST_NAME]
    close = difflib.get_close_matches(shown, known, n=1, cutoff=0.8)
    hint = f"; did its client mean {close[0]}?" if close else ""
    return f"a request to {path} has the field {shown!r}, which is not known and ignored (told once){hint}"
