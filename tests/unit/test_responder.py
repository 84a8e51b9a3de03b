"""While there is no pipeline, the engine's process hears its owner."""

from __future__ import annotations

import os
import threading
from collections import deque
from contextlib import ExitStack
from pathlib import Path

from stageline.clock import VirtualClock
from stageline.config.engine_config import EngineConfig
from stageline.engine.messages import Drain, EngineProcessConfig, FromOwner
from stageline.engine.responder import Responder
from stageline.links.child_process import write_message
from stageline.links.frames import encode_message

PATIENCE_S = 60.0


def test_a_pause_before_the_next_start_ends_when_an_order_comes(tmp_path: Path) -> None:
    config = EngineProcessConfig(
        engine=EngineConfig(model="none"), model_path="none", log_level="INFO", folder=str(tmp_path), num_clients=0
    )
    orders: deque[FromOwner] = deque()
    responder = Responder(config, VirtualClock(), orders)
    responder.forget_core()
    pausing = threading.Thread(target=responder.wait_for_order, args=(2 * PATIENCE_S,), daemon=True)
    pausing.start()
    with ExitStack() as ends:
        reader, writer = os.pipe()
        for end in (reader, writer):
            ends.callback(os.close, end)
        write_message(writer, encode_message(Drain()))
        responder._take_order(reader)
    pausing.join(PATIENCE_S)
    assert not pausing.is_alive()
    assert list(orders) == [Drain()]
