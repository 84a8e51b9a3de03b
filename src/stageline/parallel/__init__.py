"""Ranks that share each layer of a stage: what they add up and tell one another. An argument, never a global."""
