"""Tells systemd, where it started the server as a service of Type=notify, how far the server is."""

from __future__ import annotations

import logging
import socket

from stageline.config import environment

logger = logging.getLogger(__name__)


def notify(state: str) -> None:
    """Send such as READY=1 or STOPPING=1; nothing happens where nobody listens.

    Source: the protocol of sd_notify(3): a datagram to the socket that the variable names, @ for an abstract one.
    """
    address = environment.notify_socket()
    if address is None:
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.connect("\0" + address[1:] if address.startswith("@") else address)
            sender.sendall(state.encode())
    except OSError as error:
        logger.warning("systemd was not told %s: %s", state, error)
