"""How many bytes a KV cache takes: arithmetic that planning and the workers share."""

from __future__ import annotations

from stageline.checkpoint.model_spec import ModelSpec

_WINDOWS_PER_REQUEST = 4
"""Unless it is said how long requests are, they are expected to be so many windows long, or as long as the model
allows: so much fewer are the blocks of layers with a window. Shorter requests find fewer of these blocks, longer ones
leave some unused."""


def kept_window(spec: ModelSpec, max_model_len: int) -> int | None:
    """Tokens that layers with a window keep; None if no window is shorter than the longest sequence."""
    windows = [window for window in map(spec.window_of, range(spec.num_layers)) if window is not None]
    longest = max(windows, default=max_model_len)
    return longest if longest < max_model_len and spec.mla is None else None


def window_share(window: int, block_size: int, max_model_len: int, request_tokens: int | None = None) -> float:
    """Blocks of layers with a window, as a fraction of the others. Args: request_tokens: of a usual request."""
    return min(1.0, (window + 2 * block_size) / min(max_model_len, request_tokens or _WINDOWS_PER_REQUEST * window))


def kv_bytes_by_kind(spec: ModelSpec, layers: range, itemsize_bytes: int, window: int | None) -> tuple[int, int]:
    """Bytes of one token in the layers that keep all tokens, and in those that keep a window's."""
    num_windowed = sum(spec.window_of(layer) is not None for layer in layers) if window is not None else 0
    per_layer = kv_bytes_per_token(spec, 1, itemsize_bytes)
    return (len(layers) - num_windowed) * per_layer, num_windowed * per_layer


def kv_bytes_per_layer(
    spec: ModelSpec, num_tokens: int, itemsize_bytes: int, window: int | None, beyond_window_tokens: int = 0
) -> list[int]:
    """Bytes of one request's tokens in each layer.

    Args:
        window: as `kept_window` gives it.
        beyond_window_tokens: that a layer with a window holds besides, while a prompt is computed.
    """
    per_token = kv_bytes_per_token(spec, 1, itemsize_bytes)
    in_window = num_tokens if window is None else min(num_tokens, window + beyond_window_tokens)
    return [
        per_token * (num_tokens if spec.window_of(layer) is None else in_window) for layer in range(spec.num_layers)
    ]


def kv_bytes_per_token(spec: ModelSpec, num_layers: int, itemsize_bytes: int) -> int:
    """Bytes one token's keys and values take in the caches of `num_layers` layers.

    Args:
        itemsize_bytes: bytes per element of the cache: 4 for float32, 2 for bfloat16 and float16.
    """
    numbers = 2 * spec.num_kv_heads * spec.head_dim if spec.mla is None else spec.mla.row_size
    return num_layers * numbers * itemsize_bytes


def kv_bytes_per_block(spec: ModelSpec, num_layers: int, itemsize_bytes: int, block_size: int) -> int:
    """The same for a block of `block_size` tokens."""
    return block_size * kv_bytes_per_token(spec, num_layers, itemsize_bytes)
