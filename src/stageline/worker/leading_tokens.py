"""The likeliest tokens of each row, without sorting the vocabulary.

One idea: the k largest logits lie in the k groups of consecutive ids with the largest maxima. So one cheap pass finds
every group's maximum, and only the k best groups are looked into. Among equal logits the lower id comes first, always,
so the result of a row depends neither on the other rows nor on how many leading tokens were asked for.
"""

from __future__ import annotations

import torch

from stageline import kernels

GROUP_SIZE = 32
_LOW_BITS = 0xFFFFFFFF


def largest(logits: torch.Tensor) -> torch.Tensor:
    """The likeliest token of each row; among equals the lowest id.

    Args:
        logits: float32 [rows, vocab].
    Returns: int64 [rows].
    """
    if (library := kernels.library(logits.device, logits.dtype)) is not None:
        return library.argmax(logits.contiguous())
    group_maxima = _group_maxima(logits)
    if group_maxima.shape[1] < 2:
        return logits.argmax(-1)
    candidate_ids = _ids_of_groups(group_maxima.argmax(-1, keepdim=True))
    candidates = _gather_or_minus_infinity(logits, candidate_ids)
    return candidate_ids.gather(1, candidates.argmax(-1, keepdim=True)).squeeze(1)


def leading_tokens(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The k likeliest tokens of each row, likeliest first, equals by rising id.

    Args:
        logits: float32 [rows, vocab].
        k: at least 1; no more than the vocabulary is returned.
    Returns: logits float32 [rows, k] and token ids int64 [rows, k].
    """
    vocab_size = logits.shape[1]
    k = min(k, vocab_size)
    if (library := kernels.library(logits.device, logits.dtype)) is not None:
        return library.top_k(logits.contiguous(), k)
    if 4 * k * GROUP_SIZE < vocab_size:  # beyond that, looking into the groups costs more than it saves
        group_maxima = _group_maxima(logits)
        groups = torch.arange(group_maxima.shape[1], device=logits.device).expand_as(group_maxima)
        candidate_ids = _ids_of_groups(_leading_ids(group_maxima, groups, k))
        candidates = _gather_or_minus_infinity(logits, candidate_ids)
    else:
        candidate_ids = torch.arange(vocab_size, device=logits.device).expand_as(logits)
        candidates = logits
    token_ids = _leading_ids(candidates, candidate_ids, k)
    return logits.gather(1, token_ids), token_ids


def select_rows(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """These rows, rising and different, of [rows, vocab]; the very tensor, not a copy, if they are all of them."""
    if len(rows) == len(logits):
        return logits
    return logits.index_select(0, torch.tensor(rows, dtype=torch.int64, device=logits.device))


def _leading_ids(values: torch.Tensor, ids: torch.Tensor, k: int) -> torch.Tensor:
    """Ids of the k largest values; value and id are packed into one integer, so that no two are equal."""
    bits = (values + 0.0).view(torch.int32)  # adding zero turns -0.0 into 0.0, which equals it
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (rising.to(torch.int64) << 32) | (_LOW_BITS - ids)
    return _LOW_BITS - (keys.topk(k, dim=-1).values & _LOW_BITS)


def _group_maxima(logits: torch.Tensor) -> torch.Tensor:
    """[rows, groups]; the last group may be shorter than the others."""
    vocab_size = logits.shape[1]
    whole = vocab_size - vocab_size % GROUP_SIZE
    maxima = logits[:, :whole].reshape(len(logits), whole // GROUP_SIZE, GROUP_SIZE).amax(-1)
    if whole == vocab_size:
        return maxima
    return torch.cat((maxima, logits[:, whole:].amax(-1, keepdim=True)), dim=1)


def _ids_of_groups(groups: torch.Tensor) -> torch.Tensor:
    """[rows, k] groups to the [rows, k * GROUP_SIZE] ids in them, which may run past the vocabulary's end."""
    offsets = torch.arange(GROUP_SIZE, device=groups.device)
    return (groups.unsqueeze(-1) * GROUP_SIZE + offsets).flatten(1)


def _gather_or_minus_infinity(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    last = logits.shape[1] - 1
    values = logits.gather(1, ids.clamp(max=last))
    return values if logits.shape[1] % GROUP_SIZE == 0 else values.masked_fill(ids > last, -torch.inf)
