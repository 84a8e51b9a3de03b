"""config.json of a Hugging Face directory becomes a ModelSpec. A checkpoint's own code is never run: it is refused."""

from __future__ import annotations

from collections.abc import Mapping

from stageline.checkpoint.fields import Fields
from stageline.checkpoint.model_spec import ModelSpec, RopeSpec
from stageline.errors import CheckpointError

# Architecture -> family. Qwen2 is the same block with biases on q, k and v only.
ARCHITECTURES = {"LlamaForCausalLM": "llama", "MistralForCausalLM": "llama", "Qwen2ForCausalLM": "llama"}
ROPE_KINDS = ("default", "linear", "llama3")
DTYPES = ("float32", "bfloat16", "float16")
# What transformers assumes for a Mistral whose config does not mention it.
MISTRAL_SLIDING_WINDOW = 4096


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
    architecture = _supported_architecture(fields)
    _refuse_unsupported(fields)
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    if not fields.has("head_dim") and hidden_size % num_heads:
        raise CheckpointError(
            f"{source}: hidden_size {hidden_size} is not a multiple of num_attention_heads {num_heads} and there is no "
            "head_dim"
        )
    is_llama, is_qwen2 = architecture == "LlamaForCausalLM", architecture == "Qwen2ForCausalLM"
    attention_bias = is_qwen2 or (is_llama and fields.boolean("attention_bias", False))
    spec = ModelSpec(
        family=ARCHITECTURES[architecture],
        num_layers=fields.integer("num_hidden_layers"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", default=num_heads),
        head_dim=fields.integer("head_dim", default=hidden_size // num_heads),
        intermediate_size=fields.integer("intermediate_size"),
        vocab_size=fields.integer("vocab_size"),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        rms_norm_eps=fields.number("rms_norm_eps", default=1e-6),
        rope=_rope(fields),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        attention_bias=attention_bias,
        attention_output_bias=attention_bias and not is_qwen2,
        mlp_bias=is_llama and fields.boolean("mlp_bias", False),
        sliding_window=_sliding_window(fields, architecture),
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
    divisors = spec.rope.frequency_divisors
    if divisors and len(divisors) != spec.head_dim // 2:
        raise CheckpointError(
            f"{source}: {len(divisors)} rotary frequency divisors for head_dim {spec.head_dim}; "
            f"expected {spec.head_dim // 2}"
        )


def _supported_architecture(fields: Fields) -> str:
    supported = ", ".join(ARCHITECTURES)
    names = fields.raw("architectures")
    if not isinstance(names, list) or not names:
        raise CheckpointError(f"{fields.source}: architectures is {names!r}; it must name one of {supported}")
    if names[0] not in ARCHITECTURES:
        raise CheckpointError(f"{fields.source}: architecture {names[0]!r} is not supported; supported are {supported}")
    return str(names[0])


def _refuse_unsupported(fields: Fields) -> None:
    if fields.has("auto_map"):
        raise CheckpointError(
            f"{fields.source}: auto_map asks for the checkpoint's own code, which is never run; use a model of one of "
            f"the supported architectures: {', '.join(ARCHITECTURES)}"
        )
    if fields.has("quantization_config"):
        quantization = fields.raw("quantization_config")
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise CheckpointError(
            f"{fields.source}: quantization_config of method {method!r} is not supported; use an unquantised "
            "checkpoint or a GGUF file"
        )
    activation = fields.string("hidden_act", default="silu")
    if activation not in ("silu", "swish"):
        raise CheckpointError(f"{fields.source}: hidden_act {activation!r} is not supported; supported is silu")


def _rope(fields: Fields) -> RopeSpec:
    """Reads `rope_parameters` (transformers 5) or `rope_scaling` with `rope_type` or, older, `type`."""
    key = "rope_parameters" if fields.has("rope_parameters") else "rope_scaling"
    values = fields.raw(key)
    if values is not None and not isinstance(values, dict):
        raise fields.error(key, "an object or null")
    rope = Fields(values or {}, f"{fields.source}, {key}")
    kind = rope.string("rope_type", default=rope.string("type", default="default"))
    if kind not in ROPE_KINDS:
        raise CheckpointError(
            f"{rope.source}: rope type {kind!r} is not supported; supported are {', '.join(ROPE_KINDS)}"
        )
    for place in (rope, fields):
        if place.number("partial_rotary_factor", default=1.0) != 1.0:
            raise CheckpointError(f"{place.source}: a partial_rotary_factor other than 1 is not supported")
    theta = rope.number("rope_theta", default=fields.number("rope_theta", default=10000.0))
    if kind == "default":
        return RopeSpec(theta=theta)
    if kind == "linear":
        return RopeSpec(theta=theta, kind=kind, factor=rope.number("factor"))
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
    )


def _sliding_window(fields: Fields, architecture: str) -> int | None:
    layer_types = fields.raw("layer_types")
    if isinstance(layer_types, list) and len(set(map(str, layer_types))) > 1:
        kinds = ", ".join(sorted(set(map(str, layer_types))))
        raise CheckpointError(f"{fields.source}: layer_types mixes {kinds}; all layers must be of one kind")
    if architecture == "Qwen2ForCausalLM" and fields.boolean("use_sliding_window", False):
        raise CheckpointError(
            f"{fields.source}: use_sliding_window is true, which gives some layers a window and others none; this is "
            "not supported"
        )
    if architecture != "MistralForCausalLM":
        return None
    if not fields.is_present("sliding_window"):
        return MISTRAL_SLIDING_WINDOW
    return fields.optional_integer("sliding_window")


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
