"""Where layers live: the partition of a model's layers over the stages. Everything is refused here, before a start."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from stageline.errors import ConfigError


@dataclass(frozen=True)
class StageLayers:
    """What one stage holds.

    Args:
        stage_index: 0 is the first stage.
        layers: the model's layers it runs, half-open.
        is_first: it holds the embedding.
        is_last: it holds the final norm and the LM head, and samples.
    """

    stage_index: int
    layers: range
    is_first: bool
    is_last: bool


def default_layer_counts(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Even layer counts; the remainder goes one by one to the second-to-last stage and backwards.

    The first and the last stage carry the embedding and the head, so they are the last to get one more layer:
    61 layers on 4 stages become 15, 15, 16, 15.

    Raises: ConfigError if there are more stages than layers.
    Source: the convention of vLLM's `get_pp_indices`.
    """
    if num_stages > num_layers:
        raise ConfigError(
            f"{num_stages} stages for {num_layers} layers: every stage needs at least one layer; "
            f"use --pipeline-parallel-size of at most {num_layers}"
        )
    counts = [num_layers // num_stages] * num_stages
    for extra in range(num_layers % num_stages):
        counts[(num_stages - 2 - extra) % num_stages] += 1
    return tuple(counts)


def parse_layer_counts(text: str, num_layers: int, num_stages: int, source: str) -> tuple[int, ...]:
    """Read an explicit partition such as "16,14".

    Args:
        source: the flag or variable that asks for it, for messages.
    Raises: ConfigError for a wrong count, a wrong sum, entries that are not positive integers.
    """
    way_out = f"give {num_stages} positive integers that sum to {num_layers}, or leave it out for " + ",".join(
        map(str, default_layer_counts(num_layers, num_stages))
    )
    entries = [entry.strip() for entry in text.split(",")]
    for entry in entries:
        if not re.fullmatch(r"[+-]?\d+", entry, flags=re.ASCII):
            raise ConfigError(f"{source} {text!r}: {entry!r} is not an integer; {way_out}")
        if int(entry) < 1:
            raise ConfigError(f"{source} {text!r}: {entry} layers on a stage; every stage needs one; {way_out}")
    counts = tuple(int(entry) for entry in entries)
    if len(counts) != num_stages:
        raise ConfigError(f"{source} {text!r} has {len(counts)} entries for {num_stages} stages; {way_out}")
    if sum(counts) != num_layers:
        raise ConfigError(
            f"{source} {text!r} sums to {sum(counts)}, but the model has {num_layers} layers; {way_out}"
        )
    return counts


def partition_layers(
    num_layers: int, num_stages: int, asked: str | None, source: str = "--pp-layer-partition"
) -> tuple[StageLayers, ...]:
    """Cut `num_layers` into one consecutive run per stage: as asked, or by the default rule.

    Args:
        asked: text such as "16,14", or None for the default.
        source: the flag or variable that asks, for messages.
    Raises: ConfigError, with both numbers and the way out.
    """
    default = default_layer_counts(num_layers, num_stages)
    return stages_of(default if asked is None else parse_layer_counts(asked, num_layers, num_stages, source))


def stages_of(counts: Sequence[int]) -> tuple[StageLayers, ...]:
    """The stages that hold so many layers each, in order."""
    ends = list(accumulate(counts))
    return tuple(
        StageLayers(
            stage_index=index,
            layers=range(end - count, end),
            is_first=index == 0,
            is_last=index == len(ends) - 1,
        )
        for index, (count, end) in enumerate(zip(counts, ends, strict=True))
    )
