"""Where a machine gives weights from: a port of its own, which is taken when somebody first needs it.

One idea: who has no port to spare gives nothing, and that is no error: the head has everything.
"""

from __future__ import annotations

from pathlib import Path

from stageline.checkpoint.checkpoint import Checkpoint
from stageline.checkpoint.open import open_checkpoint
from stageline.cluster.ports import HeldPort
from stageline.errors import ConfigError
from stageline.executor.messages import LinkAccess
from stageline.transfer.copy_files import GGUF, copy_folders
from stageline.transfer.server import WeightServer


class WeightPort:
    """Args:
    own: this machine's port for activations, which is none for weights.
    """

    def __init__(self, own: HeldPort, ports: range, access: LinkAccess) -> None:
        self._own = own.address
        self._ports = [port for port in ports if port != own.address.port]
        self._access = access
        self._held: HeldPort | None = None
        self._server: WeightServer | None = None

    def serve(self, checkpoint: Checkpoint, is_whole: bool = True) -> WeightServer:
        """The same one each time. Raises: ConfigError if there is no port left, or it cannot be listened on."""
        if self._server is None:
            self._held = self._held or HeldPort(self._own.host, self._ports)
            self._server = WeightServer(checkpoint, self._held.address, self._access.security(), is_whole)
        return self._server

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._held is not None:
            self._held.close()
            self._held = None


def kept_copy(cache: Path, digest: str) -> Checkpoint | None:
    """What this machine copied of a model earlier, with holes; None if there is nothing of use.

    Of several with other weights it is the one used last. Raises: OSError.
    """
    folders = sorted(copy_folders(cache, digest), key=lambda folder: folder.stat().st_mtime)
    if not folders:
        return None
    file = folders[-1] / GGUF
    try:
        return open_checkpoint(str(file if file.is_file() else folders[-1]))
    except ConfigError:
        return None
