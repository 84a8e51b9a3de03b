"""The rules of sampling written down plainly in numpy, one row at a time: what the sampler is held against."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from stageline.pipeline.microbatch import AddedRequest, Microbatch
from stageline.sampling import SamplerSpec
from stageline.worker.sampler import Sampler

Row = npt.NDArray[np.float64]


def changed_logits(logits: Row, spec: SamplerSpec, history: list[int], num_prompt_tokens: int) -> Row:
    """Logits of one row after every rule that comes before the temperature."""
    row = logits.astype(np.float64).copy()
    output = history[num_prompt_tokens:]
    if spec.allowed_token_ids:
        forbidden = set(range(len(row))) - set(spec.allowed_token_ids)
        row[list(forbidden)] = -np.inf
    for word in spec.bad_words:
        before = list(word[:-1])
        if history[len(history) - len(before) :] == before:
            row[word[-1]] = -np.inf
    if len(output) < spec.min_tokens:
        for token_id in spec.forbidden_before_min_tokens:
            row[token_id] = -np.inf
    for token_id, bias in spec.logit_bias:
        row[token_id] += bias
    for token_id in set(history):
        penalty = spec.repetition_penalty
        row[token_id] = row[token_id] / penalty if row[token_id] > 0 else row[token_id] * penalty
    for token_id in set(output):
        row[token_id] -= spec.frequency_penalty * output.count(token_id) + spec.presence_penalty
    return row


def distribution(row: Row, spec: SamplerSpec) -> Row:
    """Probabilities [vocab] of one row of changed logits, by a full sort: min-p, then top-k, then top-p."""
    scaled = row / spec.temperature
    order = np.argsort(-scaled, kind="stable")
    weights = np.exp(scaled[order] - scaled[order[0]])
    weights[weights < spec.min_p] = 0.0
    if spec.top_k > 0:
        weights[spec.top_k :] = 0.0
    probabilities = weights / weights.sum()
    before = np.cumsum(probabilities) - probabilities
    probabilities[before >= spec.top_p] = 0.0
    by_id = np.zeros(len(row))
    by_id[order] = probabilities / probabilities.sum()
    return by_id


def microbatch_of(
    specs: list[SamplerSpec], histories: list[list[int]], num_prompt_tokens: list[int], first_number: int = 0
) -> Microbatch:
    """Adds one request per spec and schedules its last token, every row being sampled."""
    numbers = list(range(first_number, first_number + len(specs)))
    added = [
        AddedRequest(number, num_prompt, [number], spec, history if spec.needs_history else [])
        for number, spec, history, num_prompt in zip(numbers, specs, histories, num_prompt_tokens, strict=True)
    ]
    return Microbatch(
        epoch=0,
        number=0,
        removed=[],
        added=added,
        extended=[],
        request_numbers=numbers,
        num_computed_tokens=[len(history) - 1 for history in histories],
        num_scheduled_tokens=[1] * len(specs),
        token_ids=[history[-1] for history in histories],
        sampling_rows=list(range(len(specs))),
    )


def sample_once(
    logits: torch.Tensor, specs: list[SamplerSpec], histories: list[list[int]], num_prompt_tokens: list[int]
) -> list[int]:
    """One token per row from a new sampler; the logits are left alone."""
    sampler = Sampler(logits.shape[1], torch.device("cpu"))
    microbatch = microbatch_of(specs, histories, num_prompt_tokens)
    sampler.apply(microbatch)
    return sampler.sample(microbatch, logits.clone())[0]


def random_logits(rows: int, vocab_size: int, seed: int, scale: float = 3.0) -> torch.Tensor:
    """Normal logits, rounded as bfloat16 rounds them, so that equal ones are common."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, vocab_size, generator=generator) * scale).bfloat16().float()
