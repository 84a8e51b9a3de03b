"""Log-probabilities of tokens, from the logits as the model gave them.

One idea: a log-probability is a logit minus one number per row, so no table of the vocabulary's is made.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from stageline.sampling import TokenLogprobs
from stageline.worker.leading_tokens import leading_tokens

# Bounds the memory for and beside the logits when a long prompt wants its log-probabilities.
ROWS_AT_ONCE = 128


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], num_logprobs: Sequence[int]) -> list[TokenLogprobs]:
    """Describe one token per row.

    Args:
        logits: float32 [rows, vocab], unchanged by any rule.
        token_ids: [rows] the token to describe.
        num_logprobs: [rows] how many of the likeliest tokens to list after it.
    """
    described: list[TokenLogprobs] = []
    for start in range(0, len(token_ids), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        described += _describe(logits[rows], token_ids[rows], num_logprobs[rows])
    return described


def _describe(logits: torch.Tensor, token_ids: Sequence[int], num_logprobs: Sequence[int]) -> list[TokenLogprobs]:
    log_total = logits.logsumexp(-1, keepdim=True)
    chosen = logits.gather(1, torch.tensor(token_ids, device=logits.device).unsqueeze(1))
    is_likelier = torch.gt(logits, chosen, out=torch.empty_like(logits))  # as floats: their sum is the quick one
    ranks = [int(num_likelier) + 1 for num_likelier in is_likelier.sum(-1).tolist()]
    chosen_logprobs = (chosen - log_total).squeeze(1).tolist()
    values, ids = leading_tokens(logits, max(1, *num_logprobs))
    leading_logprobs, leading_ids = (values - log_total).tolist(), ids.tolist()
    return [
        TokenLogprobs(
            token_ids=[token_id, *leading_ids[row][:count]],
            logprobs=[chosen_logprobs[row], *leading_logprobs[row][:count]],
            rank=ranks[row],
        )
        for row, (token_id, count) in enumerate(zip(token_ids, num_logprobs, strict=True))
    ]
