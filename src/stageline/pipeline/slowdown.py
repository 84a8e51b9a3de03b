"""Stages and links that are slower than they are: faults to inject in tests and benchmarks, all on one machine.

    STAGELINE_INJECT_SLOWDOWN=s1:1.5,link0:2ms,s2:3@m500

Stage 1 takes 1.5 times as long for everything it computes, what stage 0 sends to stage 1 arrives 2 ms later, and stage
2 takes three times as long from microbatch 500 on. With all stages in one process there are no links.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from stageline.config.environment import Variable
from stageline.errors import ConfigError

_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_STAGE = re.compile(r"s(\d+):(\d+(?:\.\d+)?)(?:@m(\d+))?")
_LINK = re.compile(r"link(\d+):(\d+(?:\.\d+)?)(us|ms|s)")


@dataclass(frozen=True)
class StageSlowdown:
    """Args:
    factor: how many times as long it computes; at least 1.
    from_microbatch: it is as fast as it is before this one.
    """

    factor: float = 1.0
    from_microbatch: int = 0


AS_FAST_AS_IT_IS = StageSlowdown()


@dataclass(frozen=True)
class Slowdown:
    """Args:
    stages: [stages]
    link_delays_s: [stages - 1] what the link behind each stage adds to a message's way, without holding up the next.
    """

    stages: tuple[StageSlowdown, ...]
    link_delays_s: tuple[float, ...]

    @classmethod
    def none(cls, num_stages: int) -> Slowdown:
        return cls((AS_FAST_AS_IT_IS,) * num_stages, (0.0,) * (num_stages - 1))

    def input_delay_s(self, stage_index: int) -> float:
        """Of the link before a stage; the first one's input comes from the engine."""
        return self.link_delays_s[stage_index - 1] if stage_index > 0 else 0.0


def parse_slowdown(variable: Variable | None, num_stages: int) -> Slowdown:
    """What the variable asks for; nothing if it is not set. Raises: ConfigError naming the variable and the part."""
    if variable is None:
        return Slowdown.none(num_stages)
    stages, links_s = [AS_FAST_AS_IT_IS] * num_stages, [0.0] * (num_stages - 1)
    for part in (part.strip() for part in variable.value.split(",")):
        if match := _STAGE.fullmatch(part):
            index, factor = int(match[1]), float(match[2])
            if index >= num_stages or not 1.0 <= factor < math.inf:
                raise ConfigError(
                    f"{variable.name}: {part!r}; there are stages s0 to s{num_stages - 1}, and a factor is at least 1"
                )
            stages[index] = StageSlowdown(factor, int(match[3] or 0))
        elif match := _LINK.fullmatch(part):
            index = int(match[1])
            if index >= num_stages - 1:
                raise ConfigError(f"{variable.name}: {part!r}; {num_stages} stages have {num_stages - 1} links, from 0")
            links_s[index] = float(match[2]) * _UNITS_S[match[3]]
        else:
            raise ConfigError(f"{variable.name}: {part!r} is neither a stage and a factor, such as s1:1.5, nor a link "
                              "and a delay, such as link0:2ms")  # fmt: skip
    return Slowdown(tuple(stages), tuple(links_s))
