"""A copy of another machine's model, of which as much is here as was asked for.

One idea: the head tells the digest of every piece, and what is here is compared with it. So a first copy, one that was
interrupted and one that was damaged are the same: what is right is not sent again, and nothing is used that was not
compared.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from stageline.checkpoint.checkpoint import Checkpoint
from stageline.checkpoint.digest import model_digest
from stageline.checkpoint.open import open_checkpoint
from stageline.errors import CheckpointError, ConfigError
from stageline.links.keys import LinkSecurity
from stageline.links.sockets import Links
from stageline.links.tcp_address import TcpAddress
from stageline.transfer.copy_files import CopyFiles
from stageline.transfer.fetching import Fetch, OnBytes, Source, ask_model
from stageline.transfer.messages import AboutModel, WeightSource
from stageline.transfer.table import ModelTable, table_of

logger = logging.getLogger(__name__)

_MAX_ANSWER_BYTES = 64 * 2**20
_MOST_SHOWN = 100


class ModelCopy:
    """It is connected only while something comes: those links may break, and are taken up again, as no other one.

    Args:
        security: how the links are protected.
    Attributes:
        num_received_bytes: of weights and fronts, over the links; what was here is not among them.
    """

    def __init__(self, source: WeightSource, security: LinkSecurity | None) -> None:
        self._source = source
        self._security = security
        self._files: CopyFiles | None = None
        self._checkpoint: Checkpoint | None = None
        self._table: ModelTable | None = None
        self.num_received_bytes = 0

    def open(self) -> Checkpoint:
        """What is known of the model, as if it were here; its tensors are not, before `fetch`.

        Raises: CheckpointError if the head does not answer, has another model, or there is no room here.
        """
        if self._checkpoint is None:
            with self._connected([]) as sources:
                about = ask_model(sources[0])
                self._check_digest(about.model_digest)
                self._files = CopyFiles(Path(self._source.cache), about, self._source.model)
                Fetch(self._files, sources, dict(enumerate(about.fronts)), None).run()
            self._files.finish()
            self._checkpoint = self._opened(about)
        return self._checkpoint

    @contextmanager
    def _connected(self, givers: Sequence[str]) -> Iterator[list[Source]]:
        """The head first. What other machines tell of themselves may be no address: that costs nothing."""
        links = Links(self._security)
        sources: list[Source] = []
        try:
            for address in (self._source.address, *givers):
                try:
                    url = TcpAddress.parse(address).url
                    socket = links.caller(url, _MAX_ANSWER_BYTES, gets_large_messages=True)
                except ConfigError as error:
                    if not sources:
                        raise
                    logger.warning("no weights from %r: %s", address[:_MOST_SHOWN], error)
                    continue
                sources.append(Source(address, socket, is_head=not sources))
            yield sources
        finally:
            self.num_received_bytes += sum(source.num_bytes for source in sources)
            links.close()

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
        assert self._table is not None and self._files is not None
        table, began_s = self._table, time.monotonic()
        runs = {number: table.tensors[number - len(table.fronts)] for number in table.runs_of(names)}
        with self._connected(self._source.givers) as sources:
            Fetch(self._files, sources, runs, on_bytes).run()
        logger.info(
            "weights: %s of %s bytes came over the link, in %.1f s (%s); the rest was here",
            f"{sum(source.num_bytes for source in sources):,}", f"{sum(run.num_bytes for run in runs.values()):,}",
            time.monotonic() - began_s, ", ".join(f"{one.num_bytes:,} from {one.address}" for one in sources),
        )  # fmt: skip

    def close(self) -> None:
        if self._files is not None:
            self._files.close()
