"""One stage's operating-system process, seen from the engine; see `stageline.links.child_process`."""

from __future__ import annotations

import msgspec
import psutil

from stageline.errors import ConfigError, StageUnfit
from stageline.executor.messages import WorkerConfig
from stageline.links.child_process import ChildProcess


class WorkerProcess(ChildProcess):
    """A started stage. `exit_fd` becomes readable when the process ends, however it ends.

    Raises: StageUnfit if the system starts no more processes.
    """

    def __init__(self, config: WorkerConfig) -> None:
        self.stage_index = config.stage_index
        self.rank = config.rank
        self.num_ranks = config.num_ranks
        inherited = () if config.ranks_fd < 0 else (config.ranks_fd,)
        threads = {"OMP_NUM_THREADS": str(config.num_threads)}
        try:
            super().__init__("stageline.worker", msgspec.msgpack.encode(config), inherited, environ=threads)
        except ConfigError as error:
            raise StageUnfit(config.stage_index, str(error)) from None

    def is_stopped(self) -> bool:
        """Whether it was stopped by a signal or a debugger, and so cannot show a sign of life."""
        try:
            return bool(psutil.Process(self.pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP))
        except psutil.NoSuchProcess:
            return False
