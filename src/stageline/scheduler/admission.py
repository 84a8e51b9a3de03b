"""Which requests can be served at all, which may start now, and what those take that are not through their prompts."""

from __future__ import annotations

from collections.abc import Iterable

from stageline.cost.stage_time import StageTimeCosts
from stageline.errors import RequestError
from stageline.kv.kv_cache_manager import KVCacheManager
from stageline.request import EngineRequest, RequestFailure
from stageline.scheduler.budget import PromptWork
from stageline.scheduler.running_requests import RunningRequests
from stageline.scheduler.scheduled_request import ScheduledRequest
from stageline.scheduler.waiting_queue import WaitingQueue

_MOST_LOSSES = 4
"""Fewer than those after which the whole pipeline is given up, see `stageline.engine.revival`."""


def check_can_be_served(asked: EngineRequest, max_model_len: int, kv: KVCacheManager) -> None:
    """Raises: RequestError if a request can never fit, with the numbers."""
    num_tokens = len(asked.prompt_token_ids) + asked.max_tokens
    if not asked.prompt_token_ids or num_tokens > max_model_len:
        raise RequestError(
            f"{len(asked.prompt_token_ids)} prompt tokens and max_tokens {asked.max_tokens} for a model length of "
            f"{max_model_len}; shorten the prompt or lower max_tokens",
            "prompt",
        )
    num_blocks = _most_blocks(asked, kv)
    if num_blocks > kv.num_blocks:
        raise RequestError(
            f"{len(asked.prompt_token_ids)} prompt tokens and max_tokens {asked.max_tokens} need {num_blocks} "
            f"KV cache blocks of {kv.block_size} tokens, but the pipeline has {kv.num_blocks}; lower "
            f"max_tokens, shorten the prompt, or give the engine more --kv-cache-memory",
            "max_tokens",
        )


def why_not_again(asked: EngineRequest, kv: KVCacheManager, num_losses: int) -> RequestFailure | None:
    """Why a request that was accepted cannot be computed again in this KV cache, which may be a smaller one.

    Args:
        num_losses: how often in a row stages were lost before they had a token of it.
    """
    if num_losses >= _MOST_LOSSES:
        return RequestFailure(
            f"the pipeline was lost {num_losses} times in a row while this request was computed, and it may be why: "
            "others go on without it; the server's log tells what the stages died of"
        )
    num_blocks = _most_blocks(asked, kv)
    if num_blocks <= kv.num_blocks:
        return None
    return RequestFailure(
        f"the pipeline was started again and has {kv.num_blocks} KV cache blocks of {kv.block_size} tokens now; "
        f"{len(asked.prompt_token_ids)} prompt tokens and max_tokens {asked.max_tokens} need {num_blocks}; lower "
        "max_tokens, or give the engine a fixed --kv-cache-memory",
        "max_tokens",
    )


def _most_blocks(asked: EngineRequest, kv: KVCacheManager) -> int:
    # The last token is never fed back, so its key and value need no place.
    return kv.blocks_for(len(asked.prompt_token_ids) + asked.max_tokens - 1)


def has_blocks_for(request: ScheduledRequest, running: RunningRequests, kv: KVCacheManager) -> bool:
    """All its known tokens fit beside what running prompts still need and one block of growth for each request.

    Admitting less carefully would only preempt it again. A request that would run alone is always let in.
    """
    if not running:
        return True
    asking = (request, *running.prefilling)
    return kv.has_room(((one.table, len(one.token_ids)) for one in asking), num_spare=len(running))


def prompt_work(costs: StageTimeCosts, waiting: WaitingQueue, prefilling: Iterable[ScheduledRequest]) -> PromptWork:
    """Of prompts that wait or are partly computed. Args: costs: fix the unit."""
    total_s = costs.token_s * waiting.num_tokens + costs.prefill_attention_s * waiting.num_squared_tokens
    done_s, num_tokens = 0.0, waiting.num_tokens
    for request in prefilling:
        reused, num_done = request.num_reused_tokens, request.num_computed_tokens - request.num_reused_tokens
        done_s += costs.prompt_s(reused, num_done)
        total_s += costs.prompt_s(reused, num_done + request.gap)
        num_tokens += num_done + request.gap
    return PromptWork(total_s, done_s, num_tokens)
