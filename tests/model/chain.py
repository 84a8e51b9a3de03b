"""Decoder stages one behind the other in this process, and the sequences that tests send through them."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import torch

from stageline.attention.select import select_backend
from stageline.checkpoint import open_checkpoint
from stageline.models.decoder import DecoderStage
from stageline.pipeline.microbatch import MicrobatchLimits
from stageline.weights.reader import CheckpointReader
from stageline.worker.input_buffers import InputBuffers
from stageline.worker.kv_tensors import allocate_kv_tensors
from tests.model.requests_under_test import RequestsUnderTest

CPU = torch.device("cpu")
PROMPTS = {0: 50, 1: 7, 2: 33, 3: 16}
"""Tokens of each sequence."""


def cut(*num_layers: int) -> list[range]:
    """Consecutive stages of so many layers."""
    ends = list(accumulate(num_layers))
    return [range(end - size, end) for end, size in zip(ends, num_layers, strict=True)]


class Chain:
    """Decoder stages one behind the other, each with its own block tables and cache."""

    def __init__(
        self, path: Path, cuts: list[range], dtype: torch.dtype = torch.float32, keeps_quantized: bool = False
    ) -> None:
        checkpoint = open_checkpoint(str(path))
        self.spec = checkpoint.spec
        self.limits = MicrobatchLimits(64, 16, self.spec.vocab_size, 8, 512, 128)
        self.requests = RequestsUnderTest(self.limits)
        with CheckpointReader(checkpoint, dtype, CPU, keeps_quantized=keeps_quantized) as reader:
            self.stages = [DecoderStage(self.spec, layers, reader, select_backend(CPU), 128) for layers in cuts]
            self.num_bytes_read = reader.num_bytes_read
        for stage, layers in zip(self.stages, cuts, strict=True):
            stage.use(allocate_kv_tensors(self.spec, len(layers), 64, 16, dtype, CPU), max_tokens=512)
        self.buffers = [InputBuffers(self.limits, CPU) for _ in cuts]

    @torch.inference_mode()
    def run(self, rows: dict[int, int]) -> dict[int, torch.Tensor]:
        """Returns: logits of the scheduled tokens, [tokens, vocab] per request; sampled requests are not extended."""
        microbatch = self.requests.microbatch(rows)
        hidden = torch.tensor(microbatch.token_ids)
        for stage, buffers in zip(self.stages, self.buffers, strict=True):
            hidden = stage.forward(hidden, buffers.apply_and_build(microbatch))
        logits = self.stages[-1].logits(hidden).split(microbatch.num_scheduled_tokens)
        return dict(zip(microbatch.request_numbers, logits, strict=True))


def sequence(number: int, length: int, vocab_size: int = 256) -> list[int]:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(0, vocab_size, (length,), generator=generator).tolist()


def logits_in_mixed_batches(chain: Chain) -> dict[int, torch.Tensor]:
    """Four sequences in chunks of several sizes, the short ones decoding beside the long ones' prompts."""
    for number, length in PROMPTS.items():
        chain.requests.add(number, sequence(number, length))
    parts: dict[int, list[torch.Tensor]] = {number: [] for number in PROMPTS}
    schedule = [{0: 20, 1: 6}, {0: 15, 1: 1, 2: 16}, {0: 14, 2: 16, 3: 15}, {0: 1, 2: 1, 3: 1}]
    for rows in schedule:
        for number, logits in chain.run(rows).items():
            parts[number].append(logits)
    return {number: torch.cat(logits) for number, logits in parts.items()}
