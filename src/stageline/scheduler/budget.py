"""How many prompt tokens go into one microbatch: chunks that fill the pipeline without costing more than they gain,
and that the decodes which share it, or queue behind it, can bear."""

from __future__ import annotations

import math
from dataclasses import dataclass

from stageline.cost.stage_time import StageTimeCosts

MIN_CHUNK_TOKENS = 32

LEAST_TOKENS_BESIDE_DECODES = 8
"""What a prompt gets in a microbatch whatever its predicted time: it must come to an end also where other programs make
times meaningless. A microbatch reads all weights, which takes about as long as computing 8 tokens on a CPU and more
elsewhere, so even a lone decode gets no slower than about twice by so few."""

_LEAST_CHUNK_COST_TOKENS, _MOST_CHUNK_COST_TOKENS = 4, 512
_DECODES_PER_PROMPT = 8
_LARGEST_SHARE = 16.0
_EXCESS = 0.125
"""By how much a chunk may be longer than it should, to end on a block boundary or to leave no crumbs."""


@dataclass(frozen=True)
class PromptWork:
    """What the prompts that are not done yet take on the slowest stage.

    Args:
        total_s: all of it, in seconds or whatever the costs are in.
        done_s: what was launched of it already.
        num_tokens: tokens of it.
    """

    total_s: float
    done_s: float
    num_tokens: int


def next_chunk_s(work: PromptWork, costs: StageTimeCosts, stages_worth: float, decodes_s: float = 0.0) -> float:
    """Time of prompts for the next microbatch, so that the chunks of all that waits overlap on the stages.

    With F the time of all on the slowest stage, c the fixed cost of a chunk and S the stages' times in units of the
    slowest one's, M chunks take (M + S - 1)(F/M + c) if they take equally long, and longer if they do not; that is
    least for M = sqrt((S-1)·F/c). One stage takes everything at once. The boundaries lie at n·F/M: who stays a little
    behind one, to end on a block boundary, catches up with the next.

    Args:
        stages_worth: S, at least 1.
        decodes_s: what each microbatch takes for decodes; if it is more than c, it is what a chunk more costs.
    Source: the optimum of a proportionate flow shop's makespan, Σt + (S-1)·max t, over the number of chunks.
    """
    rest_s, fixed_s = work.total_s - work.done_s, max(decodes_s, _chunk_cost_s(work, costs))
    if work.total_s <= 0 or fixed_s <= 0:
        return math.inf
    num_chunks = max(1, round(math.sqrt(max(0.0, stages_worth - 1.0) * work.total_s / fixed_s)))
    num_done = math.floor(work.done_s / work.total_s * num_chunks + 0.5)
    return rest_s if num_done >= num_chunks - 1 else (num_done + 1) / num_chunks * work.total_s - work.done_s


def _chunk_cost_s(work: PromptWork, costs: StageTimeCosts) -> float:
    """The fixed cost of a chunk, as far as it can be believed."""
    token_s = costs.token_s or work.total_s / max(1, work.num_tokens)
    return min(max(costs.chunk_s, _LEAST_CHUNK_COST_TOKENS * token_s), _MOST_CHUNK_COST_TOKENS * token_s)


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
    """What is left of a microbatch for prompts: tokens, and time.

    Args:
        num_tokens: most tokens.
        time_s: most time on the slowest stage, which `costs` predict, in their unit.
        least_tokens: what the first prompt that takes some gets even if that takes longer.
    """

    def __init__(self, num_tokens: int, time_s: float, costs: StageTimeCosts, least_tokens: int) -> None:
        self.num_tokens = num_tokens
        self._time_s = time_s
        self._costs = costs
        self._least_tokens = least_tokens

    def tokens_after(self, num_computed_tokens: int) -> int:
        """Room for a prompt's tokens on top of those computed."""
        in_time = self._costs.prompt_tokens_in(self._time_s, num_computed_tokens)
        return min(self.num_tokens, max(self._least_tokens, in_time))

    def take(self, num_computed_tokens: int, num_tokens: int) -> None:
        """Account for a chunk of `num_tokens` on top of those computed."""
        self.num_tokens -= num_tokens
        self._least_tokens = 0
        self._time_s -= self._costs.prompt_s(num_computed_tokens, num_tokens)


def chunk_length(gap: int, num_computed_tokens: int, room: int, block_size: int, most: int | None = None) -> int:
    """Tokens of one prompt to schedule into `room`.

    A chunk that is not the last ends on a block boundary: the next one if that is little more than the room, else the
    one before, unless that would waste more than a quarter of the room.

    Args:
        most: no more than so many; None for no more than `room`.
    """
    most = room if most is None else most
    roomy = min(most, room + int(_EXCESS * room))
    if gap <= roomy:
        return gap
    room = min(room, most)
    num_over = (num_computed_tokens + room) % block_size
    num_short = -num_over % block_size
    if num_short <= num_over and room + num_short <= roomy:
        return room + num_short
    return room - num_over if 4 * num_over <= room else room
