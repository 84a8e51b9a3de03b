"""Settings given as keyword arguments: those of vLLM and mistyped ones are answered in the words that flags are."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any

from stageline.config.foreign_flags import FOREIGN_FLAGS, FOREIGN_VALUES
from stageline.config.settings import flag_of
from stageline.errors import ConfigError

_OTHER_NAMES = {"pp": "pipeline_parallel_size", "tp": "tensor_parallel_size", "n_ctx": "max_model_len"}


def own_settings(given: Mapping[str, Any], names: Collection[str]) -> tuple[dict[str, Any], list[str]]:
    """Sort keyword arguments.

    Args:
        names: of the settings that there are.
    Returns: the settings, and a note on each that vLLM has and that changes nothing here.
    Raises: ConfigError for one that is not known, and for what vLLM would do and this does not.
    """
    own: dict[str, Any] = {}
    notes: list[str] = []
    for name, value in given.items():
        if name in names:
            _refuse_foreign_value(name, value)
            own[name] = value
        elif (foreign := FOREIGN_FLAGS.get(flag_of(name))) is None:
            raise ConfigError(f"{name} is no setting{_hint(name, names)}")
        elif value is None or (value is False and not foreign.has_value):
            # Not asked for, whatever a flag of this name would do.
            continue
        elif foreign.taken is None or str(value) in foreign.taken:
            notes.append(f"{name}={value!r} changes nothing: {foreign.words}")
        else:
            raise ConfigError(f"{name}={value!r} is not supported: {foreign.words}")
    return own, notes


def _refuse_foreign_value(name: str, value: Any) -> None:
    instead = FOREIGN_VALUES.get(flag_of(name), {}).get(value) if isinstance(value, str) else None
    if instead is not None:
        raise ConfigError(f"{name}={value!r} is not supported: {instead}")


def _hint(name: str, names: Collection[str]) -> str:
    close = _OTHER_NAMES.get(name) or next(iter(difflib.get_close_matches(name, names, n=1, cutoff=0.6)), None)
    return f"; did you mean {close}?" if close else "; `stageline generate --help` lists them, as flags"
