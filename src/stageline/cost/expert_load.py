"""How much of a layer's experts the busiest rank has, where ranks were dealt whole experts.

One idea: tokens are taken to choose evenly and independently. So what is chosen is drawn from slots without
replacement, equally many of which are each rank's, and a layer waits for the rank with the most: the mean of the
largest of exchangeable hypergeometric numbers. For distinct experts the slots are the experts, for rows each token's
experts.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt

_MOST_EXACT = 256
"""Draws up to which the distribution is computed; with more, the numbers of the ranks are taken to be normal."""

_NEGLIGIBLE = 1e-9


def num_experts_hit(num_experts: int, num_per_token: int, num_tokens: float) -> float:
    """Experts that at least one of so many tokens takes: E·(1 - (1 - k/E)^n)."""
    return num_experts * (1.0 - math.pow(1.0 - num_per_token / num_experts, max(num_tokens, 0.0)))


@lru_cache(maxsize=4096)
def busiest_experts(num_experts: int, num_per_token: int, num_tokens: int, num_ranks: int) -> float:
    """Distinct experts that the tokens take of the rank of which they take most, on average.

    Straight between whole numbers of distinct experts, and taken at their mean.
    """
    hit = num_experts_hit(num_experts, num_per_token, num_tokens)
    low = math.floor(hit)
    of_low = busiest_draws(low, num_experts, num_ranks)
    if hit == low:
        return of_low
    return of_low + (hit - low) * (busiest_draws(low + 1, num_experts, num_ranks) - of_low)


@lru_cache(maxsize=4096)
def busiest_rows(num_experts: int, num_per_token: int, num_tokens: int, num_ranks: int) -> float:
    """Rows (a token counts once for each expert it takes) of the rank that has most, on average.

    Exact for one token. Of more, n·k of n·E slots are drawn, which forgets that a token takes k different experts; what
    the busiest has above the mean is made as much larger as the standard deviation is then.
    """
    num_rows, num_slots = num_tokens * num_per_token, num_tokens * num_experts
    mean = num_rows / num_ranks
    above = busiest_draws(num_rows, num_slots, num_ranks) - mean
    wider = math.sqrt((num_slots - 1) / (num_tokens * (num_experts - 1))) if num_experts > 1 else 1.0
    most = num_tokens * min(num_per_token, num_experts // num_ranks)
    return min(float(most), mean + above * wider)


@lru_cache(maxsize=4096)
def busiest_draws(num_drawn: int, num_slots: int, num_ranks: int) -> float:
    """Mean of the largest number that one of the ranks has of slots drawn without replacement.

    Args:
        num_slots: of all ranks, a multiple of `num_ranks`.
    Source: P(max <= m) is the coefficient of x^d in (Σ_{j<=m} C(S/t, j)·x^j)^t, over C(S, d). Of many draws, the mean
    and e_t·sqrt(d/t·(S - d)/(S - 1)), with e_t the mean of the largest of t standard normals.
    """
    own_slots, mean = num_slots // num_ranks, num_drawn / num_ranks
    if num_ranks == 1 or num_drawn in (0, num_slots):
        return mean
    if num_drawn > _MOST_EXACT:
        spread = math.sqrt(mean * (num_slots - num_drawn) / (num_slots - 1))
        return min(float(own_slots), mean + _largest_normal(num_ranks) * spread)
    share = num_drawn / num_slots
    counts = _binomial(own_slots, share, num_drawn)
    all_slots = _binomial(num_slots, share, num_drawn)[num_drawn]
    largest = least = math.ceil(mean)
    missing = 0.0
    while largest < min(own_slots, num_drawn):
        not_more = float(_power(counts[: largest + 1], num_ranks, num_drawn)[num_drawn] / all_slots)
        if (more := 1.0 - not_more) < _NEGLIGIBLE:
            break
        missing += more
        largest += 1
    return least + missing


def _binomial(num_slots: int, share: float, most: int) -> npt.NDArray[np.float64]:
    """[min(slots, most) + 1] probabilities that so many of the slots are drawn, each with this chance."""
    numbers = range(min(num_slots, most) + 1)
    log_share, log_rest, log_all = math.log(share), math.log1p(-share), math.lgamma(num_slots + 1)
    logs = [
        log_all - math.lgamma(n + 1) - math.lgamma(num_slots - n + 1) + n * log_share + (num_slots - n) * log_rest
        for n in numbers
    ]
    found: npt.NDArray[np.float64] = np.exp(np.array(logs))
    return found


def _power(polynomial: npt.NDArray[np.float64], exponent: int, degree: int) -> npt.NDArray[np.float64]:
    """[degree + 1] its power, higher terms left out."""
    result = np.zeros(degree + 1)
    result[0] = 1.0
    while exponent:
        if exponent & 1:
            result = np.convolve(result, polynomial)[: degree + 1]
        polynomial = np.convolve(polynomial, polynomial)[: degree + 1]
        exponent >>= 1
    return result


@lru_cache(maxsize=256)
def _largest_normal(count: int) -> float:
    """Mean of the largest of so many independent standard normal numbers: ∫ x·t·φ(x)·Φ(x)^(t-1)."""
    x = np.linspace(-10.0, 10.0, 4001)
    density = np.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    below = np.cumsum(density) * (x[1] - x[0])
    return float(np.sum(x * count * density * below ** (count - 1)) * (x[1] - x[0]))
