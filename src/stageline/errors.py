"""Everything Stageline raises on purpose, as one tree: who has to act decides the branch.

    StagelineError
    ├── ConfigError        the operator's: flags, files, memory; raised before anything starts
    │   ├── CheckpointError    the model's files: missing, truncated, misshapen or unsupported
    │   └── StageUnfit         a stage found that it cannot run where it is: memory, disk, files
    ├── RequestError       the client's: names the field (HTTP 4xx)
    ├── CapacityError      nobody's: there is no room now, try again later
    │   ├── QueueFull          too many requests are waiting (HTTP 429)
    │   └── NotReady           the model is loading, or the engine takes no more requests (HTTP 503)
    ├── WorkerLost         a stage died, froze or raised; names the stage, carries its traceback
    ├── RequestOverdue     a request's time is over, and the engine did not end it (HTTP 504)
    ├── EngineLost         the engine's process is gone; says how it ended
    │   └── EngineSilent       it is there, but shows no sign of life or no progress; it may go on later (HTTP 503)
    ├── FrameError         a peer's message is not what was promised; it was refused unread
    └── InternalError      ours: a bug of Stageline

Every message gives the numbers and the way out.
"""

from __future__ import annotations


class StagelineError(Exception):
    """Base of every error that Stageline raises on purpose."""


class ConfigError(StagelineError):
    """The configuration cannot work; nothing was started."""


class CheckpointError(ConfigError):
    """A model's files cannot be used: missing, truncated, misshapen or of an unsupported kind."""


class StageUnfit(ConfigError):
    """A stage found where it runs that it cannot do what is asked of it: too little memory, a full disk, no files.

    Args:
        stage_index: which stage.
        reason: what it found, with the way out.
    """

    def __init__(self, stage_index: int, reason: str) -> None:
        super().__init__(f"stage {stage_index}: {reason}")
        self.stage_index = stage_index
        self.reason = reason


class RequestError(StagelineError):
    """A request cannot be served as asked.

    Args:
        message: what is wrong, with the numbers and the way out.
        field: the request's field at fault, such as "temperature" or "prompt".
    """

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


class CapacityError(StagelineError):
    """There is no room for the request now; the same request may succeed later.

    Args:
        retry_after_s: when asking again may be worthwhile, in seconds.
    """

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QueueFull(CapacityError):
    """As many requests are waiting as --max-queue allows."""


class NotReady(CapacityError):
    """The engine takes no requests yet, for it is loading, or any more, for it is shutting down."""


class WorkerLost(StagelineError):
    """A stage of the pipeline is gone.

    Args:
        stage_index: which stage.
        reason: one line: how it was lost.
        remote_traceback: the traceback in the worker, if it raised; empty when it was killed or froze.
    """

    def __init__(self, stage_index: int, reason: str, remote_traceback: str = "") -> None:
        message = f"stage {stage_index} (s{stage_index}) was lost: {reason}"
        if remote_traceback:
            message += f"\n--- traceback of stage {stage_index} ---\n{remote_traceback.rstrip()}"
        super().__init__(message)
        self.stage_index = stage_index
        self.reason = reason
        self.remote_traceback = remote_traceback


class EngineLost(StagelineError):
    """The engine's process is gone, or was closed, with everything that it was doing."""


class EngineSilent(EngineLost):
    """The engine's process is there, but says nothing, or completes nothing. What was open was given up.

    Args:
        retry_after_s: when asking again may be worthwhile, in seconds.
    """

    def __init__(self, message: str, retry_after_s: float = 5.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestOverdue(StagelineError):
    """A request's time is over, and the engine, which should have ended it, did not."""


class FrameError(StagelineError):
    """A received message is not what was promised; it was refused before memory was touched."""


class InternalError(StagelineError):
    """A bug of Stageline itself."""
