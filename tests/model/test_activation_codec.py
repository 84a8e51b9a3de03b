"""Hidden states in 8 bits: sizes that both ends know, errors within a group's scale, nearly the same answers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmarks.activation_dtype import Chain

from stageline.checkpoint import open_checkpoint
from stageline.checkpoint.tokenizer import load_tokenizer
from stageline.errors import FrameError
from stageline.worker.activation_codec import ActivationCodec

TEXT = """A pipeline of stages computes one part of a model after the other. While the second stage works on the first
group of requests, the first stage begins with the next one, so that nobody waits. """
# The largest error of a number, as a fraction of the largest one of its group.
LARGEST_ERROR = {"int8": 0.5 / 127, "fp8": 2**-4}


def hidden_states(num_tokens: int, hidden_size: int, dtype: torch.dtype) -> torch.Tensor:
    """As they are in models: a few numbers of each token are hundreds of times larger."""
    states = torch.randn(num_tokens, hidden_size, generator=torch.Generator().manual_seed(0))
    states[:, 3] *= 500
    return states.to(dtype)


@pytest.mark.parametrize("hidden_size", [576, 64, 48, 30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("wire", ["auto", "int8", "fp8"])
def test_a_frame_has_the_size_both_ends_derive_and_gives_the_states_back(
    wire: str, dtype: torch.dtype, hidden_size: int
) -> None:
    codec = ActivationCodec(wire, hidden_size, dtype)
    states = hidden_states(7, hidden_size, dtype)
    frame = memoryview(bytearray(codec.encode(states)))
    assert len(frame) == codec.num_bytes(7) and (wire == "auto" or len(frame) < states.nbytes * 0.8)
    back = codec.decode(frame, 7)
    assert back.dtype == dtype and back.shape == states.shape
    if wire == "auto":
        assert torch.equal(back, states)
    else:
        group = next(size for size in (64, 32, 16, hidden_size) if hidden_size % size == 0)
        largest = states.float().view(7, -1, group).abs().amax(-1, keepdim=True)
        errors = (back.float() - states.float()).view(7, -1, group).abs()
        # Converting the result to the compute dtype adds its own rounding.
        assert (errors <= largest * (LARGEST_ERROR[wire] + torch.finfo(dtype).eps)).all()


@pytest.mark.parametrize("wire", ["int8", "fp8"])
def test_a_row_is_the_same_in_any_company_and_zeros_stay_zeros(wire: str) -> None:
    codec = ActivationCodec(wire, 64, torch.float32)
    states = hidden_states(5, 64, torch.float32)
    states[2] = 0
    together = codec.decode(memoryview(bytearray(codec.encode(states))), 5)
    alone = [codec.decode(memoryview(bytearray(codec.encode(states[row : row + 1]))), 1) for row in range(5)]
    assert torch.equal(together, torch.cat(alone)) and not together[2].any()


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -1.0])
def test_an_absurd_scale_is_refused(scale: float) -> None:
    codec = ActivationCodec("int8", 64, torch.float32)
    frame = bytearray(codec.encode(hidden_states(3, 64, torch.float32)))
    frame[4:8] = torch.tensor([scale]).numpy().tobytes()
    with pytest.raises(FrameError, match="scale"):
        codec.decode(memoryview(frame), 3)


def test_eight_bits_change_few_greedy_choices_and_hardly_the_perplexity(smollm2_gguf: Path) -> None:
    """Over three boundaries of the demo model; benchmarks/activation_dtype.py prints the numbers."""
    token_ids = load_tokenizer(open_checkpoint(str(smollm2_gguf))).encode(TEXT * 3)
    chain = Chain(str(smollm2_gguf), num_stages=4, max_model_len=256)
    plain = chain.score(token_ids, "auto")
    for wire, least_agreement, most_change in (("int8", 0.9, 0.02), ("fp8", 0.8, 0.05)):
        score = chain.score(token_ids, wire)
        assert score != plain, "the codec was not used"
        assert score.agreement_fraction(plain) >= least_agreement, wire
        assert abs(score.perplexity / plain.perplexity - 1) <= most_change, wire
