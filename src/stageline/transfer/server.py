"""The machine that has a model's weights: answers who asks for pieces of them, from a thread of its own.

One idea: it keeps no state per caller. Every question is answered from the files alone, so an interrupted copy goes on
with the next question; and what a caller does not fetch is dropped once a few answers wait for it.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import zmq

from stageline.checkpoint.checkpoint import Checkpoint
from stageline.checkpoint.digest import model_digest
from stageline.checkpoint.hf_directory import CONFIG, GENERATION_CONFIG
from stageline.errors import FrameError
from stageline.links.frames import MessageDecoder, encode_message
from stageline.links.keys import LinkSecurity
from stageline.links.sockets import Links, Socket, bound_address
from stageline.links.tcp_address import TcpAddress
from stageline.links.wakeup import Wakeup
from stageline.transfer.copy_files import has_all_data
from stageline.transfer.messages import (
    MOST_DIGESTS,
    AboutModel,
    AskDigests,
    AskModel,
    AskPiece,
    Digests,
    NotGiven,
    NotHere,
    Piece,
    Question,
    Run,
)
from stageline.transfer.table import digest_of, fingerprint_of, table_of

logger = logging.getLogger(__name__)

_MAX_QUESTION_BYTES = 4096
_MOST_WAITING_FRAMES = 64
"""For one caller: a piece is two frames, so at most 32 MiB."""


class WeightServer:
    """Answers until `close`.

    Args:
        address: where; with port 0 a free one is taken.
        is_whole: false for a copy that may have holes.
    Attributes:
        address: where, with the port that was taken.
    Raises: ConfigError if that cannot be listened on.
    """

    def __init__(
        self, checkpoint: Checkpoint, address: TcpAddress, security: LinkSecurity | None, is_whole: bool = True
    ) -> None:
        self._checkpoint = checkpoint
        self._is_whole = is_whole
        self._table = table_of(checkpoint)
        self._runs = (*self._table.fronts, *self._table.tensors)
        self._about: AboutModel | None = None
        self._files: dict[str, int] = {}
        self._decoder: MessageDecoder[Question] = MessageDecoder(Question)
        self._links = Links(security)
        self._bell = Wakeup()
        try:
            socket = self._links.listener(address.url, _MAX_QUESTION_BYTES, most_waiting=_MOST_WAITING_FRAMES)
        except BaseException:
            self._links.close()
            self._bell.close()
            raise
        self.address = TcpAddress.parse(bound_address(socket))
        self._thread = threading.Thread(target=self._run, args=(socket,), name="weights", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._bell.ring()
        self._thread.join()
        self._links.close()
        self._bell.close()
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def _run(self, socket: Socket) -> None:
        poller = zmq.Poller()
        poller.register(self._bell.fd, zmq.POLLIN)
        poller.register(socket, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._bell.fd in ready:
                return
            frames = socket.recv_multipart()
            if len(frames) == 2:
                self._send(socket, [frames[0], *self._answer(frames[1])])

    def _send(self, socket: Socket, frames: list[bytes]) -> None:
        try:
            socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            # It left before it was answered, or lets more answers wait than it should.
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise

    def _answer(self, frame: bytes) -> list[bytes]:
        try:
            question = self._decoder.decode(frame)
            if isinstance(question, AskModel):
                self._about = self._about or self._describe()
                return [encode_message(self._about)]
            if isinstance(question, AskDigests):
                return self._digests(question)
            return self._piece(question)
        except FrameError as error:
            return [encode_message(NotGiven(str(error)))]
        except OSError as error:
            logger.error("weights cannot be sent: %s", error)
            return [encode_message(NotGiven(f"the weights cannot be read there: {error.strerror}"))]

    def _digests(self, asked: AskDigests) -> list[bytes]:
        """Raises: FrameError if there are no such pieces, or too many; OSError."""
        if not 0 < asked.num_pieces <= MOST_DIGESTS:
            raise FrameError(f"digests of {asked.num_pieces} pieces at once; ask for 1 to {MOST_DIGESTS}")
        pieces = range(asked.first_piece, asked.first_piece + asked.num_pieces)
        run = self._run_with(asked.run, pieces)
        digests = b"".join(digest_of(self._read(run, piece)) for piece in pieces)
        return [encode_message(Digests(asked.run, asked.first_piece, digests))]

    def _piece(self, asked: AskPiece) -> list[bytes]:
        """Raises: FrameError if there is no such piece of this model; OSError."""
        run = self._run_with(asked.run, range(asked.piece, asked.piece + 1))
        if not self._is_whole and not has_all_data(self._file(run), *run.piece(asked.piece)):
            return [encode_message(NotHere(asked.run, asked.piece))]
        return [encode_message(Piece(asked.run, asked.piece)), self._read(run, asked.piece)]

    def _run_with(self, number: int, pieces: range) -> Run:
        """Raises: FrameError."""
        if not 0 <= number < len(self._runs) or not 0 <= pieces[0] <= pieces[-1] < self._runs[number].num_pieces:
            raise FrameError(f"the model has no piece {pieces[-1]} of run {number}; it has {len(self._runs)} runs")
        return self._runs[number]

    def _file(self, run: Run) -> int:
        file = self._table.files[run.file]
        if file not in self._files:
            self._files[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        return self._files[file]

    def _read(self, run: Run, piece: int) -> bytes:
        offset, num_bytes = run.piece(piece)
        data = os.pread(self._file(run), num_bytes, offset)
        if len(data) != num_bytes:
            raise FrameError(f"the file there is shorter than it was: no {num_bytes} bytes at byte {offset}")
        return data

    def _describe(self) -> AboutModel:
        """Raises: OSError."""
        folder, is_gguf = Path(self._checkpoint.path), self._checkpoint.is_gguf
        more = folder / GENERATION_CONFIG
        return AboutModel(
            model_digest=model_digest(self._checkpoint),
            fingerprint=fingerprint_of(self._checkpoint, self._table),
            config=None if is_gguf else (folder / CONFIG).read_bytes(),
            generation_config=more.read_bytes() if not is_gguf and more.is_file() else b"",
            file_bytes=[Path(file).stat().st_size for file in self._table.files],
            fronts=list(self._table.fronts),
            num_tensors=len(self._table.tensors),
        )
