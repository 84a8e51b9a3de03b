"""Hostile frames by the thousand, of every kind that crosses a link: refused, never a crash, never more memory.

`python -m benchmarks.fuzz_links` does the same by the million, and at a pipeline that serves.
"""

from __future__ import annotations

import psutil
import pytest

from stageline.links.frames import MessageDecoder, encode_message
from tests.hostile_frames import TRUE_MESSAGES, Enemy

NUM_ROUNDS = 4000
MOST_GROWTH_BYTES = 32 * 2**20


def test_what_an_enemy_makes_of_true_messages_is_refused_or_within_its_limits() -> None:
    enemy = Enemy(seed=1)
    enemy.attack_parsers()
    before_bytes = psutil.Process().memory_info().rss
    for _ in range(NUM_ROUNDS):
        enemy.attack_parsers()
    assert psutil.Process().memory_info().rss - before_bytes < MOST_GROWTH_BYTES


@pytest.mark.parametrize(("kind", "message"), TRUE_MESSAGES, ids=[type(true).__name__ for _, true in TRUE_MESSAGES])
def test_the_messages_that_are_changed_are_true_ones(kind: object, message: object) -> None:
    """Otherwise an enemy would be refused at the first byte, and nothing behind it would be tried."""
    assert MessageDecoder(kind).decode(encode_message(message)) == message
