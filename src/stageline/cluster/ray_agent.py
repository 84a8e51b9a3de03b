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

    def run(self, order: bytes, *others: list[str]) -> bytes:
        """Start the agent, and wait until it has ended.

        Args:
            order: a `NodeOrder`.
            others: `room` of the other bundles that its stages have.
        Returns: a `NodeEnd`.
        """
        rooms = [room(), *others]
        if any(one[0] != rooms[0][0] for one in rooms):
            refusal = f"Ray has moved the room of its {len(rooms)} stages to several machines; start the server again"
            return msgspec.msgpack.encode(NodeEnd("", refusal))
        gpus = [gpu for one in rooms for gpu in one[1:]]
        environ = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else None
        child = ChildProcess("stageline.cluster.node_process", order, environ=environ)
        said: list[bytes] = []
        while (messages := child.read_messages()) is not None:
            said += messages
        end = NodeEnd(child.describe_exit(), b" ".join(said).decode())
        child.reap()
        return msgspec.msgpack.encode(end)


def room() -> list[str]:
    """A task: where its bundle is, by Ray's id of the machine, and which of the GPUs there Ray keeps for it."""
    import ray

    return [ray.get_runtime_context().get_node_id(), *map(str, ray.get_gpu_ids())]
