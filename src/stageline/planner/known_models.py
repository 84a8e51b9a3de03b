"""Models that can be planned without a download: their config.json, shipped as data, or one that lies on this disk.

One idea: planning needs a model's shape and no weights, so a directory with nothing but config.json is enough, and a
quantised checkpoint that the engine would refuse can be planned.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

import msgspec

from stageline.checkpoint.fields import read_json_object
from stageline.checkpoint.gguf_container import is_gguf
from stageline.checkpoint.gguf_file import open_gguf_file
from stageline.checkpoint.gguf_parts import only_model
from stageline.checkpoint.hf_config import spec_from_config
from stageline.checkpoint.model_spec import ModelSpec
from stageline.cost.model_costs import WeightFormat
from stageline.errors import ConfigError

_USUAL_BITS = {"compressed-tensors": 8, "awq": 4, "gptq": 4, "bitsandbytes": 4}
_WHAT_FOLLOWS_A_NAME = ("-instruct", "-base", "-it", "-chat", "-hf", "-gguf")
_KEPT = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}


class _Shipped(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of planner/models.

    Args:
        weights, expert_weights: how the checkpoint keeps them, if not in 16 bits.
    """

    hub_id: str
    source: str
    config: dict[str, object]
    weights: str = "bf16"
    expert_weights: str | None = None


@dataclass(frozen=True)
class KnownModel:
    """A model's shape.

    Args:
        name: as `stageline serve` would be told.
        weights: how its checkpoint keeps them.
        source: where the shape is from.
    """

    name: str
    spec: ModelSpec
    weights: WeightFormat
    source: str


def model_names() -> list[str]:
    """Of the shipped configs."""
    return sorted(_files())


def find_model(name: str) -> KnownModel:
    """A shipped model by name or hub id, a directory with config.json, that file itself, or a GGUF file (or files).

    Raises: ConfigError, with the names that come close.
    """
    path = Path(name).expanduser()
    if path.is_dir() and (path / "config.json").is_file():
        return _of_config(name, read_json_object(path / "config.json"), str(path / "config.json"))
    if path.is_dir():
        path = only_model(path) or path
    if path.is_file():
        if path.suffix == ".json":
            return _of_config(name, read_json_object(path), str(path))
        if is_gguf(path):
            return KnownModel(name, open_gguf_file(path).spec, WeightFormat(), str(path))
        raise ConfigError(f"{path} is neither a config.json nor a GGUF file, so it tells no model's shape")
    key = _key(name)
    if key in _files():
        return _of_shipped(_files()[key])
    close = difflib.get_close_matches(key, _files(), n=3, cutoff=0.5)
    known = f"did you mean {' or '.join(close)}?" if close else f"known are {', '.join(model_names())}."
    raise ConfigError(
        f"model {name!r} is not known; {known} For another, give a directory with its config.json; weights are not "
        "needed"
    )


def _key(name: str) -> str:
    key = name.rsplit("/", 1)[-1].lower().removeprefix("meta-")
    for ending in _WHAT_FOLLOWS_A_NAME:
        key = key.removesuffix(ending)
    return key


@cache
def _files() -> Mapping[str, _Shipped]:
    """By every name they may be called."""
    files: dict[str, _Shipped] = {}
    for file in resources.files("stageline.planner").joinpath("models").iterdir():
        if file.name.endswith(".json"):
            files[file.name.removesuffix(".json")] = msgspec.json.decode(file.read_bytes(), type=_Shipped)
    return files


def _of_shipped(shipped: _Shipped) -> KnownModel:
    spec = spec_from_config(shipped.config, {}, f"config.json of {shipped.hub_id}", "bfloat16")
    weights = WeightFormat(shipped.weights, shipped.expert_weights or shipped.weights)
    return KnownModel(shipped.hub_id, spec, weights, shipped.source)


def _of_config(name: str, config: Mapping[str, object], source: str) -> KnownModel:
    quantization = config.get("quantization_config")
    # The shape does not depend on how weights are kept, and code is not run for a plan.
    shape = {key: value for key, value in config.items() if key not in ("quantization_config", "auto_map")}
    spec = spec_from_config(shape, {}, source, "bfloat16")
    own = _KEPT.get(spec.dtype, "bf16")
    if not isinstance(quantization, dict):
        return KnownModel(name, spec, WeightFormat(own, own), source)
    method = str(quantization.get("quant_method", ""))
    if method == "mxfp4":
        return KnownModel(name, spec, WeightFormat(own, "mxfp4"), source)
    kept = "fp8" if method == "fp8" else _kept_as_integers(quantization, method)
    if kept is None:
        raise ConfigError(f"{source}: quantization_config of method {method!r} is not known; give --weights yourself")
    return KnownModel(name, spec, WeightFormat(kept, kept), source)


def _kept_as_integers(quantization: Mapping[str, object], method: str) -> str | None:
    """By the bits that it says, or those that are usual; fewer than four are planned as four. None if not known."""
    if method not in _USUAL_BITS:
        return None
    values = quantization
    groups = quantization.get("config_groups")
    if isinstance(groups, dict):
        group = next(iter(groups.values()), None)
        weights = group.get("weights") if isinstance(group, dict) else None
        values = weights if isinstance(weights, dict) else {}
    if values.get("load_in_8bit") is True:
        return "int8"
    bits = next((values[key] for key in ("num_bits", "bits", "w_bit") if key in values), _USUAL_BITS[method])
    if values.get("type") == "float" and bits == 8:
        return "fp8"
    return "int8" if isinstance(bits, int) and bits > 4 else "int4"
