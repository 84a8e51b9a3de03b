"""One stage's process: receive, forward, send, and on the last stage, sample. Decides nothing."""
