"""Entry of a stage's process: `python -m stageline.worker`, started by the executor with its configuration on stdin."""

from __future__ import annotations

import os
import signal
import sys

# The kernel sends SIGHUP to stopped processes that nobody can continue any more, as when their engine dies. Before the
# imports, which take a while: a stage must live on to leave in order.
signal.signal(signal.SIGHUP, signal.SIG_IGN)

from stageline.log import open_standard_streams  # noqa: E402

open_standard_streams()

from stageline.worker.process import main  # noqa: E402

status = main()
sys.stdout.flush()
sys.stderr.flush()
# Without the interpreter's farewell: nothing needs it, and libraries with threads of their own may trip over it.
os._exit(status)
