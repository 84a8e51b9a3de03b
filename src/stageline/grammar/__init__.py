"""What an answer must look like, as masks of tokens. Pure: texts and token ids in, bytes out."""
