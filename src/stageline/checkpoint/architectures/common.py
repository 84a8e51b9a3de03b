"""What the config.json files of most architectures have alike: sizes, rotary embedding, windows, activation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from stageline.checkpoint.fields import Fields
from stageline.checkpoint.model_spec import ModelSpec, RopeSpec
from stageline.errors import CheckpointError

Reader = Callable[[Fields], ModelSpec]
"""From the fields of a config.json to the model's shape. Data type and special tokens are filled in by the caller.

Raises: CheckpointError for what is missing, wrong, or not supported.
"""

ROPE_KINDS = ("default", "linear", "llama3", "longrope", "yarn")
ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_tanh": "gelu_tanh"}
LARGEST_NUM_LAYERS = 4096


def plain_spec(fields: Fields, family: str) -> ModelSpec:
    """A decoder without peculiarities: no biases, no windows, rotary embedding on all layers."""
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    if not fields.has("head_dim") and hidden_size % num_heads:
        raise CheckpointError(
            f"{fields.source}: hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads} and "
            "there is no head_dim"
        )
    num_layers = fields.integer("num_hidden_layers")
    if num_layers > LARGEST_NUM_LAYERS:
        raise CheckpointError(
            f"{fields.source}: num_hidden_layers is {num_layers}; at most {LARGEST_NUM_LAYERS} are supported"
        )
    head_dim = fields.integer("head_dim", default=max(1, hidden_size // num_heads))
    return ModelSpec(
        family=family,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", default=num_heads),
        head_dim=head_dim,
        intermediate_size=fields.integer("intermediate_size"),
        vocab_size=fields.integer("vocab_size"),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        rms_norm_eps=fields.number("rms_norm_eps", default=1e-6),
        rope=rope_spec(fields),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        activation=activation(fields, "hidden_act", ("silu",)),
    )


def activation(fields: Fields, key: str, supported: Sequence[str]) -> str:
    """As `ModelSpec.activation` spells it. Args: supported: of this architecture, the first being its default."""
    name = fields.string(key, default=supported[0])
    if ACTIVATIONS.get(name) not in supported:
        raise CheckpointError(
            f"{fields.source}: {key} {name!r} is not supported; supported is {', '.join(supported)}"
        )
    return ACTIVATIONS[name]


def with_windows(spec: ModelSpec, fields: Fields, window: int | None, default_kinds: Sequence[bool]) -> ModelSpec:
    """Windows on the layers that `layer_types` names, or else on those of which `default_kinds` is true."""
    kinds = layer_kinds(fields, spec.num_layers)
    has_window = [kind == "sliding_attention" for kind in kinds] if kinds else list(default_kinds)
    if window is None or not any(has_window):
        return replace(spec, sliding_window=None, layer_windows=())
    if all(has_window):
        return replace(spec, sliding_window=window, layer_windows=())
    windows = tuple(window if is_sliding else None for is_sliding in has_window)
    return replace(spec, sliding_window=None, layer_windows=windows)


def layer_kinds(fields: Fields, num_layers: int) -> list[str]:
    """`layer_types`, checked; empty if there is none."""
    kinds = fields.raw("layer_types")
    if kinds is None:
        return []
    supported = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or any(kind not in supported for kind in kinds):
        raise fields.error("layer_types", f"a list of {' and '.join(supported)}")
    if len(kinds) != num_layers:
        raise CheckpointError(
            f"{fields.source}: layer_types names {len(kinds)} layers, num_hidden_layers is {num_layers}"
        )
    return [str(kind) for kind in kinds]


def rope_values(fields: Fields, layer_kind: str | None = None) -> Fields:
    """`rope_parameters` (transformers 5), where layer kinds may differ, or `rope_scaling`; empty if there is none."""
    key = "rope_parameters" if fields.has("rope_parameters") else "rope_scaling"
    values = fields.raw(key)
    if isinstance(values, dict) and layer_kind is not None and layer_kind in values:
        values, key = values[layer_kind], f"{key}.{layer_kind}"
    if values is not None and not isinstance(values, dict):
        raise fields.error(key, "an object or null")
    return Fields(values or {}, f"{fields.source}, {key}")


def rope_spec(
    fields: Fields, default_theta: float = 10000.0, values: Fields | None = None, can_be_partial: bool = False
) -> RopeSpec:
    """Rotary embedding as `rope_values` has it, with `rope_type` or, older, `type`.

    Args:
        values: instead of what `rope_values` finds.
        can_be_partial: whether a part of each head may stay as it is.
    """
    rope = rope_values(fields) if values is None else values
    kind = rope.string("rope_type", default=rope.string("type", default="default"))
    if kind not in ROPE_KINDS:
        raise CheckpointError(
            f"{rope.source}: rope type {kind!r} is not supported; supported are {', '.join(ROPE_KINDS)}"
        )
    theta = rope.number("rope_theta", default=fields.number("rope_theta", default=default_theta))
    rotary_dim = _rotary_dim(fields, rope, can_be_partial)
    if kind == "default":
        return RopeSpec(theta=theta, rotary_dim=rotary_dim)
    if kind == "longrope":
        return _longrope(fields, rope, theta, rotary_dim)
    if kind == "yarn":
        return _yarn(fields, rope, theta, rotary_dim)
    if kind == "linear":
        return RopeSpec(theta=theta, kind=kind, factor=rope.number("factor"), rotary_dim=rotary_dim)
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low:
        raise CheckpointError(f"{rope.source}: high_freq_factor {high:g} must be above low_freq_factor {low:g}")
    return RopeSpec(
        theta=theta,
        kind=kind,
        factor=rope.number("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=rope.integer("original_max_position_embeddings"),
        rotary_dim=rotary_dim,
    )


def _rotary_dim(fields: Fields, rope: Fields, can_be_partial: bool) -> int:
    """0 for all of a head."""
    place = rope if rope.has("partial_rotary_factor") else fields
    fraction = place.number("partial_rotary_factor", default=1.0)
    if fraction == 1.0:
        return 0
    if not can_be_partial or fraction > 1:
        raise CheckpointError(f"{place.source}: a partial_rotary_factor of {fraction:g} is not supported")
    quotient = fields.integer("hidden_size") // fields.integer("num_attention_heads")
    head_dim = fields.integer("head_dim", default=max(1, quotient))
    rotary_dim = int(head_dim * fraction)
    if rotary_dim < 2 or rotary_dim % 2:
        raise CheckpointError(
            f"{place.source}: partial_rotary_factor {fraction:g} of head_dim {head_dim} rotates {rotary_dim} numbers; "
            "it must be an even number of them"
        )
    return rotary_dim


def _longrope(fields: Fields, rope: Fields, theta: float, rotary_dim: int) -> RopeSpec:
    """Phi's. Source: LongRoPE (arXiv 2402.13753), as `transformers` computes its magnitude."""
    longest = fields.integer("max_position_embeddings")
    original = fields.optional_integer("original_max_position_embeddings")
    original = original or rope.integer("original_max_position_embeddings", default=longest)
    factor = rope.number("factor", default=longest / original)
    magnitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
    return RopeSpec(
        theta=theta,
        kind="longrope",
        factor=max(factor, 1.0),
        original_max_position_embeddings=original,
        frequency_divisors=_positive_numbers(rope, "long_factor"),
        short_divisors=_positive_numbers(rope, "short_factor"),
        magnitude=rope.number("attention_factor", default=magnitude),
        rotary_dim=rotary_dim,
    )


def _yarn(fields: Fields, rope: Fields, theta: float, rotary_dim: int) -> RopeSpec:
    """Source: YaRN (arXiv 2309.00071); the magnitude as `transformers` computes it."""
    original = rope.integer("original_max_position_embeddings", default=fields.integer("max_position_embeddings"))
    factor = rope.number("factor", default=fields.integer("max_position_embeddings") / original)
    mscale, all_dim = rope.raw("mscale"), rope.raw("mscale_all_dim")
    magnitude = yarn_magnitude(factor, 1.0)
    if mscale and all_dim:
        magnitude = yarn_magnitude(factor, rope.number("mscale")) / yarn_magnitude(
            factor, rope.number("mscale_all_dim")
        )
    return RopeSpec(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_position_embeddings=original,
        magnitude=rope.number("attention_factor", default=magnitude),
        rotary_dim=rotary_dim,
        beta_fast=rope.number("beta_fast", default=32.0),
        beta_slow=rope.number("beta_slow", default=1.0),
        rounds_ramp=rope.boolean("truncate", True),
    )


def yarn_magnitude(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _positive_numbers(fields: Fields, key: str) -> tuple[float, ...]:
    values = fields.raw(key)
    if values is None:
        raise fields.missing(key)
    if not isinstance(values, list) or not values or len(values) > 65536:
        raise fields.error(key, "a list of numbers")
    if not all(isinstance(value, int | float) and 0 < value < math.inf for value in values):
        raise CheckpointError(f"{fields.source}: {key} holds what is no positive number")
    return tuple(float(value) for value in values)
