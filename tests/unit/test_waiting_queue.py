"""Waiting requests come out by importance or by length, whatever was removed in between; removed ones are let go."""

from __future__ import annotations

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stageline.scheduler.scheduled_request import ScheduledRequest
from stageline.scheduler.waiting_queue import WaitingQueue
from tests.unit.simulated_stages import engine_request


def waiting_request(arrival_index: int, num_tokens: int = 1, priority: int = 0) -> ScheduledRequest:
    asked = msgspec.structs.replace(engine_request(str(arrival_index), [1] * num_tokens, 1), priority=priority)
    return ScheduledRequest(asked, arrival_index, list(asked.prompt_token_ids))


class WaitingQueueMachine(RuleBasedStateMachine):
    """The model is a plain list of who waits."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = WaitingQueue()
        self.waiting: list[ScheduledRequest] = []
        self.preempted: list[ScheduledRequest] = []
        self.num_arrived = 0

    @rule(num_tokens=st.integers(1, 6), priority=st.integers(-1, 1))
    def arrive(self, num_tokens, priority):
        request = waiting_request(self.num_arrived, num_tokens, priority)
        self.num_arrived += 1
        self.waiting.append(request)
        self.queue.add(request)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), will_come_back=st.booleans())
    def remove(self, data, will_come_back):
        request = self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1)))
        self.queue.remove(request)
        if will_come_back:
            self.preempted.append(request)

    @precondition(lambda self: self.preempted)
    @rule(num_tokens=st.integers(0, 3))
    def come_back_longer(self, num_tokens):
        request = self.preempted.pop()
        request.token_ids += [1] * num_tokens
        self.waiting.append(request)
        self.queue.add(request)

    @invariant()
    def the_first_of_each_order_is_the_first(self):
        assert len(self.queue) == len(self.waiting)
        assert self.queue.num_tokens == sum(len(request.token_ids) for request in self.waiting)
        by_importance = sorted(self.waiting, key=lambda r: (r.asked.priority, r.arrival_index))
        by_length = sorted(self.waiting, key=lambda r: (r.asked.priority, len(r.token_ids), r.arrival_index))
        assert self.queue.most_important() is (by_importance[0] if by_importance else None)
        assert self.queue.shortest() is (by_length[0] if by_length else None)


TestWaitingQueue = WaitingQueueMachine.TestCase
TestWaitingQueue.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_removed_requests_are_let_go_though_they_never_come_up():
    """Ten thousand wait and almost all are aborted, from the end, where no look at the first would find them."""
    queue = WaitingQueue()
    requests = [waiting_request(index) for index in range(10_000)]
    for request in requests:
        queue.add(request)
    for request in reversed(requests[10:]):
        queue.remove(request)
    assert len(queue) == 10
    assert len(queue._by_importance) + len(queue._by_length) < 200
    assert queue.most_important() is requests[0]
