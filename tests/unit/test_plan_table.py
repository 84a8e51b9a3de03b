"""The decode table is what the general model says of its assumptions, to the last printed digit."""

from __future__ import annotations

import pytest

from stageline.errors import ConfigError
from stageline.planner.decode_table import PRESETS, format_table, preset, table_rows

PUBLISHED = """\
TPxPP  GPUs  Conc  TPOT ms  Token/s  Token/s/GPU
  8x1     8     1     6.93      144           18
  4x2     8     1    12.26       82           10
  2x4     8     1    22.91       44            5
 16x1    16     1     7.58      132            8
  8x2    16     1     6.96      144            9
  8x1     8    64    10.73     5967          746
  4x2     8    64    15.63     4094          512
  2x4     8    64    26.01     2461          308
 16x1    16    64    16.93     3780          236
  8x2    16    64     8.85     7233          452"""


def test_the_table_of_two_tensors_per_hop_is_reproduced_to_the_last_digit() -> None:
    assert format_table(table_rows(preset("two-tensor-hop"))) == PUBLISHED


def test_one_tensor_per_hop_changes_only_layouts_with_hops_and_only_by_the_bytes_of_the_hop() -> None:
    two, one = table_rows(PRESETS["two-tensor-hop"]), table_rows(PRESETS["one-tensor-hop"])
    for before, after in zip(two, one, strict=True):
        num_hops = before.pipeline_parallel_size - 1
        rate = 450e9 if before.num_devices <= 8 else 50e9
        saved_s = num_hops * before.pace.rows * 8192 * 2 / rate
        assert before.pace.tpot_s - after.pace.tpot_s == pytest.approx(saved_s, abs=1e-12)


def test_an_unknown_table_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(ConfigError, match="known are two-tensor-hop, one-tensor-hop"):
        preset("decode")
