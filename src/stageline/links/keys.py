"""The cluster key: one secret that every node of a pipeline has, and what is derived from it.

One idea: who has the key can compute both ends' key pairs of CURVE, so nothing has to be exchanged or enrolled. A node
that lacks it can neither answer for the listening side nor call as the connecting one.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
from dataclasses import dataclass, field
from functools import cached_property

import zmq
from zmq.utils import z85

from stageline.errors import ConfigError

_NUM_BYTES = 32
_PREFIX = "stageline-cluster-key-1:"
_SALT = b"stageline cluster key 1"
_MAKE_ONE = "make one with `stageline key new`"


@dataclass(frozen=True)
class ClusterKey:
    """32 random bytes. Its text form is one line; its `fingerprint` may be shown.

    Raises: ConfigError for another number of bytes.
    """

    secret: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.secret) != _NUM_BYTES:
            raise ConfigError(f"a cluster key of {len(self.secret)} bytes; it must have {_NUM_BYTES}: {_MAKE_ONE}")

    @staticmethod
    def new() -> ClusterKey:
        return ClusterKey(secrets.token_bytes(_NUM_BYTES))

    @staticmethod
    def parse(text: str, source: str) -> ClusterKey:
        """The key of a text form.

        Args:
            source: where the text is from, for messages, which never hold the text.
        Raises: ConfigError if it is none.
        """
        line = text.strip()
        if not line.startswith(_PREFIX):
            raise ConfigError(f"{source} holds no cluster key, one line that begins with {_PREFIX}; {_MAKE_ONE}")
        try:
            secret = base64.b64decode(line.removeprefix(_PREFIX), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            raise ConfigError(f"the cluster key of {source} is damaged, it is not base64; copy it again") from None
        if len(secret) != _NUM_BYTES:
            raise ConfigError(
                f"the cluster key of {source} has {len(secret)} bytes; it must have {_NUM_BYTES}: copy the whole line"
            )
        return ClusterKey(secret)

    def text(self) -> str:
        """One line, without its end. A secret."""
        return _PREFIX + base64.urlsafe_b64encode(self.secret).decode("ascii")

    @cached_property
    def fingerprint(self) -> str:
        """Eight hexadecimal digits that tell keys apart and nothing about them."""
        return _derive(self.secret, "fingerprint")[:4].hex()


@dataclass(frozen=True)
class CurvePair:
    """A key pair of one end, in Z85 as ZeroMQ wants it."""

    public: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True)
class LinkSecurity:
    """How a process protects its TCP links.

    Args:
        key: encrypt, and talk only to who has it; None talks in the clear to anybody, as `--insecure` asks.
    """

    key: ClusterKey | None

    @cached_property
    def listening(self) -> CurvePair | None:
        """Of the end that binds."""
        return None if self.key is None else _pair(self.key, "listening end")

    @cached_property
    def connecting(self) -> CurvePair | None:
        """Of the end that connects."""
        return None if self.key is None else _pair(self.key, "connecting end")


def _pair(key: ClusterKey, end: str) -> CurvePair:
    # Any 32 bytes are a secret key of Curve25519.
    secret = z85.encode(_derive(key.secret, end))
    return CurvePair(zmq.curve_public(secret), secret)


def _derive(secret: bytes, purpose: str) -> bytes:
    """32 bytes that tell nothing of `secret` or of other purposes'. Source: HKDF with SHA-256, RFC 5869, one block."""
    pseudo_random_key = hmac.digest(_SALT, secret, hashlib.sha256)
    return hmac.digest(pseudo_random_key, purpose.encode("latin-1") + b"\x01", hashlib.sha256)
