"""Which block of the KV cache belongs to whom: block ids and content hashes, never tensors."""
