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
from stageline.transfer.messages import AboutModel, AskModel, AskPiece, NotGiven, Piece, Question
from stageline.transfer.table import digest_of, fingerprint_of, table_of

logger = logging.getLogger(__name__)

_MAX_QUESTION_BYTES = 4096
_MOST_WAITING_FRAMES = 64
"""For one caller: a piece is two frames, so at most 32 MiB."""


class WeightServer:
    """Answers until `close`.

    Args:
        address: where; with port 0 a free one is taken.
    Attributes:
        address: where, with the port that was taken.
    Raises: ConfigError if that cannot be listened on.
    """

    def __init__(self, checkpoint: Checkpoint, address: TcpAddress, security: LinkSecurity | None) -> None:
        self._checkpoint = checkpoint
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
            return self._piece(question)
        except FrameError as error:
            return [encode_message(NotGiven(str(error)))]
        except OSError as error:
            logger.error("weights cannot be sent: %s", error)
            return [encode_message(NotGiven(f"the weights cannot be read there: {error.strerror}"))]

    def _piece(self, asked: AskPiece) -> list[bytes]:
        """Raises: FrameError if there is no such piece of this model; OSError."""
        if not 0 <= asked.run < len(self._runs) or not 0 <= asked.piece < self._runs[asked.run].num_pieces:
            raise FrameError(f"the model has no piece {asked.piece} of run {asked.run}; it has {len(self._runs)} runs")
        run = self._runs[asked.run]
        offset, num_bytes = run.piece(asked.piece)
        data = self._read(self._table.files[run.file], offset, num_bytes)
        digest = digest_of(data)
        answer = encode_message(Piece(asked.run, asked.piece, digest))
        return [answer, b"" if digest == asked.have else data]

    def _read(self, file: str, offset: int, num_bytes: int) -> bytes:
        if file not in self._files:
            self._files[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        data = os.pread(self._files[file], num_bytes, offset)
        if len(data) != num_bytes:
            raise FrameError(f"the head's file is shorter than it was: no {num_bytes} bytes at byte {offset}")
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
