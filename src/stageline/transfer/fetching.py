"""Fetches runs of bytes from several machines at once: the head says what is right, whoever has a piece may give it.

One idea: a piece is known by the head's digest before anybody is asked for it. So it does not matter who sends it, and
a machine that is lost, or sends something else, costs nothing but asking another one. Each has a few pieces under way
at a time, and gets the next when one came: a quick one gives more than a slow one.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import zmq

from stageline.errors import CheckpointError, FrameError
from stageline.links.frames import MessageDecoder, encode_message
from stageline.links.sockets import Socket
from stageline.transfer.copy_files import CopyFiles
from stageline.transfer.messages import (
    DIGEST_BYTES,
    MOST_DIGESTS,
    AboutModel,
    Answer,
    AskDigests,
    AskModel,
    AskPiece,
    Digests,
    NotGiven,
    NotHere,
    Piece,
    Run,
)
from stageline.transfer.table import digest_of

logger = logging.getLogger(__name__)

OnBytes = Callable[[int, int], None]
"""Called with (bytes that are right so far, bytes in all)."""

_WINDOW, _WINDOW_OF_HEAD = 8, 2
"""Pieces that are under way from one machine at once; from the head, if it is not alone, fewer: what it says of others'
pieces waits behind its own."""

_AHEAD = 256
"""Pieces whose digests are known before they are asked for: the head's answers wait behind the pieces that it sends."""

_MOST_DIGEST_QUESTIONS = 32
_ASK_AGAIN_S, _SILENCE_S = 5.0, 30.0
_MOST_TRIES = 3
_MOST_WRONG = 8

_Key = tuple[int, int]


@dataclass
class _Wanted:
    """A piece that is not here. `refused_by`: who does not have it, or has it otherwise. `tries`: of the head."""

    run: int
    piece: int
    digest: bytes
    num_bytes: int
    refused_by: set[str] = field(default_factory=set)
    tries: int = 0

    @property
    def key(self) -> _Key:
        return self.run, self.piece


@dataclass(eq=False)
class Source:
    """A machine that gives pieces.

    Attributes:
        heard_s: when it was last heard, or asked after a silence with nothing to say.
        num_bytes: right ones that came from it.
    """

    address: str
    socket: Socket
    is_head: bool = False
    under_way: dict[_Key, _Wanted] = field(default_factory=dict)
    heard_s: float = 0.0
    asked_s: float = 0.0
    num_wrong: int = 0
    num_bytes: int = 0

    def receive(self, decoder: MessageDecoder[Answer]) -> tuple[Answer, memoryview] | None:
        """What it said, and the bytes behind it; None if there is nothing. Raises: CheckpointError."""
        try:
            frames: Sequence[zmq.Frame] = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        self.heard_s = self.asked_s = time.monotonic()
        try:
            answer = decoder.decode(frames[0].buffer)
        except FrameError as error:
            raise CheckpointError(f"{self.address} sends no weights but something else: {error}") from None
        if isinstance(answer, NotGiven):
            raise CheckpointError(f"{self.address} gives no weights: {answer.reason}")
        return answer, frames[1].buffer if len(frames) > 1 else memoryview(b"")

    def ask(self, question: AskModel | AskDigests | AskPiece, is_idle: bool) -> None:
        if is_idle:
            self.heard_s = self.asked_s = time.monotonic()
        self.socket.send(encode_message(question))

    def silence(self) -> CheckpointError:
        return CheckpointError(
            f"{self.address} has sent no weights for {_SILENCE_S:g} s; see that this machine reaches its port"
        )


def ask_model(head: Source) -> AboutModel:
    """Raises: CheckpointError if there is no answer, or a refusal."""
    decoder: MessageDecoder[Answer] = MessageDecoder(Answer)
    for _ in range(round(_SILENCE_S / _ASK_AGAIN_S)):
        head.ask(AskModel(), is_idle=True)
        while head.socket.poll(round(_ASK_AGAIN_S * 1000), zmq.POLLIN):
            received = head.receive(decoder)
            if received is not None and isinstance(received[0], AboutModel):
                return received[0]
    raise head.silence()


class Fetch:
    """Let these runs be here.

    Args:
        sources: the head first.
        runs: by number.
    """

    def __init__(
        self, files: CopyFiles, sources: Sequence[Source], runs: Mapping[int, Run], on_bytes: OnBytes | None
    ) -> None:
        self._files = files
        self._head = sources[0]
        self._sources = list(sources)
        self._runs = runs
        self._decoder: MessageDecoder[Answer] = MessageDecoder(Answer)
        self._to_compare = _digest_questions(runs)
        self._comparing: dict[_Key, AskDigests] = {}
        self._wanted: deque[_Wanted] = deque()
        self._is_all_compared = False
        self._done_bytes = 0
        self._tell = _in_steps(on_bytes, sum(run.num_bytes for run in runs.values()))
        self._poller = zmq.Poller()
        for source in sources:
            self._poller.register(source.socket, zmq.POLLIN)

    def run(self) -> None:
        """Raises: CheckpointError if the head sends nothing, something else, or damaged pieces; or the disk is full."""
        self._tell(0)
        while not self._is_done():
            self._ask_digests()
            self._ask_pieces()
            if self._is_done():
                return
            waiting = [source.asked_s for source in self._sources if self._owes(source)]
            left_s = min(waiting) + _ASK_AGAIN_S - time.monotonic()
            ready = dict(self._poller.poll(max(0, round(left_s * 1000))))
            for source in [one for one in self._sources if one.socket in ready]:
                self._listen(source)
            for source in [one for one in self._sources if self._owes(one)]:
                self._look_after(source)

    def _is_done(self) -> bool:
        return self._is_all_compared and not (
            self._comparing or self._wanted or any(source.under_way for source in self._sources)
        )

    def _owes(self, source: Source) -> bool:
        return bool(source.under_way) or (source.is_head and bool(self._comparing))

    # ---- questions ----

    def _ask_digests(self) -> None:
        while len(self._comparing) < _MOST_DIGEST_QUESTIONS and not self._is_all_compared:
            if len(self._wanted) + sum(question.num_pieces for question in self._comparing.values()) >= _AHEAD:
                return
            question = next(self._to_compare, None)
            if question is None:
                self._is_all_compared = True
                return
            self._head.ask(question, is_idle=not self._owes(self._head))
            self._comparing[question.run, question.first_piece] = question

    def _ask_pieces(self) -> None:
        """One of each in turn, the head last, for all ask it; of the others first who gave least."""
        has_asked = True
        while has_asked and self._wanted:
            has_asked = False
            for source in sorted(self._sources, key=lambda one: (one.is_head, len(one.under_way), one.num_bytes)):
                if len(source.under_way) < self._window_of(source) and (wanted := self._next_of(source)) is not None:
                    source.ask(AskPiece(*wanted.key), is_idle=not self._owes(source))
                    source.under_way[wanted.key] = wanted
                    has_asked = True

    def _window_of(self, source: Source) -> int:
        return _WINDOW_OF_HEAD if source.is_head and len(self._sources) > 1 else _WINDOW

    def _next_of(self, source: Source) -> _Wanted | None:
        for place, wanted in enumerate(self._wanted):
            if source.address not in wanted.refused_by:
                del self._wanted[place]
                return wanted
        return None

    # ---- answers ----

    def _listen(self, source: Source) -> None:
        try:
            while source in self._sources and (received := source.receive(self._decoder)) is not None:
                self._take(source, *received)
        except CheckpointError as error:
            if source.is_head:
                raise
            self._do_without(source, str(error))

    def _take(self, source: Source, answer: Answer, data: memoryview) -> None:
        match answer:
            case Digests() if source.is_head:
                self._compare(answer)
            case Piece():
                # None: the second answer to a question that was asked twice.
                if (wanted := source.under_way.pop((answer.run, answer.piece), None)) is not None:
                    self._keep(source, wanted, data)
            case NotHere():
                if (wanted := source.under_way.pop((answer.run, answer.piece), None)) is not None:
                    self._ask_another(source, wanted)

    def _compare(self, answer: Digests) -> None:
        question = self._comparing.pop((answer.run, answer.first_piece), None)
        if question is None:
            return
        run, count = self._runs[answer.run], question.num_pieces
        if len(answer.digests) != count * DIGEST_BYTES:
            raise CheckpointError(f"{self._head.address} tells {len(answer.digests)} bytes as {count} pieces' digests")
        for index in range(count):
            piece, expected = question.first_piece + index, answer.digests[index * DIGEST_BYTES :][:DIGEST_BYTES]
            num_bytes = run.piece(piece)[1]
            if self._files.digest(run, piece) == expected:
                self._count(num_bytes)
            else:
                self._wanted.append(_Wanted(answer.run, piece, expected, num_bytes))

    def _keep(self, source: Source, wanted: _Wanted, data: memoryview) -> None:
        if len(data) == wanted.num_bytes and digest_of(data) == wanted.digest:
            self._files.write(self._runs[wanted.run], wanted.piece, data)
            source.num_bytes += len(data)
            self._count(len(data))
            return
        self._ask_another(source, wanted)
        if source.is_head:
            wanted.tries += 1
            if wanted.tries == _MOST_TRIES:
                raise CheckpointError(
                    f"piece {wanted.piece} of run {wanted.run} came damaged {_MOST_TRIES} times from {source.address}: "
                    "its digest does not fit; check that machine's disk and memory"
                )
            return
        source.num_wrong += 1
        if source.num_wrong == _MOST_WRONG:
            self._do_without(source, f"{source.address} has other weights than {self._head.address}")

    def _ask_another(self, source: Source, wanted: _Wanted) -> None:
        if not source.is_head:
            wanted.refused_by.add(source.address)
        self._wanted.appendleft(wanted)

    def _count(self, num_bytes: int) -> None:
        self._done_bytes += num_bytes
        self._tell(self._done_bytes)

    # ---- who says nothing ----

    def _look_after(self, source: Source) -> None:
        """Raises: CheckpointError if it is the head, and silent for too long."""
        now_s = time.monotonic()
        if now_s - source.asked_s < _ASK_AGAIN_S:
            return
        if not source.is_head:
            self._do_without(source, f"{source.address} has sent no weights for {_ASK_AGAIN_S:g} s")
        elif now_s - source.heard_s >= _SILENCE_S:
            raise source.silence()
        else:
            source.asked_s = now_s
            for question in self._comparing.values():
                source.ask(question, is_idle=False)
            for wanted in source.under_way.values():
                source.ask(AskPiece(*wanted.key), is_idle=False)

    def _do_without(self, source: Source, why: str) -> None:
        logger.warning("%s; its part comes from elsewhere", why)
        self._sources.remove(source)
        self._poller.unregister(source.socket)
        self._wanted.extendleft(source.under_way.values())
        source.under_way.clear()


def _digest_questions(runs: Mapping[int, Run]) -> Iterator[AskDigests]:
    for number, run in runs.items():
        for first in range(0, run.num_pieces, MOST_DIGESTS):
            yield AskDigests(number, first, min(MOST_DIGESTS, run.num_pieces - first))


def _in_steps(on_bytes: OnBytes | None, total: int, steps: int = 100) -> Callable[[int], None]:
    """About so many calls in all, the first and the last one among them."""
    told = -total

    def tell(done: int) -> None:
        nonlocal told
        if on_bytes is not None and (done == total or (done - told) * steps >= total):
            told = done
            on_bytes(done, total)

    return tell
