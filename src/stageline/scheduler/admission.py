"""Which requests can be served at all, however long they wait."""

from __future__ import annotations

from stageline.errors import RequestError
from stageline.kv.kv_cache_manager import KVCacheManager
from stageline.request import EngineRequest


def check_can_be_served(asked: EngineRequest, max_model_len: int, kv: KVCacheManager) -> None:
    """Raises: RequestError if a request can never fit, with the numbers."""
    num_tokens = len(asked.prompt_token_ids) + asked.max_tokens
    if not asked.prompt_token_ids or num_tokens > max_model_len:
        raise RequestError(
            f"{len(asked.prompt_token_ids)} prompt tokens and max_tokens {asked.max_tokens} for a model length of "
            f"{max_model_len}; shorten the prompt or lower max_tokens",
            "prompt",
        )
    # The last token is never fed back, so its key and value need no place.
    num_blocks = kv.blocks_for(num_tokens - 1)
    if num_blocks > kv.num_blocks:
        raise RequestError(
            f"{len(asked.prompt_token_ids)} prompt tokens and max_tokens {asked.max_tokens} need {num_blocks} "
            f"KV cache blocks of {kv.block_size} tokens, but the pipeline has {kv.num_blocks}; lower "
            f"max_tokens, shorten the prompt, or give the engine more --kv-cache-memory",
            "max_tokens",
        )
