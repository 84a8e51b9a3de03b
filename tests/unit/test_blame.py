"""A broken link's other end is to blame unless it answers afterwards, and whoever knows better is heard first."""

from __future__ import annotations

from typing import Any

import pytest

from stageline.executor.blame import Blame
from stageline.executor.messages import Failed
from stageline.executor.watch import Watch
from stageline.pipeline.rank_layout import RankLayout

RANKS = RankLayout([1, 2, 1, 1])
BROKE = "its link to stage 1, at 10.0.0.2:29501, broke"
HEAD, NODE_1, NODE_2 = (
    "the head (10.0.0.1:29500; stage 0)",
    "node 1 (b, 10.0.0.2:29501; stages 1 to 2)",
    "node 2 (c, 10.0.0.3:29501; stage 3)",
)


class Machines:
    """Stage 0 on the head, 1 and 2 on node 1, 3 on node 2; what is asked of `RemoteStages`."""

    num_local = 1

    def __init__(self) -> None:
        self.connected = {"node 1", "node 2"}

    def machine_of(self, stage_index: int) -> str:
        return ["", "node 1", "node 1", "node 2"][stage_index]

    def describe_machine(self, stage_index: int) -> str:
        return [HEAD, NODE_1, NODE_1, NODE_2][stage_index]

    def is_machine_connected(self, stage_index: int) -> bool:
        return self.machine_of(stage_index) in self.connected


class Engine:
    """Time passes as told; everybody owes an answer since `asks`, until it `answers`."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.machines: Any = Machines()
        self.watch = Watch(4.0, 60.0, RANKS.num_processes, self.now_s)
        for process in range(RANKS.num_processes):
            self.watch.loaded(process)
        self.blame = Blame(RANKS, self.watch, self.machines)

    def asks(self, but: tuple[int, ...] = ()) -> None:
        self.watch.stages_to_ask()
        for process in but:
            self.watch.heard_of(process)

    def wait(self, duration_s: float) -> None:
        for _ in range(round(duration_s * 10)):
            self.now_s += 0.1
            self.watch.look(self.now_s)

    def report(self, stage_index: int = 0, link_to: int = 1, message: str = BROKE) -> int | None:
        return self.blame.begin(Failed(stage_index, message, "", False, 0, link_to), self.now_s)


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_a_machine_that_hung_up_is_lost_at_once(engine: Engine) -> None:
    assert engine.report() == 1
    engine.machines.connected.remove("node 1")
    loss = engine.blame.look(engine.now_s)
    assert loss is not None and loss.stage_index == 1
    assert loss.reason.startswith(f"{NODE_1}: its connection to the head is closed") and BROKE in loss.reason


def test_others_have_a_second_to_say_more_and_then_the_silent_end_is_lost(engine: Engine) -> None:
    engine.report()
    assert engine.blame.look(engine.now_s) is None
    assert engine.blame.next_look_s() == engine.now_s + 0.1
    engine.wait(0.9)
    assert engine.blame.look(engine.now_s) is None
    engine.wait(0.2)
    loss = engine.blame.look(engine.now_s)
    assert loss is not None and loss.stage_index == 1
    assert loss.reason == f"{NODE_1}: rank 0: no answer for 1.1 s, and stage 0 says: {BROKE}"


def test_a_machine_of_which_no_stage_answers_is_silent_as_a_whole(engine: Engine) -> None:
    engine.report()
    engine.asks(but=(0, 4))
    engine.wait(1.1)
    loss = engine.blame.look(engine.now_s)
    assert loss is not None and loss.stage_index == 1
    assert loss.reason == f"{NODE_1}: no answer for 1.1 s, from any of its stages, and stage 0 says: {BROKE}"


def test_who_was_silent_before_is_lost_at_once_and_other_silent_machines_are_told(engine: Engine) -> None:
    engine.asks(but=(0,))
    engine.wait(2.0)
    engine.report()
    loss = engine.blame.look(engine.now_s)
    assert loss is not None and loss.stage_index == 1
    assert "; nor does node 2 answer: no other machine does; is this one's network up?" in loss.reason


def test_only_an_answer_to_a_later_question_clears_the_other_end(engine: Engine) -> None:
    engine.report()
    assert engine.blame.answered(1, engine.now_s - 0.01) is None
    assert engine.blame.answered(3, engine.now_s) is None
    loss = engine.blame.answered(1, engine.now_s)
    assert loss is not None and loss.stage_index == 0
    assert loss.reason == (
        f"{HEAD}: {BROKE}, though stage 1 answers: look at the network between the head and node 1"
    )


def test_a_silent_process_is_named_with_its_machine(engine: Engine) -> None:
    engine.asks(but=(0, 1, 2, 3))
    engine.wait(4.5)
    silence = engine.watch.silence()
    assert silence is not None
    loss = engine.blame.silent(*silence)
    assert str(loss) == f"stage 3 (s3) was lost: {NODE_2}: no sign of life within --heartbeat-timeout-s 4"


def test_a_rank_that_misses_another_is_believed_if_no_end_is_noticed(engine: Engine) -> None:
    report = Failed(1, "RankGone: the other ranks", "Traceback", False, 1, link_to=1)
    assert engine.blame.begin(report, engine.now_s) is None
    assert engine.blame.answered(1, engine.now_s) is None
    engine.wait(0.4)
    assert engine.blame.look(engine.now_s) is None
    engine.wait(0.2)
    loss = engine.blame.look(engine.now_s)
    assert loss is not None and loss.reason == f"{NODE_1}: rank 1: RankGone: the other ranks"
    left = engine.blame.word_of(2)
    assert left is not None and left.remote_traceback == "Traceback" and engine.blame.word_of(1) is None


def test_the_first_report_is_looked_into_and_what_leads_nowhere_is_none(engine: Engine) -> None:
    assert engine.blame.next_look_s() is None and engine.blame.look(engine.now_s) is None
    assert engine.report() == 1 and engine.report(2, 3) is None
    assert engine.blame.answered(4, engine.now_s) is None
