"""config.json of a Hugging Face directory becomes a ModelSpec. A checkpoint's own code is never run: it is refused."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from stageline.checkpoint.architectures import ASSUMED, READERS
from stageline.checkpoint.fields import Fields
from stageline.checkpoint.model_spec import ModelSpec
from stageline.checkpoint.quantization import read_quantization
from stageline.errors import CheckpointError

# Released with code of their own, which is ignored: what it computes is known.
CODE_IS_KNOWN = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "Phi3ForCausalLM")
DTYPES = ("float32", "bfloat16", "float16")


def spec_from_config(
    config: Mapping[str, object], generation_config: Mapping[str, object], source: str, stored_dtype: str
) -> ModelSpec:
    """Args:
        config, generation_config: the two files' contents; the second may be empty.
        source: what to call config.json in messages.
        stored_dtype: the weights' own dtype, taken when config.json names none.
    Raises: CheckpointError for what is missing, wrong, or not supported.
    """
    fields = Fields(config, source)
    _refuse_unsupported(fields)
    architecture = _architecture(fields)
    assumed = ASSUMED.get(architecture, {})
    spec = replace(
        READERS[architecture](Fields({**assumed, **config}, source)),
        dtype=_dtype(fields, stored_dtype),
        bos_token_id=next(iter(fields.token_ids("bos_token_id")), None),
        eos_token_ids=_eos_token_ids(fields, generation_config),
    )
    check_spec(spec, source)
    return spec


def check_spec(spec: ModelSpec, source: str) -> None:
    """What must hold between the numbers of any model. Raises: CheckpointError."""
    if spec.num_heads % spec.num_kv_heads:
        raise CheckpointError(
            f"{source}: {spec.num_heads} attention heads cannot share {spec.num_kv_heads} key/value heads evenly"
        )
    if spec.head_dim % 2:
        raise CheckpointError(f"{source}: head_dim is {spec.head_dim}; rotary embedding needs an even number")
    for rope in (spec.rope, spec.window_rope):
        if rope is not None and rope.theta <= 1:
            raise CheckpointError(f"{source}: rotary embedding has base {rope.theta:g}; it must be above 1")
    rotary_dim = spec.rope.rotary_dim or spec.head_dim
    for divisors in (spec.rope.frequency_divisors, spec.rope.short_divisors):
        if divisors and len(divisors) != rotary_dim // 2:
            raise CheckpointError(
                f"{source}: {len(divisors)} rotary frequency divisors where {rotary_dim} numbers of a head rotate; "
                f"expected {rotary_dim // 2}"
            )


def _architecture(fields: Fields) -> str:
    supported = ", ".join(READERS)
    names = fields.raw("architectures")
    if not isinstance(names, list) or not names:
        raise CheckpointError(f"{fields.source}: architectures is {names!r}; it must name one of {supported}")
    if names[0] not in READERS:
        raise CheckpointError(f"{fields.source}: architecture {names[0]!r} is not supported; supported are {supported}")
    return str(names[0])


def _refuse_unsupported(fields: Fields) -> None:
    names = fields.raw("architectures")
    if fields.has("auto_map") and not (isinstance(names, list) and names[:1] and names[0] in CODE_IS_KNOWN):
        raise CheckpointError(
            f"{fields.source}: auto_map asks for the checkpoint's own code, which is never run; use a model of one of "
            f"the supported architectures: {', '.join(READERS)}"
        )
    if fields.boolean("use_bidirectional_attention", False):
        raise CheckpointError(
            f"{fields.source}: use_bidirectional_attention is true, so tokens attend to later ones; only models that "
            "generate text token by token are supported"
        )
    read_quantization(fields)


def _dtype(fields: Fields, stored_dtype: str) -> str:
    key = "dtype" if fields.has("dtype") else "torch_dtype"
    dtype = fields.string(key, default=stored_dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise CheckpointError(f"{fields.source}: {key} {dtype!r} is not supported; supported are {', '.join(DTYPES)}")
    return dtype


def _eos_token_ids(fields: Fields, generation_config: Mapping[str, object]) -> tuple[int, ...]:
    generation = Fields(generation_config, "generation_config.json")
    merged = fields.token_ids("eos_token_id") + generation.token_ids("eos_token_id")
    return tuple(dict.fromkeys(merged))
