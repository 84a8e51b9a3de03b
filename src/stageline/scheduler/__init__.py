"""Which tokens go next: the only room that decides it."""
