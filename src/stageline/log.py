"""Logging of Stageline's own processes: one line per message, to stderr, with the stage in front.

Only the logger "stageline" is set up. The root logger, and with it the logging of an application that embeds Stageline,
is left alone. A process that was started without a stderr, or another standard stream, gets one that leads nowhere.
"""

from __future__ import annotations

import logging
import os
import sys

from stageline.config import environment
from stageline.errors import ConfigError

LOGGER_NAME = "stageline"
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


class _StderrHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to what `sys.stderr` is at the time of the message, which may have been redirected since the set-up."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def open_standard_streams() -> None:
    """Put /dev/null in the place of each standard stream that this process was started without, as by `>&-`.

    To be called before any file is opened: that would take the stream's number, and get what is written to it.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest number that is free is this one. Children inherit it as they would a stream.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115  (for as long as the process lives)


def set_up_logging(level: str | None = None, stage_index: int | None = None) -> None:
    """Send Stageline's log to stderr as `INFO 12:34:56 [s1] message`. A later call replaces level and prefix.

    Args:
        level: DEBUG, INFO, WARNING or ERROR; None takes the environment's.
        stage_index: the stage this process runs; None for the engine's process.
    Raises: ConfigError for an unknown level.
    """
    wanted = environment.log_level() if level is None else level.upper()
    if wanted not in _LEVELS:
        raise ConfigError(f"log level {wanted!r} (STAGELINE_LOG_LEVEL) is unknown; choose from {', '.join(_LEVELS)}")
    logger = logging.getLogger(LOGGER_NAME)
    handler = next((h for h in logger.handlers if isinstance(h, _StderrHandler)), None)
    if handler is None:
        handler = _StderrHandler()
        logger.addHandler(handler)
    prefix = "" if stage_index is None else f"[s{stage_index}] "
    handler.setFormatter(logging.Formatter(f"%(levelname)s %(asctime)s {prefix}%(message)s", datefmt="%H:%M:%S"))
    logger.setLevel(wanted)
    logger.propagate = False
