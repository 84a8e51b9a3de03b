"""A progress bar over all stages while they read their weights."""

from __future__ import annotations

from typing import Any

from tqdm import tqdm


class LoadProgress:
    """Call it with (stage index, bytes read, bytes in all); it shows one bar and each stage's percentage.

    Args:
        num_stages: stages that load.
        disable: None shows the bar on a terminal only.
    """

    def __init__(self, num_stages: int, disable: bool | None = None) -> None:
        self._read = [0] * num_stages
        self._total = [0] * num_stages
        description = f"loading {num_stages} stages" if num_stages > 1 else "loading"
        self._bar: Any = tqdm(
            desc=description, unit="B", unit_scale=True, unit_divisor=1024, disable=disable, leave=False, total=0
        )

    def __call__(self, stage_index: int, num_bytes_read: int, num_bytes_total: int) -> None:
        self._bar.update(num_bytes_read - self._read[stage_index])
        self._read[stage_index] = num_bytes_read
        self._total[stage_index] = num_bytes_total
        self._bar.total = sum(self._total)
        shares = (
            f"s{index} {100 * read // max(1, total)} %"
            for index, (read, total) in enumerate(zip(self._read, self._total, strict=True))
        )
        self._bar.set_postfix_str(", ".join(shares))

    def close(self) -> None:
        self._bar.close()
