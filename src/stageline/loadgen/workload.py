"""What is asked of a server: how long prompts and answers are, what prompts share, and when they come.

One idea: a workload is data, drawn or read before the first request is sent. The same seed gives the same workload.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from stageline.errors import ConfigError

# Log-normal lengths, in tokens, near those of the conversations that people shared: means of about 220 and 195.
_SHAREGPT_INPUT = (100.0, 1.25)
_SHAREGPT_OUTPUT = (130.0, 0.9)
_SHAREGPT_SHORTEST, _SHAREGPT_LONGEST = 4, 2048

Length = Callable[[random.Random], int]


@dataclass(frozen=True)
class Segment:
    """A run of a prompt's tokens. Segments with the same content number are the same tokens, in all prompts."""

    num_tokens: int
    content: int


@dataclass(frozen=True)
class PlannedRequest:
    """Args:
    segments: the prompt in order; empty if `text` is given.
    num_output_tokens: most that the answer may have.
    at_s: when it is sent, from the start of the run; None: as soon as there is room.
    text: the prompt itself, where a data set has one.
    """

    segments: tuple[Segment, ...]
    num_output_tokens: int
    at_s: float | None = None
    text: str | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return sum(segment.num_tokens for segment in self.segments)


def uniform(mean: int, range_ratio: float) -> Length:
    """Between mean·(1 - range_ratio) and mean·(1 + range_ratio), all alike; always the mean for a ratio of 0."""
    lowest, highest = max(1, math.floor(mean * (1 - range_ratio))), max(1, math.ceil(mean * (1 + range_ratio)))
    return lambda generator: mean if range_ratio == 0 else generator.randint(lowest, highest)


def log_normal(median: float, sigma: float, lowest: int, highest: int) -> Length:
    """Clipped to [lowest, highest]."""
    return lambda generator: min(highest, max(lowest, round(generator.lognormvariate(math.log(median), sigma))))


def draw_random(
    num_requests: int, input_length: Length, output_length: Length, generator: random.Random
) -> list[PlannedRequest]:
    """Prompts that share nothing."""
    contents = itertools.count()
    return [
        PlannedRequest((Segment(input_length(generator), next(contents)),), output_length(generator))
        for _ in range(num_requests)
    ]


def draw_sharing(
    num_requests: int,
    num_groups: int,
    num_prefix_tokens: int,
    input_length: Length,
    output_length: Length,
    generator: random.Random,
) -> list[PlannedRequest]:
    """Each prompt begins with the prefix of one of the groups, drawn, and goes on with tokens of its own."""
    contents = itertools.count(num_groups)
    return [
        PlannedRequest(
            (
                Segment(num_prefix_tokens, generator.randrange(num_groups)),
                Segment(input_length(generator), next(contents)),
            ),
            output_length(generator),
        )
        for _ in range(num_requests)
    ]


def draw_like_sharegpt(num_requests: int, generator: random.Random) -> list[PlannedRequest]:
    """Lengths as of people who talk with a model; prompts that share nothing."""
    bounds = (_SHAREGPT_SHORTEST, _SHAREGPT_LONGEST)
    return draw_random(
        num_requests, log_normal(*_SHAREGPT_INPUT, *bounds), log_normal(*_SHAREGPT_OUTPUT, *bounds), generator
    )


def arrival_times(rate_per_s: float, burstiness: float, generator: random.Random) -> Iterator[float]:
    """Endless arrival times in seconds, from 0 on; the mean gap is 1 / rate.

    Args:
        burstiness: shape of the gamma-distributed gaps: 1 is a Poisson process, less comes in bursts, more is evener,
            infinity is a constant rate.
    """
    now_s = 0.0
    while True:
        yield now_s
        if math.isinf(burstiness):
            now_s += 1.0 / rate_per_s
        else:
            now_s += generator.gammavariate(burstiness, 1.0 / (rate_per_s * burstiness))


def arriving(requests: Sequence[PlannedRequest], times_s: Iterator[float]) -> list[PlannedRequest]:
    """The same requests at these times."""
    return [replace(request, at_s=at_s) for request, at_s in zip(requests, times_s, strict=False)]


def scaled(requests: Sequence[PlannedRequest], factor: float) -> list[PlannedRequest]:
    """The same requests with their times multiplied: 0.5 comes twice as fast."""
    return [
        request if request.at_s is None else replace(request, at_s=request.at_s * factor) for request in requests
    ]


def fitted(requests: Sequence[PlannedRequest], max_model_len: int) -> tuple[list[PlannedRequest], int]:
    """Requests that a model of this length can serve: too long prompts lose their end, then answers are shortened.

    Returns: the requests, and how many had to be cut. Raises: ConfigError if nothing would be left.
    """
    if max_model_len < 2:
        raise ConfigError(f"the model takes {max_model_len} tokens, too few for a prompt and an answer")
    cut = [_fitted(request, max_model_len) for request in requests]
    return cut, sum(now != before for now, before in zip(cut, requests, strict=True))


def _fitted(request: PlannedRequest, max_model_len: int) -> PlannedRequest:
    room, segments = max_model_len - 1, []
    for segment in request.segments:
        if num_tokens := min(segment.num_tokens, room):
            segments.append(Segment(num_tokens, segment.content))
        room -= num_tokens
    return replace(request, segments=tuple(segments), num_output_tokens=min(request.num_output_tokens, room + 1))
