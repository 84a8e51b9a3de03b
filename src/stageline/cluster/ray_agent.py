"""What runs inside Ray's own processes: it starts a node's agent, waits for its end, and takes it along when it goes.

One idea: Ray only places and watches. The agent is a process of its own, for it needs its main thread, and its stages
join the head as those of any other node.
"""

from __future__ import annotations

import msgspec

from stageline.cluster.ray_messages import NodeEnd
from stageline.links.child_process import ChildProcess


class Agent:
    """An actor. When Ray ends its process, however, the agent's standard input ends, and it leaves."""

    def run(self, order: bytes, gpus: list[str]) -> bytes:
        """Start the agent, and wait until it has ended. Args: order: a `NodeOrder`. Returns: a `NodeEnd`."""
        environ = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else None
        child = ChildProcess("stageline.cluster.node_process", order, environ=environ)
        said: list[bytes] = []
        while (messages := child.read_messages()) is not None:
            said += messages
        end = NodeEnd(child.describe_exit(), b" ".join(said).decode())
        child.reap()
        return msgspec.msgpack.encode(end)


def visible_gpus() -> list[str]:
    """A task: which GPUs of its machine Ray keeps for the bundle it runs in."""
    import ray

    return [str(gpu) for gpu in ray.get_gpu_ids()]
