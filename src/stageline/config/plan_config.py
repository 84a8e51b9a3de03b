"""Everything an operator can ask of a plan, with the defaults and the words of `--help`."""

from __future__ import annotations

from dataclasses import dataclass

from stageline.config.settings import at_least, check_types, flag_of, one_of, setting
from stageline.errors import ConfigError

OBJECTIVES = ("throughput", "tpot", "cost")
PLANNED_WEIGHTS = ("auto", "fp32", "bf16", "fp16", "fp8", "int8", "int4", "mxfp4")
KV_DTYPES = {"bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "fp32": 4.0}


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """What was asked for. `check()` refuses what cannot be planned for any model."""

    concurrency: int = setting(64, "requests that run at the same time", group="load", metavar="REQUESTS")
    prompt_tokens: int = setting(1024, "tokens of a prompt", group="load", metavar="TOKENS")
    output_tokens: int = setting(256, "tokens of an answer", group="load", metavar="TOKENS")
    objective: str = setting(
        "throughput", "what makes a layout the best: throughput, the shortest TPOT (see --min-tokens-per-s), or the "
        "lowest cost per token (devices need a price_per_hour)", choices=OBJECTIVES, group="choice",
    )
    min_tokens_per_s: float = setting(
        0.0, "layouts below this throughput lose, whatever else they are", group="choice", metavar="TOKENS"
    )
    tensor_parallel_size: int | None = setting(
        None, "devices that share a stage (default: all that can work are tried)", flags=("-tp",), group="choice",
        metavar="N",
    )
    pipeline_parallel_size: int | None = setting(
        None, "stages (default: all that can work are tried)", flags=("-pp",), group="choice", metavar="N"
    )
    data_parallel_size: int | None = setting(
        None, "replicas (default: all that can work are tried)", flags=("-dp",), group="choice", metavar="N"
    )
    max_num_batched_tokens: int = setting(
        8192, "most new tokens in one microbatch: the largest chunk of a prompt", group="choice", metavar="TOKENS"
    )
    speculate_tokens: int = setting(
        0, "say what guessing so many tokens ahead would do to a token's time", group="choice", metavar="TOKENS"
    )
    speculate_acceptance: float = setting(
        0.7, "share of the guesses that are right, for --speculate-tokens", group="choice", metavar="FRACTION"
    )
    weights: str = setting(
        "auto", "how weights are kept; auto takes the checkpoint's way", choices=PLANNED_WEIGHTS, group="memory"
    )
    kv_cache_dtype: str = setting("bf16", "how the KV cache is kept", choices=tuple(KV_DTYPES), group="memory")
    memory_fraction: float = setting(
        0.9, "of a device's memory that may be used at all", group="memory", metavar="FRACTION"
    )

    @property
    def context_tokens(self) -> int:
        """Of a request when it ends."""
        return self.prompt_tokens + self.output_tokens

    @property
    def mean_context_tokens(self) -> int:
        """Of a request while it decodes."""
        return self.prompt_tokens + self.output_tokens // 2

    def check(self) -> PlanConfig:
        """Return self, or raise ConfigError naming the first setting that cannot work."""
        check_types(self)
        for name in ("concurrency", "prompt_tokens", "output_tokens", "max_num_batched_tokens"):
            at_least(name, getattr(self, name), 1)
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
            if (value := getattr(self, name)) is not None:
                at_least(name, value, 1)
        at_least("speculate_tokens", self.speculate_tokens, 0)
        if not 0 <= self.speculate_acceptance <= 1:
            raise ConfigError(
                f"{flag_of('speculate_acceptance')} is {self.speculate_acceptance:g}; it must be between 0 and 1"
            )
        one_of("objective", self.objective, OBJECTIVES)
        one_of("weights", self.weights, PLANNED_WEIGHTS)
        one_of("kv_cache_dtype", self.kv_cache_dtype, tuple(KV_DTYPES))
        if not 0 < self.memory_fraction <= 1:
            raise ConfigError(
                f"{flag_of('memory_fraction')} is {self.memory_fraction:g}; it must be above 0 and at most 1"
            )
        if not 0 <= self.min_tokens_per_s < float("inf"):
            raise ConfigError(f"{flag_of('min_tokens_per_s')} is {self.min_tokens_per_s:g}; it must be at least 0")
        return self
