"""How many prompt tokens go into one microbatch: chunks that fill the pipeline without costing more than they gain."""

from __future__ import annotations

import math

CHUNK_OVERHEAD_TOKENS = 64
"""The fixed cost of a chunk on a stage (launch, weights, messages) in tokens' worth of compute, until measured."""

MIN_CHUNK_TOKENS = 32


def prefill_tokens_per_microbatch(
    num_waiting_tokens: int, num_stages: int, chunk_overhead_tokens: float = CHUNK_OVERHEAD_TOKENS
) -> int:
    """Prompt tokens for one microbatch, so that the chunks of what waits overlap on the stages.

    With F the time of all waiting tokens on one stage and c the fixed cost of a chunk, the makespan (M+P-1)(F/M + c) is
    least for M = sqrt((P-1)·F/c) chunks. One stage takes everything at once.

    Args:
        num_waiting_tokens: prompt tokens not yet launched, over all requests that could be scheduled.
        chunk_overhead_tokens: c, in tokens' worth of compute.
    Returns: at least MIN_CHUNK_TOKENS.
    Source: derived in place; the optimum of a balanced pipeline's makespan over the number of equal chunks.
    """
    if num_stages == 1:
        return max(num_waiting_tokens, MIN_CHUNK_TOKENS)
    num_chunks = max(1.0, math.sqrt((num_stages - 1) * num_waiting_tokens / chunk_overhead_tokens))
    return max(MIN_CHUNK_TOKENS, math.ceil(num_waiting_tokens / num_chunks))


def chunk_length(gap: int, num_computed_tokens: int, room: int, block_size: int) -> int:
    """Tokens of one prompt to schedule into `room`; a chunk that is not the last ends on a block boundary if it can."""
    if gap <= room:
        return gap
    end = num_computed_tokens + room
    aligned = end - end % block_size
    return aligned - num_computed_tokens if aligned > num_computed_tokens else room
