"""What a decoder-only model is made of. Only decoder.py knows about stages."""
