"""A bell that is rung is heard once, by who waits for it now or later; after its end it is silent."""

from __future__ import annotations

import select
import threading

import pytest

from stageline.links.wakeup import Wakeup

DEADLINE_S = 30.0


def _is_ringing(wakeup: Wakeup) -> bool:
    return bool(select.select([wakeup.fd], [], [], 0)[0])


def test_however_often_it_is_rung_it_is_heard_once() -> None:
    wakeup = Wakeup()
    assert not _is_ringing(wakeup)
    for _ in range(100_000):  # more than a pipe holds
        wakeup.ring()
    while _is_ringing(wakeup):
        wakeup.heard()
    wakeup.heard()
    wakeup.ring()
    assert _is_ringing(wakeup)
    wakeup.close()


def test_another_thread_wakes_who_waits() -> None:
    wakeup = Wakeup()
    threading.Thread(target=wakeup.ring).start()
    assert select.select([wakeup.fd], [], [], DEADLINE_S)[0] == [wakeup.fd]
    wakeup.close()


@pytest.mark.parametrize("num_closes", [1, 2])
def test_a_closed_bell_can_be_rung(num_closes: int) -> None:
    wakeup = Wakeup()
    for _ in range(num_closes):
        wakeup.close()
    wakeup.ring()
