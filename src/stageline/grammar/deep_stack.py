"""Runs what may recurse as deeply as a text is long, in a thread with room for that.

One idea: the library that compiles grammars follows references by recursion, in native code, which ends the whole
process where a stack is too small. A text of bounded size nests only so deeply, so a stack that is large enough exists;
of its memory, only what is touched is taken.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

STACK_BYTES = 512 * 2**20
"""Several times what the deepest definition of the longest text takes."""

_Result = TypeVar("_Result")
_one_at_a_time = threading.Lock()


def on_a_deep_stack(work: Callable[[], _Result]) -> _Result:
    """What `work` returns or raises; it runs in a thread of its own, which is waited for."""
    outcome: Future[_Result] = Future()

    def run() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)

    with _one_at_a_time:
        # The size is the process's: whoever starts a thread in this moment gets a large stack, too, and no harm.
        usual_bytes = threading.stack_size(STACK_BYTES)
        try:
            thread = threading.Thread(target=run, name="deep", daemon=True)
            thread.start()
        finally:
            threading.stack_size(usual_bytes)
    thread.join()
    return outcome.result()
