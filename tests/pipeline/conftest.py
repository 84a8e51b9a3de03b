"""Pipeline tests run on one thread: tiny matrices gain nothing from a second, and the machine may have few cores."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
