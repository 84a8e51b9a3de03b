"""How many prompt tokens go into one microbatch: chunks that fill the pipeline without costing more than they gain,
and that the decodes which share it, or queue behind it, can bear."""

from __future__ import annotations

import math

from stageline.cost.stage_time import StageTimeCosts

CHUNK_OVERHEAD_TOKENS = 64
"""The fixed cost of a chunk on a stage (launch, weights, messages) in tokens' worth of compute, until measured."""

MIN_CHUNK_TOKENS = 32

LEAST_TOKENS_BESIDE_DECODES = 8
"""What a prompt gets in a microbatch whatever its predicted time: it must come to an end also where other programs make
times meaningless. A microbatch reads all weights, which takes about as long as computing 8 tokens on a CPU and more
elsewhere, so even a lone decode gets no slower than about twice by so few."""

_DECODES_PER_PROMPT = 8
_LARGEST_SHARE = 16.0


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


def decode_slowdown(most: float, num_prompts: int, num_decoding: int) -> float:
    """How many times longer than with decodes alone a microbatch may take because of prompts.

    `most` for one prompt, however long: it cannot starve the decodes. Many prompts, a burst, get more in proportion to
    what they make wait, each weighing as much as several decodes: decodes are the more efficient the more of them there
    are, so it pays to begin them together. The share has a bound: decodes go on under an endless stream of prompts.

    Args:
        most: at least 1.
        num_prompts: requests that could get their first token now.
        num_decoding: at least 1.
    """
    share = _DECODES_PER_PROMPT * (num_prompts - 1) / num_decoding
    return 1.0 + (most - 1.0) * min(max(share, 1.0), _LARGEST_SHARE)


class PrefillRoom:
    """What is left of a microbatch for prompts: tokens, and time if decodes would wait for them.

    Args:
        num_tokens: most tokens.
        time_s: most time on the slowest stage, which `costs` predict; None if nobody waits.
    """

    def __init__(self, num_tokens: int, time_s: float | None = None, costs: StageTimeCosts | None = None) -> None:
        self._num_tokens = num_tokens
        self._time_s = time_s
        self._costs = costs
        self._least_tokens = LEAST_TOKENS_BESIDE_DECODES

    def tokens_after(self, num_computed_tokens: int) -> int:
        """Room for a prompt's tokens on top of those computed. The first prompt that takes some has a minimum."""
        if self._time_s is None or self._costs is None:
            return self._num_tokens
        in_time = self._costs.prompt_tokens_in(self._time_s, num_computed_tokens)
        return min(self._num_tokens, max(self._least_tokens, in_time))

    def take(self, num_computed_tokens: int, num_tokens: int) -> None:
        """Account for a chunk of `num_tokens` on top of those computed."""
        self._num_tokens -= num_tokens
        self._least_tokens = 0
        if self._time_s is not None and self._costs is not None:
            self._time_s -= self._costs.prompt_s(num_computed_tokens, num_tokens)


def chunk_length(gap: int, num_computed_tokens: int, room: int, block_size: int) -> int:
    """Tokens of one prompt to schedule into `room`.

    A chunk that is not the last ends on a block boundary, unless that would waste more than a quarter of the room.
    """
    if gap <= room:
        return gap
    num_over = (num_computed_tokens + room) % block_size
    return room - num_over if 4 * num_over <= room else room
