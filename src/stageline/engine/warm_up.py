"""Requests of nobody, before the first of somebody: they prove that the pipeline works, and pay what comes only once.

One token goes through all stages in any case. What an operator can ask for besides goes through in the sizes that users
bring: the first of each size touches memory, fills caches and teaches the cost model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stageline.clock import Clock
from stageline.engine.core import EngineCore
from stageline.request import EngineRequest
from stageline.sampling import SamplerSpec


@dataclass(frozen=True)
class WarmUpRound:
    """Requests that run at the same time.

    Args:
        num_requests: how many.
        num_prompt_tokens, num_output_tokens: of each.
    """

    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int


PROOF = (WarmUpRound(1, 1, 2),)
USUAL_SIZES = (WarmUpRound(1, 32, 8), WarmUpRound(1, 512, 8), WarmUpRound(8, 128, 16), WarmUpRound(32, 32, 16))


def warm_up(
    core: EngineCore, rounds: Sequence[WarmUpRound], max_request_tokens: int, vocab_size: int, clock: Clock
) -> None:
    """Run the rounds one after the other; the engine's statistics do not know of them.

    Args:
        max_request_tokens: what one request may have, prompt and output together; larger ones are made to fit.
    Raises: WorkerLost.
    """
    num_tokens_drawn = 0
    for number, sizes in enumerate(rounds):
        num_prompt = max(1, min(sizes.num_prompt_tokens, max_request_tokens - sizes.num_output_tokens))
        num_output = min(sizes.num_output_tokens, max_request_tokens - num_prompt)
        for index in range(sizes.num_requests):
            # No two prompts begin alike: a shared prefix would be taken from the cache instead of computed.
            prompt = [(num_tokens_drawn + position) % vocab_size for position in range(num_prompt)]
            num_tokens_drawn += num_prompt
            core.add(_request(f"warm-up-{number}-{index}", prompt, num_output, clock))
        while core.has_work:
            core.step()
    core.forget_stats()


def _request(request_id: str, prompt: list[int], num_output_tokens: int, clock: Clock) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampler=SamplerSpec(seed=0),
        max_tokens=num_output_tokens,
        eos_token_ids=(),
        stop_token_ids=(),
        arrival_s=clock.now_s(),
    )
