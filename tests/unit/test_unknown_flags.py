"""A flag that is not known is answered with the one that was meant."""

from __future__ import annotations

import pytest

from stageline.cli.main import main


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        (["serve", "m", "--prot", "17"], "unrecognized arguments: --prot 17; did you mean --port?"),
        (["generate", "m", "-dp", "2"], "unrecognized arguments: -dp 2; -dp: replicas are for stageline serve"),
        (["generate", "m", "--gpu-memory-utilization=0.9"], "sized with --kv-cache-memory"),
        (["serve", "m", "--enforce-eager"], "--enforce-eager is not needed here: leave it out"),
        (["serve", "m", "--served-model-name", "a", "b"], "unrecognized arguments: b (see stageline serve --help)"),
        (["serve", "m", "--quite-something-else"], "unrecognized arguments: --quite-something-else (see"),
    ],
)
def test_a_flag_that_is_not_known(capsys: pytest.CaptureFixture[str], typed: list[str], told: str) -> None:
    assert main(typed) == 2
    assert told in capsys.readouterr().err
