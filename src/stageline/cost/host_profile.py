"""What a host was measured to do, kept in a file; and the stages' times that follow from it.

One idea: times of a layer are a curve over the number of tokens, measured with the project's own kernels at the model's
own shapes. Another model's layers are taken to cost in proportion to their weights, and its attention to its KV cache.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from stageline.config import environment
from stageline.cost.model_costs import ModelCosts
from stageline.cost.profile import describe_machine, load_kept, save_kept
from stageline.cost.stage_time import MicrobatchShape
from stageline.pipeline.microbatch import Microbatch
from stageline.pipeline.partition import StageLayers


class HostKey(msgspec.Struct, frozen=True):
    """What a profile is of: machine and way of computing."""

    machine: str
    num_cores: int
    device: str
    dtype: str
    quantization: str
    threads_per_stage: int
    kernels: str

    @property
    def num_places(self) -> int:
        """Stages that can have cores of their own."""
        return max(1, self.num_cores // self.threads_per_stage)

    @property
    def path(self) -> Path:
        name = hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:32]
        return environment.cache_directory() / "hosts" / f"{name}.json"


class LayerShape(msgspec.Struct, frozen=True):
    """What a model's times depend on.

    Args:
        layer_weights: [layers] parameters of each that a token is multiplied with.
        head_weights: the LM head's.
        kv_bytes_per_token: of a layer, on average.
        hidden_bytes: of one token's hidden states, as they cross from stage to stage.
    """

    layer_weights: tuple[float, ...]
    head_weights: float
    kv_bytes_per_token: float
    hidden_bytes: float


def layer_shape(model: ModelCosts) -> LayerShape:
    return LayerShape(
        layer_weights=tuple(layer.num_active for layer in model.layers),
        head_weights=model.head.num_active,
        kv_bytes_per_token=model.kv_bytes_per_token / len(model.layers),
        hidden_bytes=model.hidden_bytes,
    )


class Curve(msgspec.Struct, frozen=True):
    """Seconds over a number of tokens: straight between the points, in proportion beyond the last.

    Args:
        tokens: ascending.
    """

    tokens: tuple[int, ...]
    times_s: tuple[float, ...]

    def at(self, num_tokens: float) -> float:
        tokens, times_s = self.tokens, self.times_s
        if num_tokens <= 0:
            return 0.0
        place = bisect_left(tokens, num_tokens)
        if place == 0:
            return times_s[0]
        if place == len(tokens):
            return times_s[-1] * num_tokens / tokens[-1]
        share = (num_tokens - tokens[place - 1]) / (tokens[place] - tokens[place - 1])
        return times_s[place - 1] + share * (times_s[place] - times_s[place - 1])


class Factors(msgspec.Struct, frozen=True):
    """Over a microbatch's number of tokens: straight between the points, the same beyond the first and the last.

    Args:
        tokens: ascending.
    """

    tokens: tuple[int, ...]
    factors: tuple[float, ...]

    def at(self, num_tokens: int) -> float:
        return float(np.interp(num_tokens, self.tokens, self.factors))


_ALL_OF_IT = Factors((1,), (1.0,))


class RunCosts(msgspec.Struct, frozen=True):
    """What a pipeline that ran took besides computing, in seconds; see `SimulatedPipeline`.

    Args:
        prepare_s, prepare_row_s: a stage's for an announcement.
        begin_s: a stage's between having its input and computing.
        send_s: a stage's for activations.
        hand_on_s, result_send_s: the last stage's for tokens that go to the first, and for the result.
        to_stages_s, to_next_stage_s, to_engine_s: from a send until who waited for it has it.
        work: how many times as long computing so many tokens takes as on a core of its own that is never idle.
        core_share: of the cores that more stages want than there are, how much one gets that has so many tokens; the
            rest is idle while who waits for a core is found.
    """

    prepare_s: float
    prepare_row_s: float
    begin_s: float
    send_s: float
    hand_on_s: float
    result_send_s: float
    to_stages_s: float
    to_next_stage_s: float
    to_engine_s: float
    work: Factors = _ALL_OF_IT
    core_share: Factors = _ALL_OF_IT


class EngineCosts(msgspec.Struct, frozen=True):
    """The engine's time for a microbatch, and for each of its rows; see `SimulatedPipeline`."""

    launch_s: float
    launch_row_s: float
    result_s: float
    result_row_s: float
    news_s: float
    news_row_s: float


class HostProfile(msgspec.Struct, frozen=True):
    """Args:
    model: path of the checkpoint that was measured, for people who read the file.
    shape: of it; `layer_s` is of its first layer.
    layer_s: a layer without attention, by tokens.
    head_s: norm, head and choice of a token, by sampled rows.
    stage_s: what every stage pays for a microbatch besides its layers.
    attention_token_s: of one layer, for each token in the KV cache of each decode.
    prefill_attention_s: of one layer, for each unit of Σ(2Lx + x²).
    contention: [stages at once, from 2 on] how many times as long computing takes then. Few tokens wait for the memory,
        which stages share; many wait for the processor, which they do not.
    run: besides computing, where every stage has cores of its own.
    crowded_run: the same where there are more stages than cores for them, so that none is bound.
    message_send_s: the sender's time for a message to one more stage.
    link_bytes_per_s: of large messages inside the host.
    memory_bytes_per_s: of reading weights, by one stage.
    """

    key: HostKey
    model: str
    shape: LayerShape
    layer_s: Curve
    head_s: Curve
    stage_s: float
    attention_token_s: float
    prefill_attention_s: float
    contention: tuple[Factors, ...]
    run: RunCosts
    crowded_run: RunCosts
    message_send_s: float
    link_bytes_per_s: float
    engine: EngineCosts
    memory_bytes_per_s: float
    memory_bytes: float

    def run_of(self, num_stages: int) -> RunCosts:
        """What so many stages take besides computing."""
        if num_stages > self.key.num_places:
            return self.crowded_run
        # A single stage's core is not idle while the others compute.
        return self.run if num_stages > 1 else msgspec.structs.replace(self.run, work=_ALL_OF_IT)

    def slowdowns(self, num_tokens: int) -> tuple[float, ...]:
        """[stages at once, from 1 on] for a microbatch with so many tokens."""
        return (1.0, *(contention.at(num_tokens) for contention in self.contention))

    def matmul_flops_per_s(self, num_tokens: int) -> float:
        """Rate of a layer's matrix products with so many rows, by one stage."""
        return 2.0 * num_tokens * self.shape.layer_weights[0] / self.layer_s.at(num_tokens)


def host_key(device: str, dtype: str, quantization: str, threads_per_stage: int, num_cores: int) -> HostKey:
    """The key for this machine."""
    machine = describe_machine(with_gpus=device != "cpu")
    return HostKey(machine, num_cores, device, dtype, quantization, threads_per_stage, environment.kernels())


def load_host_profile(key: HostKey) -> HostProfile | None:
    """The profile kept under this key; None if there is none, or the file there is not one."""
    profile = load_kept(key.path, HostProfile)
    return profile if profile is not None and profile.key == key else None


def save_host_profile(profile: HostProfile) -> Path:
    """Keep a profile in place of any other of its key. Returns: the file. Raises: OSError."""
    return save_kept(profile.key.path, profile)


def stage_times_of(
    profile: HostProfile, shape: LayerShape, partition: Sequence[StageLayers]
) -> Callable[[Microbatch], list[float]]:
    """Seconds that each stage computes a microbatch, alone on its cores.

    Args: shape: of the model that is cut so.
    """
    measured = profile.shape
    layers_worth = [
        sum(shape.layer_weights[layer] for layer in part.layers) / measured.layer_weights[0] for part in partition
    ]
    kv_worth = shape.kv_bytes_per_token / measured.kv_bytes_per_token
    attention_worth = [len(part.layers) * kv_worth for part in partition]
    head_worth = shape.head_weights / measured.head_weights
    run = profile.run_of(len(partition))

    def stage_times(microbatch: Microbatch) -> list[float]:
        found = MicrobatchShape.of_rows(microbatch.num_computed_tokens, microbatch.num_scheduled_tokens)
        layer_s, work = profile.layer_s.at(found.num_tokens), run.work.at(found.num_tokens)
        attention_s = (
            profile.attention_token_s * found.decode_context_tokens
            + profile.prefill_attention_s * found.prefill_attention
        )
        times_s = [
            work * (profile.stage_s + worth * layer_s + attends * attention_s)
            for worth, attends in zip(layers_worth, attention_worth, strict=True)
        ]
        times_s[-1] += work * head_worth * profile.head_s.at(len(microbatch.sampling_rows))
        return times_s

    return stage_times
