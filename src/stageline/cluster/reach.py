"""Why the head does not answer: told at once when it is known, and once more when the time to join is over.

One idea: ZeroMQ tries for ever and says little of why it cannot connect. When it cannot, a plain TCP connection is
tried beside it, of which the system tells more.
"""

from __future__ import annotations

import logging
import math
import socket
import time

from stageline.cluster.handshake import HandshakeError
from stageline.links.guard import BROKEN, MUTE, NOBODY
from stageline.links.sockets import Links
from stageline.links.tcp_address import TcpAddress

logger = logging.getLogger(__name__)

_CONNECT_S = 3.5
"""The system needs three seconds to find that a neighbour's address is nobody's."""

_REFUSALS_UNTIL_SURE = 2
_NO_WAYS_UNTIL_SURE = 2
_REPEAT_S = 60.0
_MUTE_S = 8.0
"""A head answers handshakes however busy it is; who goes on saying nothing for so long is another program."""

_MUTE_LOOKS = 2
"""A connection that is just coming about looks like one that nobody answers."""


class Reach:
    """Args:
    links: through which the head is called.
    is_patient: what is in the way is no reason to give up: it was not there before.
    """

    def __init__(self, head: TcpAddress, links: Links, is_patient: bool = False) -> None:
        self._head = head
        self._links = links
        self._is_patient = is_patient
        self._num_refusals = 0
        self._num_mute = 0
        self._num_no_ways = 0
        self._said = ""
        self._repeat_s = 0.0
        self._mute: str | None = None
        self._mute_since_s: float | None = None
        self._why: str = NOBODY
        self.is_heard = False
        """The head has answered: whatever takes long now is not the way to it."""

    def look(self, is_last_look: bool, left_s: float = math.inf) -> None:
        """Say what is in the way if it is something new, and now and then if it is not.

        Args:
            left_s: how long it is going to be tried.
        Raises: HandshakeError if waiting is of no use, or no more time is left.
        """
        step, reason = "head", "it has not let this node in; its log says what it waits for"
        if not self.is_heard:
            step, reason = self._find_out(is_first_look=not self._said, is_last_look=is_last_look)
        if is_last_look or (self._is_hopeless() and not self._is_patient):
            raise HandshakeError(step, reason)
        is_old = reason == self._said and time.monotonic() < self._repeat_s
        is_sure = self._num_mute not in range(1, _MUTE_LOOKS) and (self._is_patient or not self._num_refusals)
        if is_sure and not is_old:
            self._said, self._repeat_s = reason, time.monotonic() + _REPEAT_S
            how_long = "" if math.isinf(left_s) else f" for {left_s:.0f} s (--join-timeout)"
            logger.info("not joined yet, step `%s`: %s; trying on%s", step, reason, how_long)

    def _is_hopeless(self) -> bool:
        is_mute = self._mute_since_s is not None and time.monotonic() - self._mute_since_s >= _MUTE_S
        has_no_way = self._num_no_ways >= _NO_WAYS_UNTIL_SURE
        return is_mute or has_no_way or self._num_refusals >= _REFUSALS_UNTIL_SURE

    def _find_out(self, is_first_look: bool, is_last_look: bool) -> tuple[str, str]:
        trouble = self._links.trouble(self._head.url)
        if trouble == NOBODY:
            self._num_refusals = 0
            # Not at every look: whoever begins to listen there would log a visitor without a key.
            if is_first_look or is_last_look or self._num_no_ways:
                self._why = self._unreachable() or trouble
            return "connection", f"{self._head} cannot be reached: {self._why}"
        if trouble in (None, BROKEN, MUTE):
            self._num_refusals = 0
            self._num_mute += 1
            self._mute_since_s = (self._mute_since_s or time.monotonic()) if trouble == MUTE else None
            if trouble is None and (is_last_look or self._num_mute == _MUTE_LOOKS):
                self._mute = self._unreachable()
            if trouble is None and self._mute is not None:
                return "connection", f"{self._head} cannot be reached: {self._mute}"
            return "connection", f"what listens at {self._head} does not answer: a busy head, or another program"
        self._num_refusals += 1
        return "key", f"{self._head} refuses this node: {trouble}"

    def _unreachable(self) -> str | None:
        """Somebody who is still to come refuses connections, or is silent; to an address that is nobody's is no way."""
        before, self._num_no_ways = self._num_no_ways, 0
        try:
            socket.create_connection((self._head.host, self._head.port), timeout=_CONNECT_S).close()
        except TimeoutError:
            return "nothing answers there; is the address right, and does a firewall let this port through?"
        except ConnectionRefusedError:
            return "the connection is refused; is the head started, and is this its --master-port?"
        except OSError as error:
            self._num_no_ways = before + 1
            return f"{error.strerror or error}; is the address right?"
        return None
