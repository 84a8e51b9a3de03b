"""A byte-level BPE tokenizer without merges: every byte is a token, so every character that is not ASCII is several."""

from __future__ import annotations

import tokenizers

from stageline.checkpoint.tokenizer import Tokenizer

EOS_TOKEN, STOP_TOKEN = "<|eos|>", "<|stop|>"
EOS_TOKEN_ID, STOP_TOKEN_ID = 256, 257
VOCAB_SIZE = 258


def byte_tokenizer() -> Tokenizer:
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[])
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(EOS_TOKEN, special=True)])
    backend.add_tokens([tokenizers.AddedToken(STOP_TOKEN, special=False)])
    return Tokenizer(backend, {"eos_token": EOS_TOKEN}, {}, "byte tokenizer")
