"""A copy of another machine's model, of which as much is here as was asked for.

One idea: every piece is asked for with the digest of what is here. So a first copy, one that was interrupted and one
that was damaged are the same: what is right is not sent again, and nothing is used that was not compared.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import zmq

from stageline.checkpoint.checkpoint import Checkpoint
from stageline.checkpoint.digest import model_digest
from stageline.checkpoint.open import open_checkpoint
from stageline.errors import CheckpointError, FrameError
from stageline.links.frames import MessageDecoder, encode_message
from stageline.links.keys import LinkSecurity
from stageline.links.sockets import Links, Socket
from stageline.links.tcp_address import TcpAddress
from stageline.transfer.copy_files import CopyFiles
from stageline.transfer.messages import AboutModel, Answer, AskModel, AskPiece, NotGiven, Piece, Run, WeightSource
from stageline.transfer.table import ModelTable, digest_of, table_of

logger = logging.getLogger(__name__)

OnBytes = Callable[[int, int], None]
"""Called with (bytes that are right so far, bytes in all)."""

_WINDOW = 8
"""Pieces that are under way at once: 8 MiB."""

_ASK_AGAIN_S, _SILENCE_S = 5.0, 30.0
_MOST_TRIES = 3
_MAX_ANSWER_BYTES = 64 * 2**20


@dataclass
class _Asked:
    """A piece that is under way. `tries`: how often it came damaged."""

    question: AskPiece
    num_bytes: int
    tries: int = 0


class ModelCopy:
    """It is connected only while something comes: that link may break, and is taken up again, as no other one.

    Args:
        security: how the link is protected.
    Attributes:
        num_received_bytes: of weights and fronts, over the link; what was here is not among them.
    """

    def __init__(self, source: WeightSource, security: LinkSecurity | None) -> None:
        self._source = source
        self._security = security
        self._connection: Socket | None = None
        self._decoder: MessageDecoder[Answer] = MessageDecoder(Answer)
        self._files: CopyFiles | None = None
        self._checkpoint: Checkpoint | None = None
        self._table: ModelTable | None = None
        self.num_received_bytes = 0

    def open(self) -> Checkpoint:
        """What is known of the model, as if it were here; its tensors are not, before `fetch`.

        Raises: CheckpointError if the other machine does not answer, has another model, or there is no room here.
        """
        if self._checkpoint is None:
            with self._connected():
                about = self._ask_model()
                self._check_digest(about.model_digest)
                self._files = CopyFiles(Path(self._source.cache), about)
                self._fetch(dict(enumerate(about.fronts)), None)
            self._files.finish()
            self._checkpoint = self._opened(about)
        return self._checkpoint

    @contextmanager
    def _connected(self) -> Iterator[None]:
        links = Links(self._security)
        try:
            url = TcpAddress.parse(self._source.address).url
            self._connection = links.caller(url, _MAX_ANSWER_BYTES, gets_large_messages=True)
            yield
        finally:
            self._connection = None
            links.close()

    @property
    def _socket(self) -> Socket:
        assert self._connection is not None
        return self._connection

    def _opened(self, about: AboutModel) -> Checkpoint:
        assert self._files is not None
        checkpoint = open_checkpoint(self._files.path)
        self._table = table = table_of(checkpoint)
        self._check_digest(model_digest(checkpoint))
        if list(table.fronts) != about.fronts or len(table.tensors) != about.num_tensors:
            raise CheckpointError(f"{self._source.address} counts the tensors of its model otherwise than this machine")
        return checkpoint

    def _check_digest(self, found: str) -> None:
        if found != self._source.model_digest:
            raise CheckpointError(
                f"the model that {self._source.address} sends has the digest {found[:16]}, but "
                f"{self._source.model_digest[:16]} was agreed on; start the head again with the model it shall serve"
            )

    def fetch(self, names: Collection[str], on_bytes: OnBytes | None = None) -> None:
        """Let these tensors be here. Args: names: Hugging Face's. Raises: CheckpointError, as `open`."""
        self.open()
        assert self._table is not None
        table, began_s, before = self._table, time.monotonic(), self.num_received_bytes
        runs = {number: table.tensors[number - len(table.fronts)] for number in table.runs_of(names)}
        with self._connected():
            self._fetch(runs, on_bytes)
        logger.info(
            "weights from %s: %s of %s bytes came over the link, in %.1f s; the rest was here", self._source.address,
            f"{self.num_received_bytes - before:,}", f"{sum(run.num_bytes for run in runs.values()):,}",
            time.monotonic() - began_s,
        )  # fmt: skip

    def close(self) -> None:
        if self._files is not None:
            self._files.close()

    # ---- questions and answers ----

    def _ask_model(self) -> AboutModel:
        question = encode_message(AskModel())
        self._socket.send(question)
        answer, _ = self._wait(lambda: self._socket.send(question))
        if not isinstance(answer, AboutModel):
            raise CheckpointError(f"{self._source.address} does not tell of its model")
        return answer

    def _fetch(self, runs: dict[int, Run], on_bytes: OnBytes | None) -> None:
        """Args: runs: by number."""
        total, done = sum(run.num_bytes for run in runs.values()), 0
        to_come = deque((number, piece) for number, run in runs.items() for piece in range(run.num_pieces))
        under_way: dict[tuple[int, int], _Asked] = {}
        tell = _in_steps(on_bytes, total)
        tell(0)
        while to_come or under_way:
            while to_come and len(under_way) < _WINDOW:
                number, piece = to_come.popleft()
                under_way[number, piece] = self._ask(runs[number], number, piece)
            answer, data = self._wait(partial(self._send_all, under_way))
            if not isinstance(answer, Piece) or (asked := under_way.get((answer.run, answer.piece))) is None:
                continue  # the second answer to a question that was asked twice
            if self._take(runs[answer.run], asked, answer.digest, data):
                del under_way[answer.run, answer.piece]
                done += asked.num_bytes
                tell(done)

    def _ask(self, run: Run, number: int, piece: int) -> _Asked:
        assert self._files is not None
        asked = _Asked(AskPiece(number, piece, self._files.digest(run, piece)), run.piece(piece)[1])
        self._send(asked)
        return asked

    def _send_all(self, under_way: Mapping[tuple[int, int], _Asked]) -> None:
        for asked in under_way.values():
            self._send(asked)

    def _send(self, asked: _Asked) -> None:
        self._socket.send(encode_message(asked.question))

    def _take(self, run: Run, asked: _Asked, digest: bytes, data: memoryview) -> bool:
        """Returns: whether the piece is here now, and right. Raises: CheckpointError if it came damaged too often."""
        assert self._files is not None
        if not len(data) and digest == asked.question.have:
            return True
        if len(data) == asked.num_bytes and digest_of(data) == digest:
            self._files.write(run, asked.question.piece, data)
            self.num_received_bytes += len(data)
            return True
        asked.tries += 1
        if asked.tries == _MOST_TRIES:
            raise CheckpointError(
                f"piece {asked.question.piece} of run {asked.question.run} came damaged {_MOST_TRIES} times from "
                f"{self._source.address}: its digest does not fit; check that machine's disk and memory"
            )
        self._send(asked)
        return False

    def _wait(self, ask_again: Callable[[], object]) -> tuple[Answer, memoryview]:
        """The next answer, and the bytes behind it. Raises: CheckpointError if there is none, or it is a refusal."""
        for _ in range(round(_SILENCE_S / _ASK_AGAIN_S)):
            if not self._socket.poll(round(_ASK_AGAIN_S * 1000), zmq.POLLIN):
                ask_again()
                continue
            frames: Sequence[zmq.Frame] = self._socket.recv_multipart(copy=False)
            try:
                answer = self._decoder.decode(frames[0].buffer)
            except FrameError as error:
                raise CheckpointError(f"{self._source.address} sends no weights but something else: {error}") from None
            if isinstance(answer, NotGiven):
                raise CheckpointError(f"{self._source.address} gives no weights: {answer.reason}")
            return answer, frames[1].buffer if len(frames) > 1 else memoryview(b"")
        raise CheckpointError(
            f"{self._source.address} has sent no weights for {_SILENCE_S:g} s; see that this machine reaches its port"
        )


def _in_steps(on_bytes: OnBytes | None, total: int, steps: int = 100) -> Callable[[int], None]:
    """About so many calls in all, the first and the last one among them."""
    told = -total

    def tell(done: int) -> None:
        nonlocal told
        if on_bytes is not None and (done == total or (done - told) * steps >= total):
            told = done
            on_bytes(done, total)

    return tell
