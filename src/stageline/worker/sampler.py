"""The last stage's choice of tokens: keeps what it must know of each request and turns logits into token ids.

One idea: a token is a function of its request alone (logits, parameters, history, seed and index in the output), never
of the batch; rows are put together only to share passes over the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from stageline.errors import FrameError
from stageline.pipeline.microbatch import Microbatch, PromptLogprobs
from stageline.sampling import SamplerSpec, TokenLogprobs
from stageline.worker.choice import choose
from stageline.worker.leading_tokens import largest, select_rows
from stageline.worker.logprobs import ROWS_AT_ONCE, token_logprobs
from stageline.worker.sampler_rules import SampledRow, allowed_tokens, change_logits
from stageline.worker.token_history import TokenHistory


@dataclass(frozen=True)
class _SampledRequest:
    spec: SamplerSpec
    num_prompt_tokens: int
    history: TokenHistory | None


class Sampler:
    """Chooses tokens for the requests it was told of by `apply`.

    Args:
        vocab_size: columns of the logits.
        device: where the logits are.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._requests: dict[int, _SampledRequest] = {}

    def apply(self, microbatch: Microbatch) -> None:
        """Forget removed requests and remember added ones; to be called for every microbatch, in order."""
        for request_number in microbatch.removed:
            self._requests.pop(request_number, None)
        for added in microbatch.added:
            needs_history = added.sampler.needs_history
            history = TokenHistory(added.history, added.num_prompt_tokens) if needs_history else None
            self._requests[added.request_number] = _SampledRequest(added.sampler, added.num_prompt_tokens, history)

    def is_plain_greedy(self, microbatch: Microbatch) -> bool:
        """Whether all sampling rows want the likeliest token and nothing else: then `sample` changes nothing here.

        Raises: FrameError if a sampling row's request is not known.
        """
        if microbatch.masked_rows:
            return False
        return all(self._request(microbatch, row).spec.is_plain_greedy for row in microbatch.sampling_rows)

    @torch.inference_mode()
    def sample(
        self,
        microbatch: Microbatch,
        logits: torch.Tensor,
        sampling_rows: Sequence[int] | None = None,
        masks: Mapping[int, bytes] = MappingProxyType({}),
    ) -> tuple[list[int], list[TokenLogprobs | None]]:
        """Choose one token per sampling row and add it to its request's history.

        Args:
            logits: float32 [sampling rows, vocab]; overwritten.
            sampling_rows: some of the microbatch's, or None for all.
            masks: by row, of the right length; the tokens that may be chosen there, whatever other rules say.
        Returns: token ids [sampling rows], and log-probabilities [sampling rows] or none if no row asked for them.
        Raises: FrameError if a sampling row's request is not known, or its mask allows nothing.
        """
        if sampling_rows is None:
            sampling_rows = microbatch.sampling_rows
        rows = [self._sampled_row(microbatch, row, masks.get(row)) for row in sampling_rows]
        self._check_shape(microbatch, logits, len(rows))
        if all(row.wants_the_likeliest for row in rows):
            token_ids: list[int] = largest(logits).tolist() if rows else []
            return token_ids, []
        told = [index for index, row in enumerate(rows) if row.spec.num_logprobs >= 0]
        unchanged = select_rows(logits, told)
        if unchanged is logits and any(row.changes_logits for row in rows):
            unchanged = logits.clone()
        change_logits(logits, rows)
        token_ids = choose(logits, [row.spec for row in rows], [row.output_index for row in rows])
        for row, token_id in zip(rows, token_ids, strict=True):
            if row.history is not None:
                row.history.append(token_id)
        return token_ids, _logprobs_of(rows, token_ids, told, unchanged)

    @torch.inference_mode()
    def prompt_logprobs(
        self, microbatch: Microbatch, logits_of: Callable[[Sequence[int]], torch.Tensor]
    ) -> list[PromptLogprobs]:
        """Describe the prompt tokens that this microbatch's tokens predict.

        Args:
            logits_of: float32 logits [indices, vocab] of the microbatch's tokens at these indices in `token_ids`. Asked
                for a few at a time: those of a long prompt at once could take more memory than the model.
        Returns: one run of positions per request that has any.
        """
        described: list[PromptLogprobs] = []
        for row, indices, first_position in self._prompt_runs(microbatch):
            request_number = microbatch.request_numbers[row]
            request = self._requests[request_number]
            assert request.history is not None, "SamplerSpec.needs_history covers prompt log-probabilities"
            targets = request.history.token_ids[first_position : first_position + len(indices)]
            positions: list[TokenLogprobs] = []
            for start in range(0, len(indices), ROWS_AT_ONCE):
                part = indices[start : start + ROWS_AT_ONCE]
                logits = logits_of(part)
                self._check_shape(microbatch, logits, len(part))
                counts = [request.spec.num_prompt_logprobs] * len(part)
                positions += token_logprobs(logits, targets[start : start + len(part)], counts)
            described.append(PromptLogprobs(request_number, first_position, positions))
        return described

    def _prompt_runs(self, microbatch: Microbatch) -> list[tuple[int, range, int]]:
        """(row, indices into token_ids, place in the prompt of the first token described), where there are any."""
        runs: list[tuple[int, range, int]] = []
        for row, end in enumerate(microbatch.row_ends):
            request = self._requests.get(microbatch.request_numbers[row])
            if request is None or request.spec.num_prompt_logprobs < 0:
                continue
            num_computed = microbatch.num_computed_tokens[row]
            start = end - microbatch.num_scheduled_tokens[row]
            count = min(end - start, request.num_prompt_tokens - 1 - num_computed)
            if count > 0:
                runs.append((row, range(start, start + count), num_computed + 1))
        return runs

    def _sampled_row(self, microbatch: Microbatch, row: int, mask: bytes | None) -> SampledRow:
        request = self._request(microbatch, row)
        num_tokens = microbatch.num_computed_tokens[row] + microbatch.num_scheduled_tokens[row]
        allowed = None
        if mask is not None:
            allowed = allowed_tokens(mask, self._vocab_size)
            if not allowed.any():
                raise FrameError(f"{microbatch}: the mask of row {row} allows no token")
        return SampledRow(request.spec, request.history, num_tokens - request.num_prompt_tokens, allowed)

    def _request(self, microbatch: Microbatch, row: int) -> _SampledRequest:
        request = self._requests.get(microbatch.request_numbers[row])
        if request is None:
            raise FrameError(f"{microbatch}: request {microbatch.request_numbers[row]} is sampled but was never added")
        return request

    def _check_shape(self, microbatch: Microbatch, logits: torch.Tensor, num_rows: int) -> None:
        assert logits.shape == (num_rows, self._vocab_size), (
            f"{microbatch}: logits {tuple(logits.shape)}, wanted {(num_rows, self._vocab_size)}"
        )


def _logprobs_of(
    rows: list[SampledRow], token_ids: list[int], told: list[int], logits: torch.Tensor
) -> list[TokenLogprobs | None]:
    """Spread the log-probabilities of the rows that asked, `told`, over all rows. logits: [told, vocab]."""
    if not told:
        return []
    answers: list[TokenLogprobs | None] = [None] * len(rows)
    counts = [rows[index].spec.num_logprobs for index in told]
    for index, answer in zip(told, token_logprobs(logits, [token_ids[index] for index in told], counts), strict=True):
        answers[index] = answer
    return answers
