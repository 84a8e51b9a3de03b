"""Typed access to the values of a file we did not write: what is missing or wrong names its key and its file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import msgspec

from stageline.errors import CheckpointError

LARGEST_INTEGER = 2**31 - 1
LARGEST_JSON_BYTES = 64 * 2**20


class Fields:
    """Values by key, from one source; a null counts as missing.

    Args:
        values: the keys and values.
        source: what to call the file in messages.

    Every getter raises CheckpointError for a missing key without a default and for a value of the wrong kind or range.
    """

    def __init__(self, values: Mapping[str, object], source: str) -> None:
        self._values = values
        self.source = source

    @property
    def values(self) -> Mapping[str, object]:
        return self._values

    def raw(self, key: str) -> object | None:
        return self._values.get(key)

    def has(self, key: str) -> bool:
        return self._values.get(key) is not None

    def error(self, key: str, wanted: str) -> CheckpointError:
        return CheckpointError(f"{self.source}: {key} is {self._values.get(key)!r}; it must be {wanted}")

    def missing(self, key: str) -> CheckpointError:
        return CheckpointError(f"{self.source}: {key} is missing; the model cannot be built without it")

    def integer(self, key: str, default: int | None = None, lowest: int = 1) -> int:
        value = self._values.get(key)
        if value is None:
            if default is None:
                raise self.missing(key)
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value <= LARGEST_INTEGER:
            raise self.error(key, f"an integer of at least {lowest}")
        return value

    def optional_integer(self, key: str, lowest: int = 1) -> int | None:
        return self.integer(key, lowest=lowest) if self.has(key) else None

    def number(self, key: str, default: float | None = None) -> float:
        """A positive finite number."""
        value = self._values.get(key)
        if value is None:
            if default is None:
                raise self.missing(key)
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value <= 0:
            raise self.error(key, "a positive number")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self._values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def string(self, key: str, default: str | None = None) -> str:
        value = self._values.get(key)
        if value is None:
            if default is None:
                raise self.missing(key)
            return default
        if not isinstance(value, str):
            raise self.error(key, "a string")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        """An id, a list of ids, or nothing."""
        value = self._values.get(key)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i <= LARGEST_INTEGER for i in ids):
            raise self.error(key, "a token id or a list of them")
        return tuple(ids)


def read_json_object(path: Path) -> dict[str, object]:
    """A JSON file that holds an object. Raises: CheckpointError, naming the file."""
    try:
        if (num_bytes := path.stat().st_size) > LARGEST_JSON_BYTES:
            raise CheckpointError(f"{path} has {num_bytes} bytes; at most {LARGEST_JSON_BYTES} are read as JSON")
        return msgspec.json.decode(path.read_bytes(), type=dict[str, object])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a JSON object: {error}") from error
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
