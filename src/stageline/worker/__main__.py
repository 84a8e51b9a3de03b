"""Entry of a stage's process: `python -m stageline.worker`, started by the executor with its configuration on stdin."""

from __future__ import annotations

import os
import sys

from stageline.worker.process import main

status = main()
sys.stdout.flush()
sys.stderr.flush()
# Without the interpreter's farewell: nothing needs it, and libraries with threads of their own may trip over it.
os._exit(status)
