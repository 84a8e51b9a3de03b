"""ZeroMQ sockets as Stageline uses them: one-way pipes with bounded messages, closed without waiting for the dead."""

from __future__ import annotations

import os
import tempfile

import zmq

from stageline.errors import ConfigError

MAX_CONTROL_BYTES = 256 * 2**20
"""Largest control message accepted: far above any microbatch, far below what would hurt."""

_FALLBACK_PARENT = "/tmp"


class Links:
    """A process's sockets. Queues are not bounded here: the window of microbatches bounds what can be in them."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        # It knows a socket only weakly: one that nobody held would be gone before `close` lets it send the rest.
        self._sockets: list[zmq.Socket[bytes]] = []

    def sender(self, address: str) -> zmq.Socket[bytes]:
        """Connects to a receiver, which may not be there yet."""
        socket = self._new_socket(zmq.PUSH)
        socket.connect(address)
        return socket

    def receiver(self, address: str, max_message_bytes: int = MAX_CONTROL_BYTES) -> zmq.Socket[bytes]:
        """Binds an address that senders connect to; a sender of a larger message is cut off.

        Raises: ConfigError if there can be no such socket, as on a disk that is full.
        """
        socket = self._new_socket(zmq.PULL)
        socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"a socket cannot be made at {address}: {zmq.strerror(error.errno or 0)}; if that is a folder for "
                "temporary files, set TMPDIR to one with space, in which files can be made"
            ) from None
        return socket

    def _new_socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(0)
        self._sockets.append(socket)
        return socket

    def close(self, linger_s: float = 0.0) -> None:
        """Close all sockets, giving what was sent at most `linger_s` seconds to leave. No other thread may use them."""
        self._context.destroy(linger=int(linger_s * 1000))


def make_ipc_folder(longest_name: str) -> str:
    """A new folder for ipc sockets that only this user can enter.

    It lies in the folder for temporary files; if that has a path too long for a socket, in /tmp.

    Args:
        longest_name: the longest of the sockets' file names.
    Raises: ConfigError if there is no place for it.
    """
    try:
        for parent in (tempfile.gettempdir(), _FALLBACK_PARENT):
            folder = tempfile.mkdtemp(prefix="stageline-", dir=parent)
            num_bytes = len(os.fsencode(os.path.join(folder, longest_name)))
            if num_bytes <= zmq.IPC_PATH_MAX_LEN:
                return folder
            os.rmdir(folder)
    except OSError as error:
        raise ConfigError(
            f"the stages' sockets need a folder for temporary files: {error}; set TMPDIR to one that can be written"
        ) from None
    raise ConfigError(
        f"a socket's path would have {num_bytes} bytes, and this system allows {zmq.IPC_PATH_MAX_LEN}; set TMPDIR to a "
        f"folder with a shorter path"
    )
