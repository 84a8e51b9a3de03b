"""The small parts models are built of: linear, embedding, norm, rotary, activation, attention."""
