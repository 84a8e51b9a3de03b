"""A node's agent as a child process: `python -m stageline.cluster.node_process FD`, started by whoever placed it.

One idea: it is what `stageline join` is, with its orders on standard input, and it leaves when that ends.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

import msgspec

from stageline.cluster.node import NodeSettings, run_node
from stageline.cluster.ray_messages import NodeOrder
from stageline.errors import ConfigError
from stageline.links.child_process import read_message, write_message
from stageline.log import open_standard_streams, set_up_logging


def main() -> int:
    """Take part until told to stop. Returns: the exit status, 2 with a message to the owner if it cannot."""
    body = read_message(sys.stdin.fileno())
    if body is None or len(sys.argv) != 2:
        sys.exit("a placed node's process is started by its owner, not by hand; by hand: stageline join")
    order = msgspec.msgpack.decode(body, type=NodeOrder)
    set_up_logging(order.log_level)
    threading.Thread(target=_leave_with_owner, name="owner", daemon=True).start()
    try:
        run_node(settings_of(order))
    except ConfigError as error:
        write_message(int(sys.argv[1]), str(error).encode())
        return 2
    return 0


def settings_of(order: NodeOrder) -> NodeSettings:
    """The model is looked for where the head has it."""
    return NodeSettings(
        head=order.head,
        port=order.port,
        ports=range(order.first_port, order.last_port + 1),
        access=order.access,
        join_timeout_s=order.join_timeout_s,
        rank=order.rank,
        num_stages=order.num_stages,
        model_source=order.model_source,
        interface=order.interface,
        settings={},
        binds_cores=order.binds_cores,
    )


def _leave_with_owner() -> None:
    while read_message(sys.stdin.fileno()) is not None:
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    open_standard_streams()
    sys.exit(main())
