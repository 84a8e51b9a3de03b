"""A stage's process from its first to its last words. One idea: be answerable before anything that takes long.

The responder is started before torch is imported, so a process whose engine dies meanwhile leaves at once; and whatever
goes wrong after that, a broken installation included, reaches the engine with its traceback.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import signal
import sys
import traceback

import msgspec
import zmq

from stageline.errors import ConfigError
from stageline.executor.messages import Failed, WorkerConfig
from stageline.links.child_process import read_message
from stageline.links.frames import encode_message
from stageline.links.sockets import Links
from stageline.log import set_up_logging
from stageline.parallel.rank_gone import RankGone
from stageline.timeline.recorder import Recorder
from stageline.timeline.stage_counters import StageAccount
from stageline.worker.broken_links import BrokenLinks
from stageline.worker.responder import start_responder

_LAST_WORDS_S = 2.0

_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Run a stage until it is told to stop. Returns: the exit status."""
    faulthandler.enable()
    _wake_when_the_engine_dies()
    config = _read_config()
    broken = BrokenLinks(config)
    links = Links(config.access.security(), on_broken=broken.on_broken)
    if config.caller_name:
        name = f"{config.caller_name}.control".encode()
        # Masks may be large; whether the head stands still is its node's business.
        engine = links.caller(config.engine_address, identity=name, gets_large_messages=True)
    else:
        engine = links.sender(config.engine_address)
    try:
        set_up_logging(config.log_level, config.stage_index)
        control = engine if config.caller_name else links.receiver(config.control_address)
        account, recorder = StageAccount(config.stage_index), Recorder()
        start_responder(config, account, recorder, broken)
        _run(config, links, control, engine, account, recorder)
        return 0
    except BaseException as error:
        engine.send(encode_message(_last_words(config, error)))
        return 1
    finally:
        links.close(linger_s=_LAST_WORDS_S)


def _wake_when_the_engine_dies() -> None:
    """A stopped process, too, has to leave in order then, and to remove the sockets' folder.

    The "parent" whose death is told is the thread that started this process, so the signal may come while the engine
    lives; SIGCONT does no harm then.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)


def _run(
    config: WorkerConfig,
    links: Links,
    control: zmq.Socket[bytes],
    engine: zmq.Socket[bytes],
    account: StageAccount,
    recorder: Recorder,
) -> None:
    if config.cores:
        os.sched_setaffinity(0, config.cores)
    # What an import leaves stays: looking for garbage among torch's objects takes a fifth of the time they are made in.
    gc.disable()
    from stageline.worker.device import set_threads
    from stageline.worker.worker import Worker

    gc.freeze()
    gc.enable()
    set_threads(config.num_threads)
    Worker(config, links, control, engine, account, recorder).run()


def _read_config() -> WorkerConfig:
    """The engine writes the length and the configuration, then keeps the pipe open as long as it lives."""
    body = read_message(sys.stdin.fileno())
    if body is None:
        sys.exit("a stage's process is started by the engine, not by hand")
    return msgspec.msgpack.decode(body, type=WorkerConfig)


def _last_words(config: WorkerConfig, error: BaseException) -> Failed:
    return Failed(
        stage_index=config.stage_index,
        message=f"{error}" if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}",
        traceback="".join(traceback.format_exception(error)),
        is_config_error=isinstance(error, ConfigError),
        rank=config.rank,
        # Another rank of this stage is to blame, if it is found to have ended.
        link_to=config.stage_index if isinstance(error, RankGone) else None,
    )
