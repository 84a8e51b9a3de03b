"""Who may take part: a rank is one node's, in whatever order they come, and what does not fit is refused."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stageline.cluster.handshake import HandshakeError, share_stages
from stageline.cluster.membership import SILENCE_S, Answers, Membership, Wanted
from stageline.cluster.messages import (
    AreYouThere,
    Declined,
    Hello,
    Here,
    Leaving,
    Offer,
    Ready,
    Refused,
    SayHello,
    Software,
    Welcome,
)

SOFTWARE = Software(1, "0.1.0", "2.13.0")
WALL_S = 1e9
WANTED = Wanted(
    software=SOFTWARE,
    settings={"--block-size": "16", "--dtype": "auto"},
    model="model.gguf",
    model_digest="d1",
    num_stages=3,
    num_nodes=3,
    own_stages=None,
)


class Nodes:
    """Nodes that do what they are told, against one membership; they say it is `now_s`, exactly."""

    def __init__(self, wanted: Wanted = WANTED) -> None:
        self.membership = Membership(wanted, WALL_S)
        self.now_s = 0.0
        self.dead: set[str] = set()
        self.heard: dict[str, list[Any]] = {}

    def hello(self, name: str, **changes: Any) -> None:
        asked = {"software": SOFTWARE, "node_id": name, "host_name": name, "rank": None, "num_stages": None}
        self.say(name, Hello(**{**asked, "address": f"10.0.0.9:{len(name)}", "settings": {}, **changes}))

    def say(self, name: str, message: Any) -> None:
        self.deliver(self.membership.take(name.encode(), message, self.now_s))

    def deliver(self, answers: Answers) -> None:
        for identity, message in answers:
            name = identity.decode()
            self.heard.setdefault(name, []).append(message)
            if name in self.dead:
                continue
            if isinstance(message, AreYouThere):
                self.say(name, Here(message.question, WALL_S + self.now_s))
            elif isinstance(message, Offer):
                self.say(name, Ready("d1"))

    def pass_time(self, duration_s: float) -> None:
        self.now_s += duration_s
        self.deliver(self.membership.forget_silent(self.now_s))

    def ranks(self) -> dict[str, int]:
        return {member.hello.node_id: rank for rank, member in self.membership.members.items()}

    def refusal(self, name: str) -> Refused:
        [refused] = [message for message in self.heard[name] if isinstance(message, Refused)]
        return refused


@pytest.mark.parametrize("order", list(itertools.permutations(["one", "two", "any"])))
def test_ranks_are_as_asked_whoever_comes_first(order: tuple[str, ...]) -> None:
    nodes = Nodes(replace(WANTED, num_nodes=4, num_stages=4))
    for name in order:
        assert not nodes.membership.is_complete()
        nodes.hello(name, rank={"one": 1, "two": 2}.get(name))
    assert nodes.ranks() == {"one": 1, "two": 2, "any": 3}
    assert nodes.membership.is_complete() and nodes.membership.missing_ranks() == []
    welcomes = [message.rank for message in nodes.heard["any"] if isinstance(message, Welcome)]
    assert welcomes[-1] == 3


def test_nobody_is_moved_once_stages_run() -> None:
    nodes = Nodes()
    nodes.hello("any")
    nodes.membership.is_settled = True
    nodes.hello("one", rank=1)
    assert nodes.refusal("one").step == "rank"
    assert nodes.ranks() == {"any": 1}


def test_a_rank_that_is_taken_is_refused_but_that_of_a_dead_node_is_free() -> None:
    nodes = Nodes()
    nodes.hello("one", rank=1)
    nodes.hello("twin", rank=1)
    assert nodes.refusal("twin").step == "rank" and "one" in nodes.refusal("twin").reason
    nodes.dead.add("one")
    nodes.hello("next", rank=1)
    assert nodes.ranks() == {"one": 1}
    nodes.pass_time(SILENCE_S)
    assert nodes.ranks() == {"next": 1}


def test_who_wants_any_rank_gets_that_of_a_dead_node_and_is_refused_only_if_all_live() -> None:
    nodes = Nodes()
    nodes.hello("one", rank=1)
    nodes.hello("two")
    nodes.hello("three")
    assert "--nnodes 3" in nodes.refusal("three").reason
    nodes.dead.add("two")
    nodes.hello("next")
    assert nodes.ranks() == {"one": 1, "two": 2}
    nodes.pass_time(SILENCE_S)
    assert nodes.ranks() == {"one": 1, "next": 2}


def test_a_node_that_comes_back_keeps_its_place_under_its_new_connection() -> None:
    nodes = Nodes()
    nodes.hello("one", rank=1)
    hello = nodes.membership.members[1].hello
    nodes.deliver(nodes.membership.take(b"one-again", hello, nodes.now_s))
    assert nodes.membership.members[1].identity == b"one-again"


@pytest.mark.parametrize(
    ("changes", "step", "words"),
    [
        ({"software": msgspec.structs.replace(SOFTWARE, protocol=0)}, "software", ["protocol is 0", "1 on the head"]),
        ({"software": msgspec.structs.replace(SOFTWARE, torch="2.1")}, "software", ["torch is 2.1", "2.13.0 on"]),
        ({"settings": {"--block-size": "32"}}, "settings", ["--block-size is 32 on the node", "16 on the head"]),
        ({"rank": 3}, "rank", ["--node-rank is 3", "--nnodes 3"]),
        ({"rank": 0}, "rank", ["--node-rank is 0"]),
        ({"num_stages": 2}, "stages", ["too many stages", "node 1 2"]),
        ({"num_stages": 0}, "stages", ["--stages is 0", "at least 1"]),
        ({"address": "10.0.0.9:5\nERROR"}, "connection", ["'10.0.0.9:5\\nERROR' is no address"]),
        ({"num_stages": -5}, "stages", ["--stages is -5", "at least 1"]),
    ],
)
def test_what_does_not_fit_is_refused_with_both_values(changes: dict[str, Any], step: str, words: list[str]) -> None:
    nodes = Nodes()
    nodes.hello("one", **changes)
    assert nodes.refusal("one").step == step
    assert all(word in nodes.refusal("one").reason for word in words), nodes.refusal("one")
    assert nodes.ranks() == {}


def test_a_name_is_one_line_of_the_log() -> None:
    nodes = Nodes()
    nodes.hello("one", host_name="b\nERROR all is lost" + "x" * 100)
    assert str(nodes.membership.members[1]).startswith("node 1 (b?ERROR all is lostx") and len(nodes.ranks()) == 1
    assert len(str(nodes.membership.members[1])) < 100


def test_another_model_is_refused_also_by_the_head() -> None:
    nodes = Nodes()
    nodes.dead.add("one")
    nodes.hello("one")
    nodes.say("one", Ready("d2"))
    assert nodes.refusal("one").step == "model"
    nodes.hello("two")
    nodes.dead.add("two")
    nodes.say("two", Declined("model", "other files"))
    assert nodes.ranks() == {}


def test_who_is_not_known_any_more_is_told_to_join_again() -> None:
    nodes = Nodes()
    nodes.hello("one")
    nodes.dead.add("one")
    assert (nodes.membership.num_here, nodes.membership.missing_ranks()) == (1, [2])
    nodes.deliver(nodes.membership.ask_all(nodes.now_s))
    assert not nodes.membership.is_complete()
    assert (nodes.membership.num_here, nodes.membership.missing_ranks()) == (0, [1, 2])
    nodes.pass_time(SILENCE_S)
    nodes.say("one", Here(1, WALL_S))
    assert isinstance(nodes.heard["one"][-1], SayHello)


def test_a_node_that_leaves_makes_room() -> None:
    nodes = Nodes()
    nodes.hello("one")
    nodes.hello("two")
    assert nodes.membership.is_complete()
    nodes.say("one", Leaving())
    assert nodes.membership.missing_ranks() == [1]
    nodes.hello("next")
    assert nodes.ranks() == {"next": 1, "two": 2} and nodes.membership.is_complete()


def test_without_a_number_of_nodes_their_stages_decide_when_all_are_there() -> None:
    nodes = Nodes(replace(WANTED, num_nodes=None, num_stages=4))
    nodes.hello("one", num_stages=2)
    assert not nodes.membership.is_complete()
    nodes.hello("big", num_stages=2)
    assert nodes.refusal("big").step == "stages"
    nodes.hello("two")
    assert nodes.membership.is_complete()
    assert nodes.membership.shares() == {0: 1, 1: 2, 2: 1}


@given(st.dictionaries(st.integers(0, 9), st.none() | st.integers(1, 4), min_size=1), st.integers(1, 40))
def test_shares_sum_to_the_stages_or_are_refused(asked: dict[int, int | None], num_stages: int) -> None:
    try:
        shares = share_stages(asked, num_stages)
    except HandshakeError as error:
        assert error.step == "stages"
        least = sum(count or 1 for count in asked.values())
        assert least > num_stages or (None not in asked.values() and least < num_stages)
        return
    assert sum(shares.values()) == num_stages and min(shares.values()) >= 1
    assert all(count in (None, shares[rank]) for rank, count in asked.items())
    equal = [shares[rank] for rank, count in asked.items() if count is None]
    assert not equal or max(equal) - min(equal) <= 1
