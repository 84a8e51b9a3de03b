"""Attention over a paged KV cache: one contract, one file per way to compute it."""
