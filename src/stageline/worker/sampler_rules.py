"""What a request's rules do to its logits before a token is chosen.

One idea: every rule touches few of a row's logits, so each is written as (row, token id) pairs for all rows at once.
Order, as in vLLM: masks, allowed token ids, bad words, min_tokens, logit bias, penalties. A rule that would leave no
token to choose is passed over; a mask never is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from stageline.sampling import SamplerSpec
from stageline.worker.token_history import TokenHistory


@dataclass(frozen=True)
class SampledRow:
    """One row of logits and what its rules need to know.

    Args:
        history: None if no rule needs it.
        output_index: index in the output of the token to be chosen.
        mask: bool [vocab] the tokens that may be chosen at all; None for all.
    """

    spec: SamplerSpec
    history: TokenHistory | None
    output_index: int
    mask: npt.NDArray[np.bool_] | None = None

    @property
    def wants_the_likeliest(self) -> bool:
        """Nothing but the largest logit is wanted, of all tokens."""
        return self.mask is None and self.spec.is_plain_greedy

    @property
    def changes_logits(self) -> bool:
        return self.mask is not None or self.spec.changes_logits


def allowed_tokens(mask: bytes, vocab_size: int) -> npt.NDArray[np.bool_]:
    """A mask's bits (see `stageline.pipeline.microbatch.TokenMasks`) as one bool per token."""
    bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), count=vocab_size, bitorder="little")
    return bits.view(np.bool_)


def change_logits(logits: torch.Tensor, rows: Sequence[SampledRow]) -> None:
    """Apply every rule of every row, in place.

    Args:
        logits: float32 [rows, vocab].
    """
    _apply_masks(logits, rows)
    _keep_allowed(logits, rows)
    _forbid(logits, rows)
    _add_bias(logits, rows)
    _penalise(logits, rows)


def _apply_masks(logits: torch.Tensor, rows: Sequence[SampledRow]) -> None:
    for index, row in enumerate(rows):
        if row.mask is not None:
            logits[index].masked_fill_(torch.from_numpy(~row.mask).to(logits.device), -torch.inf)


def _keep_allowed(logits: torch.Tensor, rows: Sequence[SampledRow]) -> None:
    for index, row in enumerate(rows):
        allowed_token_ids = row.spec.allowed_token_ids
        if row.mask is not None and not row.mask[list(allowed_token_ids)].any():
            continue
        if allowed_token_ids:
            allowed = torch.tensor(allowed_token_ids, device=logits.device)
            kept = logits[index, allowed]
            logits[index].fill_(-torch.inf)
            logits[index, allowed] = kept


def _forbid(logits: torch.Tensor, rows: Sequence[SampledRow]) -> None:
    row_indices: list[int] = []
    token_ids: list[int] = []
    for index, row in enumerate(rows):
        forbidden = _forbidden_token_ids(row, logits.shape[1])
        row_indices += [index] * len(forbidden)
        token_ids += forbidden
    if token_ids:
        logits[_indices(row_indices, logits), _indices(token_ids, logits)] = -torch.inf


def _forbidden_token_ids(row: SampledRow, vocab_size: int) -> list[int]:
    """Tokens that min_tokens and bad_words rule out now; none if that would leave no token to choose."""
    forbidden: set[int] = set()
    if row.output_index < row.spec.min_tokens:
        forbidden.update(row.spec.forbidden_before_min_tokens)
    if row.history is not None:
        forbidden.update(word[-1] for word in row.spec.bad_words if row.history.ends_with(word[:-1]))
    if not forbidden or all(token_id in forbidden for token_id in _allowed_token_ids(row, vocab_size)):
        return []
    return list(forbidden)


def _allowed_token_ids(row: SampledRow, vocab_size: int) -> Sequence[int]:
    """What masks and allowed token ids leave."""
    allowed = row.spec.allowed_token_ids
    if row.mask is None:
        return allowed or range(vocab_size)
    masked: list[int] = np.flatnonzero(row.mask).tolist()
    return [token_id for token_id in allowed if row.mask[token_id]] or masked


def _add_bias(logits: torch.Tensor, rows: Sequence[SampledRow]) -> None:
    biased = [(index, *pair) for index, row in enumerate(rows) for pair in row.spec.logit_bias]
    if biased:
        row_indices, token_ids, bias = zip(*biased, strict=True)
        place = (_indices(row_indices, logits), _indices(token_ids, logits))
        logits.index_put_(place, torch.tensor(bias, dtype=torch.float32, device=logits.device), accumulate=True)


def _penalise(logits: torch.Tensor, rows: Sequence[SampledRow]) -> None:
    """Repetition over the tokens of prompt and output, then frequency and presence over those of the output."""
    penalised = [
        (index, row.spec, row.history)
        for index, row in enumerate(rows)
        if row.spec.has_penalties and row.history is not None
    ]
    if not penalised:
        return
    lengths = [len(history.distinct_token_ids) for _, _, history in penalised]
    token_ids = np.concatenate([history.distinct_token_ids for _, _, history in penalised])
    counts = np.concatenate([history.output_counts for _, _, history in penalised])
    rules = [(i, s.repetition_penalty, s.frequency_penalty, s.presence_penalty) for i, s, _ in penalised]
    per_token = torch.from_numpy(np.repeat(np.array(rules, dtype=np.float64), lengths, axis=0)).to(logits.device)
    count = torch.from_numpy(counts).to(logits.device)
    place = (per_token[:, 0].long(), torch.from_numpy(token_ids).to(logits.device))
    repetition, frequency, presence = per_token[:, 1:].float().unbind(1)
    values = logits[place]
    values = torch.where(values > 0, values / repetition, values * repetition)
    logits[place] = values - frequency * count - presence * (count > 0)


def _indices(values: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, device=logits.device)
