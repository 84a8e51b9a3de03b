"""What a host's measuring processes are asked and what they answer: the words of `stageline plan --calibrate`.

One idea: a process stands for a stage. It holds layers of the model's shape, with weights that mean nothing, and is
asked for the time of one microbatch after another, alone or while others like it do the same.
"""

from __future__ import annotations

import msgspec

from stageline.checkpoint.model_spec import ModelSpec


class MeasuringConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What a measuring process needs to start.

    Args:
        spec: the model's shape; its weights are made up.
        num_layers: how many of its first layers are timed together.
        cores: to bind to; empty binds to none.
        max_tokens, max_kv_tokens, max_model_len: the most of a microbatch, of all its requests' caches together, and
            of one of them.
        listen_address, answer_address: where messages are echoed from and to.
    """

    spec: ModelSpec
    dtype: str
    device: str
    num_layers: int
    num_threads: int
    cores: list[int]
    max_tokens: int
    max_kv_tokens: int
    max_model_len: int
    listen_address: str
    answer_address: str


class TimeMicrobatch(msgspec.Struct, frozen=True, tag="time"):
    """Run one microbatch again and again, and tell its time.

    Args:
        num_rows: requests in it.
        new_tokens: of each; 1 is a decode.
        cached_tokens: of each, in the KV cache already.
        duration_s: how long to go on; at least twice, after once that does not count.
        with_one_layer: time a stage of one layer as well.
    """

    num_rows: int
    new_tokens: int
    cached_tokens: int
    duration_s: float
    with_one_layer: bool

    @property
    def num_tokens(self) -> int:
        return self.num_rows * self.new_tokens


class Echo(msgspec.Struct, frozen=True, tag="echo"):
    """Answer so many messages as a stage would: decode, and send a result. Before each, an empty one says it waits."""

    num_messages: int


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """Nothing more is asked."""


Order = TimeMicrobatch | Echo | Leave


class Measured(msgspec.Struct, frozen=True, tag="measured"):
    """Typical times of a microbatch.

    Args:
        layers_s: of the layers that are timed together, without anything else.
        one_layer_s: of a stage with one layer alone, its embedding included: the rest is what every stage pays. 0 if it
            was not asked for.
    """

    layers_s: float
    one_layer_s: float


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The layers are loaded.

    Args:
        num_layers: how many are timed together.
    """

    num_layers: int


class Trouble(msgspec.Struct, frozen=True, tag="trouble"):
    """Last words."""

    message: str


Answer = Ready | Measured | Trouble
