"""A bell that any thread may ring to wake the one who waits for sockets and file descriptors.

One idea: it is a file descriptor itself, so waiting stays in one place.
"""

from __future__ import annotations

import os
import threading


class Wakeup:
    """Rung any number of times before it is heard, it wakes once."""

    def __init__(self) -> None:
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        os.set_blocking(writer, False)
        self._reader = os.fdopen(reader, "rb", buffering=0)
        self._writer = os.fdopen(writer, "wb", buffering=0)
        self._lock = threading.Lock()

    @property
    def fd(self) -> int:
        """Becomes readable when it is rung."""
        return self._reader.fileno()

    def ring(self) -> None:
        """Wake who waits, or will wait; from any thread. Nothing happens after `close`."""
        with self._lock:
            if not self._writer.closed:
                # A full pipe wakes as well as one more byte would.
                self._writer.write(b"\0")

    def heard(self) -> None:
        """Be ready for the next ring; only the one who waits may call it, before looking at what the ring is about."""
        self._reader.read(1 << 16)

    def close(self) -> None:
        with self._lock:
            self._reader.close()
            self._writer.close()
