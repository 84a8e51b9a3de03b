"""Starts and watches the stages and carries microbatches to them: in this process, or one process each."""
