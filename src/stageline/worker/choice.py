"""From a row of logits to one token: the likeliest, or one drawn from the tokens that top-k, top-p and min-p leave.

One idea: a draw is a function of the row's own logits, its parameters and one number in (0, 1) that comes from the
request's seed and the token's index in the output. There is no generator with a state, so a token depends neither on
the batch nor on what was computed before. Drawing walks the remaining tokens by rising id: unlike an order by
probability, that order does not change when two logits swap places by a rounding error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from stageline.sampling import GREEDY_BELOW_TEMPERATURE, SamplerSpec
from stageline.worker.leading_tokens import GROUP_SIZE, largest, leading_tokens, select_rows

_SMALLEST_PREFIX = 64
_PREFIX_GROWTH = 4
_MASK_64 = 2**64 - 1


def random_fraction(seed: int, index: int) -> float:
    """A number in (0, 1) for the token at this index of the output.

    Source: SplitMix64 (Steele, Lea and Flood 2014), started at the mixed seed so that neighbouring seeds share nothing.
    """
    mixed = _mix((_mix(seed & _MASK_64) + (index + 1) * 0x9E3779B97F4A7C15) & _MASK_64)
    return ((mixed >> 12) + 0.5) / 2**52


def _mix(state: int) -> int:
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return state ^ (state >> 31)


@dataclass(frozen=True)
class _Draws:
    """How some rows are drawn: float64 columns [rows, 1] on the logits' device.

    Args:
        top_k: the vocabulary's size if not set.
        fraction: the rows' random numbers, in (0, 1).
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    fraction: torch.Tensor

    def of(self, rows: list[int]) -> _Draws:
        if len(rows) == len(self.top_k):
            return self
        index = torch.tensor(rows, device=self.top_k.device)
        columns = (self.temperature, self.top_k, self.top_p, self.min_p, self.fraction)
        return _Draws(*(column[index] for column in columns))


def choose(logits: torch.Tensor, specs: Sequence[SamplerSpec], output_indices: Sequence[int]) -> list[int]:
    """Choose one token per row.

    Args:
        logits: float32 [rows, vocab] with everything but temperature, min-p, top-k and top-p applied.
        specs: [rows]
        output_indices: [rows] index in the output of the token to be chosen.
    """
    vocab_size = logits.shape[1]
    greedy = [row for row, spec in enumerate(specs) if spec.temperature < GREEDY_BELOW_TEMPERATURE]
    drawn = [row for row, spec in enumerate(specs) if spec.temperature >= GREEDY_BELOW_TEMPERATURE]
    cut = [row for row in drawn if _cuts_tail(specs[row], vocab_size)]
    whole = [row for row in drawn if not _cuts_tail(specs[row], vocab_size)]
    tokens = torch.empty(len(specs), dtype=torch.int64, device=logits.device)
    if greedy:
        tokens[greedy] = largest(select_rows(logits, greedy))
    if whole:
        draws = _draws(specs, output_indices, whole, logits)
        tokens[whole] = _draw_from_all(select_rows(logits, whole), draws)
    if cut:
        draws = _draws(specs, output_indices, cut, logits)
        tokens[cut] = _draw_from_leading(select_rows(logits, cut), [specs[row] for row in cut], draws)
    chosen: list[int] = tokens.tolist()
    return chosen


def _cuts_tail(spec: SamplerSpec, vocab_size: int) -> bool:
    return 0 < spec.top_k < vocab_size or spec.top_p < 1.0


def _draws(
    specs: Sequence[SamplerSpec], output_indices: Sequence[int], rows: list[int], logits: torch.Tensor
) -> _Draws:
    chosen = [specs[row] for row in rows]
    vocab_size = logits.shape[1]
    fractions = [random_fraction(specs[row].seed, output_indices[row]) for row in rows]
    columns = torch.tensor(
        [
            (spec.temperature, _bounded_top_k(spec, vocab_size), spec.top_p, spec.min_p, fraction)
            for spec, fraction in zip(chosen, fractions, strict=True)
        ],
        dtype=torch.float64,
        device=logits.device,
    )
    return _Draws(*columns.unsqueeze(-1).unbind(1))


def _bounded_top_k(spec: SamplerSpec, vocab_size: int) -> int:
    return spec.top_k if 0 < spec.top_k < vocab_size else vocab_size


def _draw_from_all(logits: torch.Tensor, draws: _Draws) -> torch.Tensor:
    """Draw from the whole vocabulary, in two steps: a group of consecutive ids, then an id in it. Returns: [rows]."""
    groups = _grouped_weights(logits, draws)
    group, rest = _walk(groups.sum(-1, dtype=torch.float32).double(), draws.fraction)
    weights = groups.gather(1, group.unsqueeze(-1).expand(-1, -1, GROUP_SIZE)).squeeze(1).double()
    place = _first_beyond(weights.cumsum(-1), rest)
    return (group * GROUP_SIZE + place).squeeze(1)


def _grouped_weights(logits: torch.Tensor, draws: _Draws) -> torch.Tensor:
    """Probabilities relative to the likeliest token's, zero where min-p forbids. float32 [rows, groups, GROUP_SIZE]."""
    scaled = logits - logits.amax(-1, keepdim=True)
    weights = scaled.div_(draws.temperature.float()).exp_()
    if draws.min_p.any():
        weights.masked_fill_(weights < draws.min_p.float(), 0.0)
    if spare := -weights.shape[1] % GROUP_SIZE:
        weights = torch.cat((weights, weights.new_zeros(len(weights), spare)), dim=1)
    return weights.view(len(weights), -1, GROUP_SIZE)


def _walk(weights: torch.Tensor, fraction: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Inverse of the cumulative distribution. Returns: [rows, 1] the place reached and how far into it."""
    cumulative = weights.cumsum(-1)
    target = fraction * cumulative[:, -1:]
    place = _first_beyond(cumulative, target)
    return place, target - (cumulative - weights).gather(1, place)


def _first_beyond(cumulative: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """First place whose cumulative weight exceeds the target, which rounding may have put at or past the end."""
    last = cumulative[:, -1:]
    inside = torch.minimum(target, torch.nextafter(last, torch.zeros_like(last)))
    place = torch.searchsorted(cumulative, inside, right=True)
    return place.clamp(max=cumulative.shape[1] - 1)


def _draw_from_leading(logits: torch.Tensor, specs: list[SamplerSpec], draws: _Draws) -> torch.Tensor:
    """Draw from the leading tokens that top-k and top-p keep. Returns: [rows].

    A row without top-k looks at more and more leading tokens until they hold the fraction top-p asks for.
    """
    vocab_size = logits.shape[1]
    tokens = torch.empty(len(specs), dtype=torch.int64, device=logits.device)
    total = torch.zeros(len(specs), 1, dtype=torch.float64, device=logits.device)
    no_top_k = [row for row, spec in enumerate(specs) if not 0 < spec.top_k < vocab_size]
    if no_top_k:
        groups = _grouped_weights(select_rows(logits, no_top_k), draws.of(no_top_k))
        total[no_top_k] = groups.sum(-1, dtype=torch.float32).double().cumsum(-1)[:, -1:]
    pending = list(range(len(specs)))
    size = min(_SMALLEST_PREFIX, vocab_size)
    while pending:
        rows = [row for row in pending if size == vocab_size or not size < specs[row].top_k < vocab_size]
        if rows:
            drawn, is_covered = _draw_from_prefix(select_rows(logits, rows), size, total[rows], draws.of(rows))
            tokens[rows] = drawn
            done = {row for row, ok in zip(rows, is_covered.tolist(), strict=True) if ok or size == vocab_size}
            pending = [row for row in pending if row not in done]
        size = min(size * _PREFIX_GROWTH, vocab_size)
    return tokens


def _draw_from_prefix(
    logits: torch.Tensor, size: int, total: torch.Tensor, draws: _Draws
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw from what is kept of the `size` leading tokens.

    Args:
        total: float64 [rows, 1] weight of the vocabulary, as in `_grouped_weights`; 0 for rows with top-k, whose kept
            tokens are all among the leading ones.
    Returns: [rows] tokens, and [rows] whether the leading tokens were enough to know them.
    """
    values, token_ids = leading_tokens(logits, size)
    weights = ((values - values[:, :1]).double() / draws.temperature).exp()
    places = torch.arange(size, device=logits.device)
    weights = weights.masked_fill((weights < draws.min_p) | (places >= draws.top_k), 0.0)
    cumulative = weights.cumsum(-1)
    held = cumulative[:, -1:]
    enough = draws.top_p * torch.where(total > 0, total, held)
    is_covered = (held >= enough).squeeze(1)
    weights = weights.masked_fill(cumulative - weights >= enough, 0.0)
    token_ids, order = token_ids.sort(dim=-1)
    place, _ = _walk(weights.gather(1, order), draws.fraction)
    return token_ids.gather(1, place).squeeze(1), is_covered
