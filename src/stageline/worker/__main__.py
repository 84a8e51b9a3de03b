"""Entry of a stage's process: `python -m stageline.worker`, started by the executor with its configuration on stdin."""

from __future__ import annotations

import sys

from stageline.worker.worker import main

sys.exit(main())
