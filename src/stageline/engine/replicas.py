"""Several equal engines as one: each request goes to one of them, and what one of them loses only its requests hear of.

One idea: nobody above knows which replica has a request. So one that was not begun when its replica was lost goes to
another, and one that ended is asked of none.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from functools import partial

from stageline.clock import Clock
from stageline.config.engine_config import EngineConfig
from stageline.engine.client import EngineClient
from stageline.engine.health_watch import HealthWatch
from stageline.engine.messages import EngineLink
from stageline.engine.routing import Router
from stageline.errors import CapacityError, EngineLost, EngineSilent, NotReady, StagelineError, WorkerLost
from stageline.executor.executor import OnProgress
from stageline.outputs import FinishReason
from stageline.request import EngineRequest, RequestUpdate

logger = logging.getLogger(__name__)

_NOT_HERE = (CapacityError, EngineLost, WorkerLost)
"""What one replica may say of a request that another one can serve."""


class ReplicaSet:
    """Belongs to the event loop it was made in.

    Args:
        links: one per replica.
        on_updates: called with news of requests.
        on_lost: called with the error that ends them, and the requests that a replica has lost or was given up with.
        on_look: called again and again while this process watches.
        on_progress: called while stages load; those of the second replica are counted behind the first one's.
    """

    def __init__(
        self,
        config: EngineConfig,
        links: Sequence[EngineLink],
        clock: Clock,
        on_updates: Callable[[Sequence[RequestUpdate]], None],
        on_lost: Callable[[StagelineError, Collection[str]], None],
        on_look: Callable[[], None],
        on_progress: OnProgress | None = None,
    ) -> None:
        self._config = config
        self._clock = clock
        self._on_updates = on_updates
        self._on_lost = on_lost
        self._on_progress = on_progress
        self._router = Router(len(links), config.enable_prefix_caching)
        self._adding: set[str] = set()
        self.clients = [self._client(index, link) for index, link in enumerate(links)]
        self._watches = [self._watch(index, on_look if index == 0 else _nothing) for index in range(len(links))]

    def _client(self, index: int, link: EngineLink) -> EngineClient:
        on_progress = None if self._on_progress is None else partial(self._progressed, index)
        return EngineClient(
            link, self._clock, partial(self._took, index), partial(self._lost, index), partial(self._down, index),
            on_progress, partial(self._heard, index),
        )  # fmt: skip

    def _watch(self, index: int, on_look: Callable[[], None]) -> HealthWatch:
        def trouble() -> EngineSilent | None:
            return self._trouble(index, self._clock.now_s())

        return HealthWatch(self._config.heartbeat_timeout_s, trouble, on_look, partial(self._give_up, index))

    # ---- are they there? ----

    @property
    def is_ready(self) -> bool:
        """Whether one of them is."""
        return any(client.is_ready for client in self.clients)

    async def wait_until_ready(self) -> None:
        """Until all of them are. Raises: what one of them failed with."""
        for client in self.clients:
            await client.wait_until_ready()

    def startup_table(self) -> str:
        tables = [client.startup_table for client in self.clients]
        if len(tables) == 1:
            return tables[0]
        return "\n".join(f"replica {index}: {table}" for index, table in enumerate(tables) if table)

    def healthy(self, now_s: float) -> list[int]:
        """Those that are ready and show it."""
        found = [index for index in range(len(self.clients)) if self._trouble(index, now_s) is None]
        return [index for index in found if self.clients[index].is_ready]

    def check_health(self, now_s: float) -> None:
        """Raises: what is wrong with one of them, if none is well."""
        if not self.healthy(now_s):
            raise self._whats_wrong(now_s)

    def check_takes_requests(self, now_s: float) -> None:
        """Raises: as `check_health`, unless requests are kept until a pipeline is complete again."""
        if not self.healthy(now_s):
            wrong = self._whats_wrong(now_s)
            if not (isinstance(wrong, NotReady) and self._that_take_requests()):
                raise wrong

    def check_is_there(self) -> None:
        """Raises: why none of them takes requests."""
        if not self._that_take_requests():
            raise self._whats_wrong(None)

    def _that_take_requests(self) -> list[int]:
        """Those that are ready; or else those that keep requests until they are."""
        ready = [index for index, client in enumerate(self.clients) if client.is_ready]
        return ready or [index for index, client in enumerate(self.clients) if client.keeps_requests]

    def _whats_wrong(self, now_s: float | None) -> StagelineError:
        """Of the replica that is nearest to working. `now_s` is None where silence does not matter yet."""
        there = [index for index, client in enumerate(self.clients) if client.loss is None]
        if not there:
            loss = self.clients[0].loss
            assert loss is not None
            return loss.with_traceback(None)
        troubles = [None if now_s is None else self._trouble(index, now_s) for index in there]
        for index, trouble in zip(there, troubles, strict=True):
            if trouble is None:
                loading = NotReady("the model is still loading; try again in a while", retry_after_s=2.0)
                return self.clients[index].down or loading
        return next(trouble for trouble in troubles if trouble is not None)

    def _trouble(self, index: int, now_s: float) -> EngineSilent | None:
        """What is wrong with an engine that is there."""
        client, config = self.clients[index], self._config
        client.receive()
        silent_s = now_s - client.heard_s
        if client.loss is None and silent_s > config.heartbeat_timeout_s:
            return EngineSilent(f"the engine's process shows no sign of life, for {silent_s:.1f} s now")
        if client.is_ready and client.stalled_s > config.progress_timeout_s:
            return EngineSilent(
                f"no microbatch came back for {client.stalled_s:.1f} s, though some are in flight "
                f"(--progress-timeout-s {config.progress_timeout_s:g})"
            )
        return None

    def asked(self, index: int | None) -> EngineClient:
        """The client of one replica, or of the first that is there. Raises: why it does not answer."""
        self.check_is_there()
        there = self._that_take_requests()
        client = self.clients[there[0] if index is None else index]
        if index is not None and index not in there:
            raise client.loss or client.down or NotReady(f"replica {index} is still loading", retry_after_s=2.0)
        return client

    # ---- requests ----

    async def add(self, requests: list[EngineRequest]) -> None:
        """Queue requests, all or none, with one replica. Raises: RequestError, CapacityError; what all failed with."""
        ids = [request.request_id for request in requests]
        tried: set[int] = set()
        self._adding.update(ids)
        try:
            while True:
                index = self._router.place(requests, self._usable(tried))
                try:
                    await self.clients[index].add(requests)
                    return
                except StagelineError as error:
                    for request_id in ids:
                        self._router.loads[index].ended(request_id)
                    tried.add(index)
                    has_others = any(other not in tried for other in self._that_take_requests())
                    if not (isinstance(error, _NOT_HERE) and has_others):
                        raise
        finally:
            self._adding.difference_update(ids)

    def _usable(self, tried: Collection[int]) -> list[int]:
        self.check_is_there()
        untried = [index for index in self._that_take_requests() if index not in tried]
        if len(untried) == 1:
            return untried
        now_s = self._clock.now_s()
        return [index for index in untried if self._trouble(index, now_s) is None] or untried

    def abort(self, request_ids: Sequence[str], finish_reason: FinishReason) -> None:
        """Of any replicas; those that ended are skipped."""
        for client, load in zip(self.clients, self._router.loads, strict=True):
            its = [request_id for request_id in request_ids if request_id in load]
            client.abort(its, finish_reason)
            for request_id in its:
                load.ended(request_id)

    def fail_questions(self, error: StagelineError, request_ids: Sequence[str]) -> None:
        """Give up waiting for these requests to be taken."""
        for client in self.clients:
            client.fail_questions(error, request_ids)

    # ---- what they tell ----

    def _took(self, index: int, updates: Sequence[RequestUpdate]) -> None:
        load = self._router.loads[index]
        # Of a request that was given up here nothing is believed: another replica may have it now.
        news = [update for update in updates if update.request_id in load]
        for update in news:
            load.took(update)
        self._on_updates(news)

    def _heard(self, index: int, num_requests: int) -> None:
        self._router.loads[index].heard(num_requests)

    def _progressed(self, index: int, stage_index: int, num_bytes_read: int, num_bytes_total: int) -> None:
        assert self._on_progress is not None
        before = index * self._config.pipeline_parallel_size
        self._on_progress(before + stage_index, num_bytes_read, num_bytes_total)

    def _lost(self, index: int, error: StagelineError) -> None:
        lost = self._begun(index)
        self._router.forget(index)
        self._on_lost(error, lost)

    def _down(self, index: int, error: NotReady, keeps_requests: bool) -> None:
        if keeps_requests:
            self._router.forget_prefixes(index)
        else:
            self._lost(index, error)

    def _give_up(self, index: int, error: EngineSilent) -> None:
        begun = self._begun(index)
        if begun:
            logger.error("%s; %d requests are given up", error, len(begun))
        # If the engine goes on some day, it need not go on with these.
        self.clients[index].abort(self._router.loads[index].own_ids, "abort")
        self._router.forget(index)
        self.clients[index].fail_questions(error)
        self._on_lost(error, begun)

    def _begun(self, index: int) -> list[str]:
        """Those that it has taken: of the others whoever adds them hears."""
        return [request_id for request_id in self._router.loads[index].own_ids if request_id not in self._adding]

    # ---- the end ----

    def replace(self, index: int, link: EngineLink) -> None:
        """Another engine takes the place of one that is gone."""
        self.clients[index].lose(EngineLost(f"replica {index} was lost; it is started again"))
        self.clients[index].close()
        try:
            self.clients[index] = self._client(index, link)
        except EngineLost as error:
            logger.error("the replica %d that was started again is gone: %s", index, error)

    def lose(self, error: StagelineError) -> None:
        """As if all were gone."""
        for client in self.clients:
            client.lose(error)

    def close(self) -> None:
        """May be called twice."""
        for watch in self._watches:
            watch.stop()
        for client in self.clients:
            client.close()


def _nothing() -> None:
    pass
