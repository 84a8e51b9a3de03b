"""Whether a first token comes: the stages are started on this machine, as asked for, and one request goes through.

One idea: what hangs is ended. A deadline interrupts the start and the request alike, and says how far it came.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

from stageline.config.engine_config import EngineConfig
from stageline.doctor.finding import Finding, failed, ok
from stageline.engine.llm import LLM
from stageline.errors import StagelineError
from stageline.sampling import SamplingParams

_PROMPT = "Hello"


class _Overdue(Exception):
    pass


def check_first_request(config: EngineConfig, limit_s: float) -> Finding:
    """To be called in the main thread. Args: limit_s: for loading and the request together."""
    step = "loading the stages"
    began_s = time.monotonic()
    try:
        with _deadline(limit_s), LLM.from_config(config) as llm:
            step = "the request"
            loaded_s = time.monotonic() - began_s
            llm.generate(_PROMPT, SamplingParams(temperature=0.0, max_tokens=1))
            took_s = time.monotonic() - began_s - loaded_s
    except _Overdue:
        return failed(
            "first request", f"{step} was not done after {limit_s:g} s: it hangs, or needs longer (--first-request-s); "
            "STAGELINE_LOG_LEVEL=DEBUG tells what the stages wait for",
        )  # fmt: skip
    except StagelineError as error:
        return failed("first request", f"{step} failed: {error}")
    return ok("first request", f"loaded in {loaded_s:.1f} s, a token after {took_s:.2f} s")


@contextmanager
def _deadline(limit_s: float) -> Iterator[None]:
    def end(_number: int, _frame: object) -> None:
        raise _Overdue

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
