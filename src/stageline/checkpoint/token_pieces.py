"""The bytes behind a vocabulary's pieces, which are spelled in characters that can be printed.

Two spellings are known: `<0xE2>` for a byte of its own (SentencePiece), and one printable character per byte
(byte-level BPE, as GPT-2 introduced it).
"""

from __future__ import annotations

import re
from functools import cache

_ONE_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def piece_bytes(piece: str) -> bytes:
    """The piece's bytes; those of the piece as text where it is spelled in neither way."""
    if found := _ONE_BYTE.fullmatch(piece):
        return bytes([int(found[1], 16)])
    by_character = _byte_level_alphabet()
    if all(character in by_character for character in piece):
        return bytes(by_character[character] for character in piece)
    return piece.encode()


@cache
def _byte_level_alphabet() -> dict[str, int]:
    """Printable bytes stand for themselves; the others, in order, for the characters from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + place): byte for place, byte in enumerate(others)}
