"""What guessing tokens ahead is worth: time per token in units of a stage's time.

One idea: a synchronous chain of guesses waits for the whole pipeline and gets several tokens for it; a pipelined one
keeps guessing while earlier guesses are on their way, and a miss costs the way.
"""

from __future__ import annotations

from stageline.errors import ConfigError


def accepted_tokens(acceptance: float, num_guesses: int) -> float:
    """Tokens that one verification yields, the one after the guesses included: (1 - α^(γ+1))/(1 - α)."""
    _check(acceptance)
    if acceptance == 1.0:
        return num_guesses + 1.0
    return float((1.0 - acceptance ** (num_guesses + 1)) / (1.0 - acceptance))


def synchronous_tpot(num_stages: int, acceptance: float, num_guesses: int, guess_time: float) -> float:
    """Stage times per token of one chain: (P + γ·t_d)·(1 - α)/(1 - α^(γ+1)).

    Args:
        guess_time: t_d, of one guess, in stage times.
    """
    return (num_stages + num_guesses * guess_time) / accepted_tokens(acceptance, num_guesses)


def pipelined_tpot(num_stages: int, acceptance: float, num_guesses_per_slot: int) -> float:
    """Stage times per token if so many guesses enter in every slot: P·(1 - α) + α/g."""
    _check(acceptance)
    if num_guesses_per_slot < 1:
        raise ConfigError(f"{num_guesses_per_slot} guesses per slot; give at least 1")
    return num_stages * (1.0 - acceptance) + acceptance / num_guesses_per_slot


def _check(acceptance: float) -> None:
    if not 0.0 <= acceptance <= 1.0:
        raise ConfigError(f"an acceptance of {acceptance:g} is no probability; give one between 0 and 1")
