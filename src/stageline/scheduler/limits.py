"""The upper bounds that the scheduler keeps, as the operator and the pipeline set them."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class SchedulerLimits:
    """Upper bounds the scheduler keeps.

    Args:
        num_stages: stages of the pipeline.
        window: microbatches that may be in flight, at least.
        widest_window: how many may be if measured times make it worthwhile; None for no more than `window`.
        max_num_seqs: requests running at once.
        max_num_batched_tokens: tokens in one microbatch.
        max_model_len: tokens of one request.
        max_chunk_tokens: tokens of one prompt in one microbatch, or None for no bound of its own.
        max_decode_slowdown: how many times longer than with decodes alone a microbatch may take because of a prompt.
        look_ahead: have one microbatch more in flight: decodes announced before their tokens are known, or, while
            nothing decodes, one more chunk of prompts.
    """

    num_stages: int
    window: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_chunk_tokens: int | None = None
    widest_window: int | None = None
    max_decode_slowdown: float = math.inf
    look_ahead: bool = False
