"""A request goes where its beginning was computed, and never to a replica that is much busier than another."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stageline.engine.routing import CHUNK_TOKENS, Load, Router, most_accepted
from stageline.request import EngineRequest, RequestFailure
from tests.unit.stats_examples import request, update

ALL = [0, 1, 2]


def asking(name: str, token_ids: list[int], salt: str = "") -> EngineRequest:
    asked = request(name, cache_salt=salt)
    asked.prompt_token_ids[:] = token_ids
    return asked


def conversation(number: int, num_chunks: int) -> list[int]:
    return [number * 1000 + place for place in range(num_chunks * CHUNK_TOKENS)]


def test_requests_that_have_nothing_in_common_are_spread_evenly() -> None:
    router = Router(3)
    places = [router.place([asking(f"{n}", [n])], ALL) for n in range(12)]
    assert [places.count(index) for index in ALL] == [4, 4, 4]


def test_an_idle_server_lets_all_replicas_work_in_turn() -> None:
    router, places = Router(3), []
    for number in range(6):
        places.append(router.place([asking(f"{number}", [number])], ALL))
        router.loads[places[-1]].took(update(f"{number}", 1.0, finish_reason="stop"))
    assert sorted(places[:3]) == sorted(places[3:]) == ALL


def test_a_conversation_goes_on_where_it_began() -> None:
    router = Router(3)
    began = {n: router.place([asking(f"{n}", conversation(n, 2))], ALL) for n in range(6)}
    for turn in range(3, 6):
        for number, place in began.items():
            name = f"{number}.{turn}"
            assert router.place([asking(name, conversation(number, turn))], ALL) == place
            router.loads[place].took(update(name, 1.0, finish_reason="stop"))


def test_of_several_that_know_a_prefix_the_one_that_knows_most_is_taken() -> None:
    router = Router(2)
    router.place([asking("short", conversation(1, 1))], [0])
    router.place([asking("long", conversation(1, 3))], [1])
    assert router.place([asking("again", conversation(1, 4))], [0, 1]) == 1


def test_what_caches_do_not_share_draws_nobody() -> None:
    """Another salt, another beginning, less than a chunk, or no prefix cache at all."""
    prompt = conversation(1, 4)
    for prefers, other in (
        (True, asking("b", prompt, salt="mine")),
        (True, asking("b", [7, *prompt])),
        (True, asking("b", prompt[: CHUNK_TOKENS - 1])),
        (False, asking("b", prompt)),
    ):
        router = Router(2, uses_prefixes=prefers)
        first = router.place([asking("a", prompt)], [0, 1])
        assert router.place([other], [0, 1]) != first, other


def test_a_prompt_that_is_still_to_be_computed_weighs_more_than_one_that_was() -> None:
    router = Router(2)
    first = router.place([asking("a", conversation(1, 100))], [0, 1])
    others = [router.place([asking(f"{n}", [n])], [0, 1]) for n in range(4)]
    assert first not in others
    router.loads[first].took(update("a", 1.0))
    assert router.place([asking("b", [7])], [0, 1]) == first
    assert router.loads[first].requests == 2 + 1 / 512


def test_the_completions_of_a_request_stay_together_and_their_prompt_counts_once() -> None:
    router = Router(2)
    place = router.place([asking(f"a-{n}", [1] * 512) for n in range(8)], [0, 1])
    assert router.loads[place].requests == 9
    assert router.place([asking("b", [2])], [0, 1]) != place


def test_what_has_ended_in_any_way_is_no_load() -> None:
    load = Load()
    for name in ("done", "failed", "aborted"):
        load.add(name, 512)
    assert load.requests == 6
    load.took(update("done", 1.0, finish_reason="length"))
    load.took(update("failed", 1.0, num_tokens=0, finish_reason="error", failure=RequestFailure("broken")))
    load.ended("aborted")
    load.ended("aborted")
    load.took(update("unknown", 1.0))
    assert load.requests == 0 and load.own_ids == []


def test_requests_of_other_clients_count_as_far_as_they_were_heard_of() -> None:
    router = Router(2)
    router.loads[0].heard(3)
    assert [router.place([asking(f"{n}", [])], [0, 1]) for n in range(3)] == [1, 1, 1]
    router.loads[1].heard(5)  # three of them are its own
    assert router.loads[1].requests == 5
    router.loads[1].heard(0)  # told before they arrived
    assert router.loads[1].requests == 3


def test_a_replica_that_lost_its_cache_draws_nobody() -> None:
    router, prompt = Router(2), conversation(1, 3)
    first = router.place([asking("a", prompt)], [0, 1])
    router.forget(first)
    router.place([asking("b", [1])], [first])
    assert router.place([asking("c", prompt)], [0, 1]) != first


events = st.lists(
    st.tuples(st.sampled_from(["ask", "ask", "ask", "token", "end", "down"]), st.integers(0, 5), st.integers(1, 9)),
    max_size=200,
)


@given(events, st.integers(2, 4))
def test_imbalance_is_bounded_whatever_is_asked(events: list[tuple[str, int, int]], num_replicas: int) -> None:
    """Few conversations draw all requests; replicas come and go. Loads only grow by what was chosen."""
    router = Router(num_replicas)
    open_at: list[tuple[str, int]] = []
    for number, (event, which, num_chunks) in enumerate(events):
        if event == "ask":
            usable = [index for index in range(num_replicas) if index != which] or [0]
            before = [router.loads[index].requests for index in range(num_replicas)]
            place = router.place([asking(f"{number}", conversation(which, num_chunks))], usable)
            assert place in usable
            assert before[place] <= most_accepted(min(before[index] for index in usable))
            open_at.append((f"{number}", place))
        elif event == "down":
            router.forget(which % num_replicas)
        elif open_at:
            name, place = open_at[which % len(open_at)]
            router.loads[place].took(update(name, 1.0, finish_reason="stop" if event == "end" else None))
            if event == "end":
                open_at.remove((name, place))
    for index, load in enumerate(router.loads):
        for name, place in open_at:
            if place == index:
                load.ended(name)
        assert load.requests == 0, "what is counted is taken back in full"
