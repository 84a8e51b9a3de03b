"""The process that `stageline serve` is: it starts the engine and what answers HTTP, watches them, and ends them.

One idea: it serves nothing itself, so it always has time. It waits in one place for a signal, a word or the end of a
child, and whatever happens, it leaves only when all children are gone.

How it ends: told to (SIGTERM, SIGINT or SIGHUP), it lets what is being answered finish, and a second SIGTERM or SIGINT
ends that: what is left is answered with an error. A third waits for nothing. Either way nothing went wrong. If a child
ends unasked, open requests are answered with an error, everything is stopped, and the error is raised.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import logging
import signal
import socket
import time

import msgspec

from stageline.config import environment
from stageline.config.cluster_config import ClusterConfig
from stageline.config.serve_config import ServeConfig
from stageline.engine.load_progress import LoadProgress
from stageline.engine.messages import EngineReady, ToOwner
from stageline.engine.messages import LoadProgress as Loaded
from stageline.engine.replica_places import Replicas
from stageline.errors import EngineLost, InternalError, StagelineError
from stageline.executor.messages import LinkAccess
from stageline.links.child_process import ChildProcess, wait_for_ends
from stageline.server.api_messages import (
    ApiFailed,
    ApiLeft,
    ApiProcessConfig,
    ApiReady,
    DrainApi,
    FromApi,
    ReplaceEngine,
    ToApi,
)
from stageline.server.engines import Engines
from stageline.server.service_manager import notify

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

_LAST_ANSWERS_S = 6.0
"""How long open requests have to be answered with an error when something broke."""

_GOODBYE_S = 2.0
"""How long an API process that was told to leave may take."""


class _Phase(enum.Enum):
    LOADING = enum.auto()
    SERVING = enum.auto()
    DRAINING = enum.auto()
    """Told to stop: what is being answered finishes."""
    BREAKING = enum.auto()
    """Something broke: what is being answered ends with an error."""


class Supervisor:
    """Args:
    replicas: what each engine runs, its model as typed.
    serve: with every API key.
    model_path: of the checkpoint, which can be opened.
    listening: a bound and listening socket; it belongs to the supervisor from now on.
    url: where clients reach it, for the log.
    began_s: when the command started, of `time.monotonic`.
    cluster, access: which machines take part, and how links to them are protected.
    """

    def __init__(
        self,
        replicas: Replicas,
        serve: ServeConfig,
        model_path: str,
        listening: socket.socket,
        url: str,
        began_s: float,
        cluster: ClusterConfig,
        access: LinkAccess,
    ) -> None:
        names = serve.served_model_name or (replicas.engine.model,)
        self._engine_config = dataclasses.replace(replicas.engine, model=model_path)
        self._replicas = dataclasses.replace(replicas, engine=self._engine_config)
        self._serve_config = dataclasses.replace(serve, served_model_name=names)
        self._listening = listening
        self._url = url
        self._began_s = began_s
        self._cluster = cluster
        self._access = access
        self._phase = _Phase.LOADING
        self._error: StagelineError | None = None
        self._last_words: dict[int, StagelineError] = {}
        self._apis: dict[int, ChildProcess] = {}
        self._num_ready = 0
        self._num_cut_off = 0
        self._is_hurrying = False

    def run(self) -> None:
        """Serve until told to stop. Raises: what a child failed with."""
        asyncio.run(self._run())
        if self._error is not None:
            raise self._error

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._over: asyncio.Future[None] = loop.create_future()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._on_signal, number)
        config = self._serve_config
        num_replicas = len(self._replicas.places)
        self._progress = LoadProgress(self._engine_config.pipeline_parallel_size * num_replicas)
        self._engines = Engines(
            self._replicas, config.api_server_count, config.warmup, self._cluster, self._access,
            self._take_from_engine, self._on_engine_end,
        )  # fmt: skip
        if num_replicas > 1:
            logger.info("%s", self._replicas.topology)
        try:
            for index in range(num_replicas):
                self._engines.start(index)
            for index in range(config.api_server_count):
                self._start_api(index)
            # Only those that answer hold the port: when they have left it, clients are refused at once.
            self._listening.close()
            logger.info("listening on %s; requests are answered with status 503 until the model is loaded", self._url)
            await self._over
        finally:
            self._end_children()
        self._say_goodbye()

    def _start_api(self, index: int) -> None:
        config = ApiProcessConfig(
            serve=self._serve_config,
            engine=self._engine_config,
            links=[self._engines.link(replica, index) for replica in range(len(self._engines))],
            log_level=environment.log_level(),
            listening_fd=self._listening.fileno(),
        )
        child = ChildProcess("stageline.server.api_process", msgspec.msgpack.encode(config), [config.listening_fd])
        self._apis[index] = child
        self._loop.add_reader(child.exit_fd, self._on_api, index)

    # ---- what happens ----

    def _on_signal(self, number: signal.Signals) -> None:
        name = signal.Signals(number).name
        if self._phase in (_Phase.DRAINING, _Phase.BREAKING):
            if number == signal.SIGHUP:
                return
            if self._is_hurrying:
                self._finish()
                return
            self._is_hurrying = True
            logger.info("a second %s: what is being answered is broken off", name)
            self._drain_apis(0.0)
            return
        notify("STOPPING=1")
        if self._phase is _Phase.LOADING:
            logger.info("%s: stopping; the model was still loading", name)
            self._phase = _Phase.DRAINING
            self._finish()
            return
        self._phase = _Phase.DRAINING
        patience_s = self._serve_config.drain_timeout_s
        logger.info(
            "%s: no more requests are taken; those that run have %g seconds to finish, a second signal stops them",
            name,
            patience_s,
        )
        self._drain_apis(patience_s)

    def _take_from_engine(self, replica: int, message: ToOwner) -> None:
        match message:
            case Loaded() if self._phase is _Phase.LOADING:
                stage = replica * self._engine_config.pipeline_parallel_size + message.stage_index
                self._progress(stage, message.num_bytes_read, message.num_bytes_total)
            case EngineReady() if self._phase is _Phase.SERVING:
                what = "the pipeline" if len(self._engines) == 1 else f"the pipeline of replica {replica}"
                logger.info("%s is complete again, and serves", what)

    def _on_engine_end(self, replica: int) -> None:
        error = self._engines.take_end(replica)
        if self._phase is _Phase.LOADING or not self._engines.num_running:
            self._break(error)
            return
        logger.error("replica %d of %d is lost: %s; the others serve on", replica, len(self._engines), error)
        if self._phase is not _Phase.SERVING:
            return
        if not self._engines.may_start_again(replica, error):
            logger.error(
                "replica %d is not started again: it was, and has not served for long since; when its cause is mended, "
                "start the server again", replica,
            )  # fmt: skip
            return
        try:
            self._engines.start(replica)
        except StagelineError as problem:
            logger.error("replica %d cannot be started again: %s", replica, problem)
            return
        for index, child in self._apis.items():
            _tell(child, ReplaceEngine(replica, self._engines.link(replica, index)))

    def _on_api(self, index: int) -> None:
        bodies = self._apis[index].read_messages()
        if bodies is None:
            self._on_api_end(index)
            return
        for body in bodies:
            self._take_from_api(index, msgspec.msgpack.decode(body, type=FromApi))

    def _take_from_api(self, index: int, message: FromApi) -> None:
        match message:
            case ApiReady():
                self._num_ready += 1
                if self._num_ready == self._serve_config.api_server_count and self._phase is _Phase.LOADING:
                    self._on_ready()
            case ApiLeft():
                self._num_cut_off += message.num_cut_off
            case ApiFailed():
                self._last_words[index] = message.error.as_error()

    def _on_ready(self) -> None:
        self._phase = _Phase.SERVING
        names = ", ".join(self._serve_config.served_model_name)
        took_s = time.monotonic() - self._began_s
        logger.info("ready after %.1f seconds: %s/v1 serves %s", took_s, self._url, names)
        notify("READY=1")

    def _on_api_end(self, index: int) -> None:
        child = self._apis.pop(index)
        self._loop.remove_reader(child.exit_fd)
        how = child.describe_exit()
        child.reap()
        if self._phase in (_Phase.LOADING, _Phase.SERVING):
            which = f"API process {index}" if self._serve_config.api_server_count > 1 else "the API process"
            error = self._last_words.get(index) or InternalError(f"{which} was lost: {how}")
            if isinstance(error, EngineLost):
                # The engine's own end tells more, and is about to be noticed.
                self._loop.call_later(_GOODBYE_S, self._break, error)
                return
            self._break(error)
        if not self._apis:
            self._finish()

    # ---- the end ----

    def _break(self, error: StagelineError) -> None:
        if self._error is None:
            self._error = error
        if self._phase in (_Phase.DRAINING, _Phase.BREAKING):
            return
        self._phase = _Phase.BREAKING
        notify("STOPPING=1")
        if not self._apis:
            self._finish()
        self._drain_apis(_LAST_ANSWERS_S)
        # Its clients notice, and answer what is open with an error.
        self._engines.end()

    def _drain_apis(self, patience_s: float) -> None:
        for child in self._apis.values():
            _tell(child, DrainApi(patience_s))
        self._loop.call_later(patience_s + _GOODBYE_S, self._finish)

    def _finish(self) -> None:
        if not self._over.done():
            self._over.set_result(None)

    def _end_children(self) -> None:
        """May be interrupted and called again."""
        self._progress.close()
        self._listening.close()
        for child in self._apis.values():
            self._loop.remove_reader(child.exit_fd)
            child.let_go()
        wait_for_ends(list(self._apis.values()), _GOODBYE_S)
        for child in self._apis.values():
            child.kill()
            child.reap()
        self._apis.clear()
        self._engines.end()

    def _say_goodbye(self) -> None:
        if self._error is None:
            number = "1 request was" if self._num_cut_off == 1 else f"{self._num_cut_off} requests were"
            cut_off = f"; {number} cut off" if self._num_cut_off else ""
            logger.info("stopped%s", cut_off)


def _tell(child: ChildProcess, order: ToApi) -> None:
    child.send(msgspec.msgpack.encode(order))
