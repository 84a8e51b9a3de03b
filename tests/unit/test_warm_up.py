"""A warm-up brings what users bring: their sizes, made to fit the model, and nothing the prefix cache could answer."""

from __future__ import annotations

from typing import Any, cast

from stageline.clock import MonotonicClock
from stageline.engine.core import EngineCore
from stageline.engine.warm_up import PROOF, USUAL_SIZES, WarmUpRound, warm_up
from stageline.request import EngineRequest


class RecordingCore:
    """Ends a round after two steps."""

    def __init__(self) -> None:
        self.rounds: list[list[EngineRequest]] = []
        self.num_steps_left = 0
        self.has_forgotten = False

    def add(self, request: EngineRequest) -> None:
        if not self.has_work:
            self.rounds.append([])
            self.num_steps_left = 2
        self.rounds[-1].append(request)

    @property
    def has_work(self) -> bool:
        return self.num_steps_left > 0

    def step(self) -> list[Any]:
        self.num_steps_left -= 1
        return []

    def forget_stats(self) -> None:
        self.has_forgotten = True


def _warm_up(rounds: tuple[WarmUpRound, ...], max_request_tokens: int = 4096) -> RecordingCore:
    core = RecordingCore()
    warm_up(cast(EngineCore, core), rounds, max_request_tokens, 50_000, MonotonicClock())
    assert core.has_forgotten and not core.has_work
    return core


def test_the_proof_is_one_request_with_a_decode() -> None:
    [[request]] = _warm_up(PROOF).rounds
    assert (len(request.prompt_token_ids), request.max_tokens) == (1, 2)


def test_each_round_runs_its_requests_together_and_ends_before_the_next() -> None:
    core = _warm_up(USUAL_SIZES)
    found = [(len(r), len(r[0].prompt_token_ids), r[0].max_tokens) for r in core.rounds]
    assert found == [(s.num_requests, s.num_prompt_tokens, s.num_output_tokens) for s in USUAL_SIZES]
    assert len({request.request_id for requests in core.rounds for request in requests}) == sum(f[0] for f in found)


def test_no_two_prompts_share_a_prefix() -> None:
    requests = [request for requests in _warm_up((*PROOF, *USUAL_SIZES)).rounds for request in requests]
    assert len({request.prompt_token_ids[0] for request in requests}) == len(requests)


def test_sizes_are_made_to_fit_the_shortest_model() -> None:
    for most in (2, 3, 17, 100):
        for requests in _warm_up(USUAL_SIZES, most).rounds:
            for request in requests:
                assert request.max_tokens >= 1 and len(request.prompt_token_ids) >= 1
                assert len(request.prompt_token_ids) + request.max_tokens <= most
