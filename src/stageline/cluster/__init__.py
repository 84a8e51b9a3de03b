"""Many machines: how nodes join the head's pipeline, run its stages, and come back. Weights and tokens are no topic."""
