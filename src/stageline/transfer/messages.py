"""What is asked of a machine that has a model's weights, and what it answers. Plain data; no path crosses the socket.

One idea: bytes are asked for by number. A run is a tensor's number in the checkpoint's own table, which both sides make
from the same headers; so nothing but the model's tensors can be asked for.
"""

from __future__ import annotations

import msgspec

PIECE_BYTES = 2**20
"""What travels at once, and is kept or fetched again as a whole."""

DIGEST_BYTES = 16

MOST_DIGESTS = 64
"""What may be asked for at once: the answer needs all these pieces to be read."""


class Run(msgspec.Struct, frozen=True, array_like=True):
    """Bytes that lie side by side.

    Args:
        file: which of the model's files, from 0.
    """

    file: int
    offset_bytes: int
    num_bytes: int

    @property
    def num_pieces(self) -> int:
        return -(-self.num_bytes // PIECE_BYTES)

    @property
    def end_bytes(self) -> int:
        return self.offset_bytes + self.num_bytes

    def piece(self, number: int) -> tuple[int, int]:
        """Where a piece begins in the file, and its number of bytes."""
        begin = number * PIECE_BYTES
        return self.offset_bytes + begin, min(PIECE_BYTES, self.num_bytes - begin)


class WeightSource(msgspec.Struct, frozen=True):
    """Where a process gets weights that its machine lacks; on its way to that process, never to another machine.

    Args:
        address: host and port of the head, which says what is right.
        model_digest: the model, see `stageline.checkpoint.digest`.
        cache: the folder here that keeps them.
        givers: of other machines that have some of them.
        model: as the head calls it, for who looks at the folder.
    """

    address: str
    model_digest: str
    cache: str
    givers: list[str] = []
    model: str = ""


# ---- questions ----


class AskModel(msgspec.Struct, frozen=True, tag="ask_model"):
    """The answer is `AboutModel`."""


class AskDigests(msgspec.Struct, frozen=True, tag="ask_digests"):
    """The answer is `Digests`.

    Args:
        run: fronts are counted first, then the tensors.
        num_pieces: at most `MOST_DIGESTS`.
    """

    run: int
    first_piece: int
    num_pieces: int


class AskPiece(msgspec.Struct, frozen=True, tag="ask_piece"):
    """The answer is `Piece` and a frame with its bytes, or `NotHere`."""

    run: int
    piece: int


Question = AskModel | AskDigests | AskPiece

# ---- answers ----


class AboutModel(msgspec.Struct, frozen=True, kw_only=True, tag="about_model"):
    """What has to be known before tensors can be asked for.

    Args:
        fingerprint: hexadecimal; differs for models that differ in their weights only.
        config: config.json of a Hugging Face directory; None for GGUF files.
        generation_config: generation_config.json, or nothing.
        file_bytes: sizes of the files with weights.
        fronts: what of them tells where the tensors lie.
        num_tensors: how many runs follow the fronts.
    """

    model_digest: str
    fingerprint: str
    config: bytes | None
    generation_config: bytes
    file_bytes: list[int]
    fronts: list[Run]
    num_tensors: int


class Digests(msgspec.Struct, frozen=True, tag="digests"):
    """Args: digests: of consecutive pieces as they are there, `DIGEST_BYTES` each."""

    run: int
    first_piece: int
    digests: bytes


class Piece(msgspec.Struct, frozen=True, tag="piece"):
    """Its bytes follow."""

    run: int
    piece: int


class NotHere(msgspec.Struct, frozen=True, tag="not_here"):
    """The machine asked has a copy itself, without this piece."""

    run: int
    piece: int


class NotGiven(msgspec.Struct, frozen=True, tag="not_given"):
    reason: str


Answer = AboutModel | Digests | Piece | NotHere | NotGiven
