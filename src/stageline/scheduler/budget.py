"""How much goes into one microbatch: decodes levelled over the window, prompts in chunks that fill the pipeline."""

from __future__ import annotations

import math

CHUNK_OVERHEAD_TOKENS = 64
"""The fixed cost of a chunk on a stage (launch, weights, messages), in tokens' worth of compute."""

MIN_CHUNK_TOKENS = 32


def decodes_per_microbatch(num_decoding: int, window: int) -> int:
    """Most decodes for one microbatch, so that all decoding requests spread evenly over the window.

    Args:
        num_decoding: requests in decode, in flight or not.
        window: microbatches that may be in flight.
    """
    return -(-num_decoding // window)


def prefill_tokens_per_microbatch(num_waiting_tokens: int, num_stages: int) -> int:
    """Prompt tokens for one microbatch, so that the chunks of what waits overlap on the stages.

    With F the time of all waiting tokens on one stage and c the fixed cost of a chunk, the makespan (M+P-1)(F/M + c) is
    least for M = sqrt((P-1)·F/c) chunks. One stage takes everything at once.

    Args:
        num_waiting_tokens: prompt tokens not yet launched, over all requests that could be scheduled.
    Returns: at least MIN_CHUNK_TOKENS.
    Source: derived in place; the optimum of a balanced pipeline's makespan over the number of equal chunks.
    """
    if num_stages == 1:
        return max(num_waiting_tokens, MIN_CHUNK_TOKENS)
    num_chunks = max(1.0, math.sqrt((num_stages - 1) * num_waiting_tokens / CHUNK_OVERHEAD_TOKENS))
    return max(MIN_CHUNK_TOKENS, math.ceil(num_waiting_tokens / num_chunks))


def chunk_length(gap: int, num_computed_tokens: int, room: int, block_size: int) -> int:
    """Tokens of one prompt to schedule into `room`; a chunk that is not the last ends on a block boundary if it can."""
    if gap <= room:
        return gap
    end = num_computed_tokens + room
    aligned = end - end % block_size
    return aligned - num_computed_tokens if aligned > num_computed_tokens else room
