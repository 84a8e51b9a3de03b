"""Moves bytes between processes: sockets and frames. Knows nothing of models or schedules."""
