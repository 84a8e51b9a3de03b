"""Of several engines each request is one's: what one tells, loses or refuses concerns its own requests only."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any

import pytest

from stageline.config.engine_config import EngineConfig
from stageline.engine import replicas
from stageline.engine.replicas import ReplicaSet
from stageline.errors import EngineLost, EngineSilent, NotReady, QueueFull, RequestError, StagelineError
from stageline.request import EngineRequest, RequestUpdate
from tests.unit.fake_llm import FakeClock
from tests.unit.stats_examples import request, update


class Client:
    """As `EngineClient`, without an engine: it takes what it is asked, unless it has an `answer` for it."""

    def __init__(self, link: int, clock: FakeClock, *callbacks: Any) -> None:
        self.link = link
        self.on_updates, self.on_loss, self.on_down, _, self.on_beat = callbacks
        self.is_ready, self.keeps_requests, self.stalled_s, self.heard_s = True, False, 0.0, clock.now_s()
        self.loss: StagelineError | None = None
        self.down: NotReady | None = None
        self.added: list[str] = []
        self.aborted: list[str] = []
        self.answer: StagelineError | None = None
        self.is_closed = False

    def receive(self) -> None:
        pass

    async def wait_until_ready(self) -> None:
        pass

    async def add(self, requests: Sequence[EngineRequest]) -> None:
        self.added += [one.request_id for one in requests]
        if self.answer is not None:
            if isinstance(self.answer, EngineLost):
                self.lose(self.answer)
            raise self.answer

    def abort(self, request_ids: Sequence[str], finish_reason: str) -> None:
        self.aborted += request_ids

    def fail_questions(self, error: StagelineError, keys: Sequence[str] | None = None) -> None:
        pass

    def lose(self, error: StagelineError) -> None:
        if self.loss is None:
            self.loss, self.is_ready = error, False
            self.on_loss(error)

    def close(self) -> None:
        self.is_closed = True


class Heard:
    """What a set of replicas told its owner."""

    def __init__(self) -> None:
        self.updates: list[RequestUpdate] = []
        self.lost: list[tuple[StagelineError, list[str]]] = []

    def lose(self, error: StagelineError, request_ids: Collection[str]) -> None:
        self.lost.append((error, sorted(request_ids)))


Story = Callable[[ReplicaSet, list[Any], Heard, FakeClock], Awaitable[None]]


@pytest.fixture
def tell(monkeypatch: pytest.MonkeyPatch) -> Callable[[Story], None]:
    """Runs a story about two replicas."""
    monkeypatch.setattr(replicas, "EngineClient", Client)

    async def run(story: Story) -> None:
        heard, clock, links = Heard(), FakeClock(), [0, 1]
        config = EngineConfig(model="m")
        both: Any = ReplicaSet(config, links, clock, heard.updates.extend, heard.lose, lambda: None)  # type: ignore[arg-type]
        try:
            await story(both, both.clients, heard, clock)
        finally:
            both.close()

    return lambda story: asyncio.run(run(story))


async def _add(both: ReplicaSet, *names: str) -> None:
    for name in names:
        await both.add([request(name)])


def test_news_aborts_and_losses_concern_the_replica_that_has_the_request(tell: Callable[[Story], None]) -> None:
    async def story(both: ReplicaSet, clients: list[Client], heard: Heard, clock: FakeClock) -> None:
        await _add(both, "a", "b", "c", "d")
        assert (clients[0].added, clients[1].added) == (["a", "c"], ["b", "d"])
        both.abort(["a", "b"], "abort")
        assert (clients[0].aborted, clients[1].aborted) == (["a"], ["b"])
        clients[0].on_updates([update("c", 1.0), update("a", 1.0), update("d", 1.0)])
        assert [one.request_id for one in heard.updates] == ["c"], "of what it has not, nothing is believed"
        both.abort(["a", "b"], "abort")
        assert (clients[0].aborted, clients[1].aborted) == (["a"], ["b"]), "once"
        error = EngineLost("killed")
        clients[1].lose(error)
        assert heard.lost == [(error, ["d"])]
        both.check_health(clock.now_s())
        await _add(both, "e", "f")
        assert clients[0].added == ["a", "c", "e", "f"]

    tell(story)


@pytest.mark.parametrize("answer", [EngineLost("killed"), QueueFull("full", 1.0), NotReady("down", 1.0)], ids=repr)
def test_what_one_replica_cannot_take_goes_to_another(answer: StagelineError, tell: Callable[[Story], None]) -> None:
    async def story(both: ReplicaSet, clients: list[Client], heard: Heard, clock: FakeClock) -> None:
        clients[0].answer = answer
        await _add(both, "a")
        assert clients[1].added == ["a"]
        assert not any(names for _, names in heard.lost), "nobody hears of what was not lost"
        clients[0].on_updates([update("a", 1.0)])
        assert heard.updates == []
        clients[1].answer = answer
        with pytest.raises(type(answer)):
            await _add(both, "b")
        assert not any("b" in load for load in both._router.loads), "what was not taken is no load"

    tell(story)


def test_a_request_that_is_wrong_is_asked_of_nobody_else(tell: Callable[[Story], None]) -> None:
    async def story(both: ReplicaSet, clients: list[Client], heard: Heard, clock: FakeClock) -> None:
        clients[0].answer = RequestError("too long", "prompt")
        with pytest.raises(RequestError):
            await _add(both, "a")
        assert clients[1].added == []

    tell(story)


def test_health_is_that_of_the_best_replica_and_silence_draws_no_requests(tell: Callable[[Story], None]) -> None:
    async def story(both: ReplicaSet, clients: list[Client], heard: Heard, clock: FakeClock) -> None:
        clock.time_s += 60
        clients[1].heard_s = clock.now_s()
        assert both.healthy(clock.now_s()) == [1]
        await _add(both, "a", "b")
        assert clients[0].added == []
        clients[1].is_ready, clients[1].down = False, NotReady("a stage was lost", 5.0)
        with pytest.raises(NotReady, match="a stage was lost"):
            both.check_health(clock.now_s())
        clients[1].heard_s -= 60
        with pytest.raises(EngineSilent, match="no sign of life"):
            both.check_health(clock.now_s())
        for client in clients:
            client.lose(EngineLost("killed"))
        with pytest.raises(EngineLost, match="killed"):
            both.check_health(clock.now_s())

    tell(story)


def test_one_that_is_down_and_keeps_requests_gets_none_while_another_is_ready(tell: Callable[[Story], None]) -> None:
    async def story(both: ReplicaSet, clients: list[Client], heard: Heard, clock: FakeClock) -> None:
        await _add(both, "a", "b")
        clients[0].is_ready, clients[0].keeps_requests, clients[0].down = False, True, NotReady("down", 5.0)
        clients[0].on_down(clients[0].down, True)
        assert heard.lost == []
        await _add(both, "c", "d", "e")
        assert clients[1].added == ["b", "c", "d", "e"]
        clients[1].lose(EngineLost("killed"))
        both.check_takes_requests(clock.now_s())
        await _add(both, "f")
        assert clients[0].added == ["a", "f"]
        clients[0].on_down(clients[0].down, False)
        assert heard.lost[-1] == (clients[0].down, ["a", "f"])

    tell(story)


def test_another_engine_takes_the_place_of_a_lost_one(tell: Callable[[Story], None]) -> None:
    async def story(both: Any, clients: list[Client], heard: Heard, clock: FakeClock) -> None:
        await _add(both, "a")
        old = clients[0]
        both.replace(0, 7)
        assert old.is_closed and heard.lost[-1][1] == ["a"], "also if its end was not noticed yet"
        assert clients[0].link == 7
        await _add(both, "b", "c")
        assert len(clients[0].added) == 1

    tell(story)
