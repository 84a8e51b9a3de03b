"""Which tokens go next: the only room that decides it. One scheduler for the whole pipeline; stages decide nothing."""
