"""Computes masks in threads of their own, while the engine does other things, and says when some are there.

One idea: a guide is in one pair of hands at a time. It is handed in, a thread works on it, and it comes back through
`finished`; then it may be advanced and handed in again. Compiling has a thread for itself: a grammar that takes seconds
keeps other beginners waiting, but no request that is on its way.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

from stageline.errors import RequestError
from stageline.grammar.step import Step
from stageline.request import GrammarSpec, RequestFailure

logger = logging.getLogger(__name__)

WAY_OUT = "give a simpler one, with fewer and shorter repetitions or fewer optional parts"

_MOST_THREADS = 4

_GOODBYE_S = 0.5
"""More than a mask takes."""


class TokenMatcher(Protocol):
    """What is needed of `stageline.grammar.compiler.Matcher`."""

    def mask(self) -> bytes | None: ...

    def advance(self, token_id: int) -> Step: ...


class MatcherSource(Protocol):
    """What is needed of `stageline.grammar.compiler.GrammarCompiler`."""

    def new_matcher(self, spec: GrammarSpec) -> tuple[TokenMatcher, bytes]: ...


@dataclass(eq=False)
class Guide:
    """One completion's way through its grammar.

    Args:
        matcher: None until the grammar is compiled.
        mask: of the next token; None while it is being computed.
        failure: why there will be no mask; the way ends here.
        is_exceeded: the way ends here, because the grammar became too complex within the answer.
    """

    spec: GrammarSpec
    matcher: TokenMatcher | None = None
    mask: bytes | None = None
    failure: RequestFailure | None = None
    is_exceeded: bool = False


def exceeded(spec: GrammarSpec, num_tokens: int) -> RequestFailure:
    """A grammar that was accepted became too complex after so many tokens of the answer."""
    answered = "1 token" if num_tokens == 1 else f"{num_tokens} tokens"
    return RequestFailure(
        f"{spec.field} exceeded the limits of a grammar after {answered} of the answer; {WAY_OUT}",
        spec.field,
    )


class MaskPool:
    """Args:
    source: compiles grammars.
    ring: called from a thread when a guide has come back.
    """

    def __init__(self, source: MatcherSource, ring: Callable[[], None]) -> None:
        self._source = source
        self._ring = ring
        self._finished: deque[Guide] = deque()
        self._new: SimpleQueue[Guide | None] = SimpleQueue()
        self._under_way: SimpleQueue[Guide | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._is_over = False

    def compute(self, guide: Guide) -> None:
        """Let its next mask be computed; it is not to be touched until it comes back."""
        if not self._threads:
            self._start_threads()
        guide.mask = None
        (self._new if guide.matcher is None else self._under_way).put(guide)

    def finished(self) -> list[Guide]:
        """The guides that came back since this was asked before: each has a mask, or its way has ended."""
        guides = []
        while self._finished:
            guides.append(self._finished.popleft())
        return guides

    def close(self) -> None:
        """Let the threads end. One that is busy is not waited for long, unless the interpreter leaves."""
        self._end_threads(_GOODBYE_S)

    def _end_threads(self, patience_s: float | None = None) -> None:
        self._is_over = True
        for _ in self._threads:
            self._new.put(None)
            self._under_way.put(None)
        for thread in self._threads:
            thread.join(patience_s)
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        if not self._threads:
            atexit.unregister(self._end_threads)

    def _start_threads(self) -> None:
        num_threads = max(2, min(_MOST_THREADS, os.cpu_count() or 1))
        for queue in [self._new, *[self._under_way] * num_threads]:
            # Daemons: whoever leaves need not wait for all the masks that nobody wants any more.
            self._threads.append(threading.Thread(target=self._work, args=(queue,), name="masks", daemon=True))
        for thread in self._threads:
            thread.start()
        # But for those being computed: an interpreter that is torn down meanwhile crashes, or never ends.
        atexit.register(self._end_threads)

    def _work(self, queue: SimpleQueue[Guide | None]) -> None:
        while (guide := queue.get()) is not None and not self._is_over:
            try:
                self._compute(guide)
            except RequestError as error:
                guide.failure = RequestFailure(str(error), error.field)
            except Exception as error:
                logger.exception("a mask could not be computed")
                guide.failure = RequestFailure(f"{type(error).__name__}: {error}")
            self._finished.append(guide)
            self._ring()

    def _compute(self, guide: Guide) -> None:
        if guide.matcher is None:
            guide.matcher, guide.mask = self._source.new_matcher(guide.spec)
        elif (mask := guide.matcher.mask()) is not None:
            guide.mask = mask
        else:
            guide.is_exceeded = True
