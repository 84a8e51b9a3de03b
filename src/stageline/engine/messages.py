"""What the engine's process says to its clients and to its owner, and they to it. Plain data, no text of prompts.

Clients (processes that hold an `AsyncLLM`) talk to it over sockets. Its owner, the process that started it, has the
engine's standard input, and the pipe that ends with the engine.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from stageline.config.cluster_config import ClusterConfig
from stageline.config.engine_config import EngineConfig
from stageline.engine.stats import EngineStats
from stageline.errors import (
    CapacityError,
    ConfigError,
    EngineLost,
    InternalError,
    NotReady,
    QueueFull,
    RequestError,
    StagelineError,
    WorkerLost,
)
from stageline.executor.messages import LinkAccess
from stageline.outputs import FinishReason
from stageline.request import EngineRequest, RequestUpdate
from stageline.timeline.span import Span


class EngineProcessConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the engine's process needs to start.

    Args:
        model_path: of the checkpoint, which its owner has opened already.
        folder: where the sockets are; to be removed if the owner cannot.
        warms_up: whether requests of several sizes go through the stages before it is ready.
        cluster: which machines take part, if there are several.
        access: how links to them are protected.
        revives: a pipeline that loses a stage is started again; else the engine ends.
        place: the part of this machine that is its own; None if it is alone.
    """

    engine: EngineConfig
    model_path: str
    log_level: str
    folder: str
    num_clients: int
    warms_up: bool = False
    cluster: ClusterConfig | None = None
    access: LinkAccess = LinkAccess()
    revives: bool = False
    place: ReplicaPlace | None = None


class ReplicaPlace(msgspec.Struct, frozen=True):
    """Args:
    cores: CPU cores that it and its stages may run on; empty for all.
    cuda_devices: those that it sees, as CUDA_VISIBLE_DEVICES names them; empty for all.
    """

    cores: list[int]
    cuda_devices: list[str]


class EngineLink(msgspec.Struct, frozen=True, kw_only=True):
    """How one client finds its engine."""

    folder: str
    client_index: int
    engine_pid: int

    @property
    def engine_address(self) -> str:
        return engine_address(self.folder)

    @property
    def client_address(self) -> str:
        return client_address(self.folder, self.client_index)


def engine_address(folder: str) -> str:
    return f"ipc://{folder}/engine"


def client_address(folder: str, client_index: int) -> str:
    return f"ipc://{folder}/client{client_index}"


class ErrorReport(msgspec.Struct, frozen=True, kw_only=True):
    """An error of Stageline's tree, on its way to another process."""

    kind: Literal["request", "queue_full", "not_ready", "capacity", "worker", "config", "engine", "internal"]
    message: str
    field: str = ""
    retry_after_s: float = 0.0
    stage_index: int = 0
    remote_traceback: str = ""

    @classmethod
    def of(cls, error: BaseException) -> ErrorReport:
        match error:
            case RequestError():
                return cls(kind="request", message=str(error), field=error.field)
            case QueueFull():
                return cls(kind="queue_full", message=str(error), retry_after_s=error.retry_after_s)
            case NotReady():
                return cls(kind="not_ready", message=str(error), retry_after_s=error.retry_after_s)
            case CapacityError():
                return cls(kind="capacity", message=str(error), retry_after_s=error.retry_after_s)
            case WorkerLost():
                return cls(
                    kind="worker",
                    message=error.reason,
                    stage_index=error.stage_index,
                    remote_traceback=error.remote_traceback,
                )
            case ConfigError():
                return cls(kind="config", message=str(error))
            case EngineLost():
                return cls(kind="engine", message=str(error))
            case StagelineError():
                return cls(kind="internal", message=str(error))
        return cls(kind="internal", message=f"{type(error).__name__}: {error}")

    def as_error(self) -> StagelineError:
        match self.kind:
            case "request":
                return RequestError(self.message, self.field)
            case "queue_full":
                return QueueFull(self.message, self.retry_after_s)
            case "not_ready":
                return NotReady(self.message, self.retry_after_s)
            case "capacity":
                return CapacityError(self.message, self.retry_after_s)
            case "worker":
                return WorkerLost(self.stage_index, self.message, self.remote_traceback)
            case "config":
                return ConfigError(self.message)
            case "engine":
                return EngineLost(self.message)
            case "internal":
                return InternalError(self.message)


# ---- from a client ----


class AddRequests(msgspec.Struct, frozen=True, array_like=True, tag="add"):
    """Queue all of them or none: the completions of one user request. The answer is `Accepted` or `Refused`."""

    client_index: int
    requests: list[EngineRequest]


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """End requests, of which the client wants to hear nothing more.

    Args:
        finish_reason: what the client knows: "stop" after a stop string, "abort" if nobody listens.
    """

    client_index: int
    request_ids: list[str]
    finish_reason: FinishReason = "abort"


class AskStats(msgspec.Struct, frozen=True, array_like=True, tag="ask_stats"):
    """`question` is repeated in the answer."""

    client_index: int
    question: int


class AskSpans(msgspec.Struct, frozen=True, array_like=True, tag="ask_spans"):
    """The spans that ended after `since_s`, of every stage and of the engine the newest `most_per_stage`."""

    client_index: int
    question: int
    since_s: float
    most_per_stage: int


FromClient = AddRequests | Abort | AskStats | AskSpans

# ---- to a client ----


class Accepted(msgspec.Struct, frozen=True, array_like=True, tag="accepted"):
    """The requests, of which this is the first, are queued."""

    request_id: str


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """None of the requests, of which this is the first, is queued."""

    request_id: str
    error: ErrorReport


class Updates(msgspec.Struct, frozen=True, array_like=True, tag="updates"):
    """News of a client's requests, at most one such message per step of the engine."""

    updates: list[RequestUpdate]


class StatsAnswer(msgspec.Struct, frozen=True, array_like=True, tag="stats"):
    question: int
    stats: EngineStats


class SpansAnswer(msgspec.Struct, frozen=True, array_like=True, tag="spans"):
    question: int
    spans: list[Span]


class Beat(msgspec.Struct, frozen=True, array_like=True, tag="beat"):
    """A sign of life, from a thread that is never busy.

    Args:
        stalled_s: how long microbatches have been in flight without a result.
        num_requests: running and waiting, of all clients.
    """

    stalled_s: float
    num_requests: int = 0


class LoadProgress(msgspec.Struct, frozen=True, array_like=True, tag="load_progress"):
    stage_index: int
    num_bytes_read: int
    num_bytes_total: int


class EngineReady(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """A token went through all stages; told again after each `PipelineDown`.

    Args:
        startup_table: which stage holds what.
    """

    startup_table: str


class PipelineDown(msgspec.Struct, frozen=True, array_like=True, tag="down"):
    """A stage was lost; all stages are started again. What was open is lost, unless `keeps_requests`.

    Args:
        reason: one line.
        retry_after_s: when asking again may be worthwhile.
    """

    reason: str
    retry_after_s: float
    keeps_requests: bool


class EngineFailed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """Its last words."""

    error: ErrorReport


ToClient = (
    Accepted
    | Refused
    | Updates
    | StatsAnswer
    | SpansAnswer
    | Beat
    | LoadProgress
    | EngineReady
    | PipelineDown
    | EngineFailed
)

# ---- to and from its owner ----


class Drain(msgspec.Struct, frozen=True, array_like=True, tag="drain"):
    """Take no more requests, and say when there are none left."""


class Stop(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """Leave now, in order."""


class Drained(msgspec.Struct, frozen=True, array_like=True, tag="drained"):
    """No request is left, and no new one is taken."""


FromOwner = Drain | Stop
ToOwner = LoadProgress | EngineReady | PipelineDown | EngineFailed | Drained
