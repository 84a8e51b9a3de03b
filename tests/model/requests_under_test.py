"""A stand-in for the scheduler: keeps requests' tokens and blocks, and makes the microbatches a test spells out."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from stageline.pipeline.microbatch import AddedRequest, ExtendedTable, Microbatch, MicrobatchLimits
from stageline.sampling import SamplerSpec


@dataclass
class RequestUnderTest:
    prompt: list[int]
    sampler: SamplerSpec
    tokens: list[int]
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    is_added: bool = False


class RequestsUnderTest:
    """Blocks are handed out in random order, so that a wrong block table cannot go unnoticed."""

    def __init__(self, limits: MicrobatchLimits, seed: int = 0) -> None:
        self.limits = limits
        self.requests: dict[int, RequestUnderTest] = {}
        self._free_blocks = list(range(limits.num_blocks))
        random.Random(seed).shuffle(self._free_blocks)
        self._removed: list[int] = []
        self._number = 0

    def add(self, number: int, prompt: list[int], sampler: SamplerSpec | None = None) -> None:
        self.requests[number] = RequestUnderTest(prompt, sampler or SamplerSpec(seed=0), list(prompt))

    def add_sharing(self, number: int, prompt: list[int], other: int, num_blocks: int) -> None:
        """As `add`, with another request's first blocks, as the prefix cache gives them."""
        self.add(number, prompt)
        request, blocks = self.requests[number], self.requests[other].blocks[:num_blocks]
        request.blocks, request.num_computed = list(blocks), num_blocks * self.limits.block_size

    def remove(self, number: int) -> None:
        self._free_blocks.extend(self.requests.pop(number).blocks)
        self._removed.append(number)

    def microbatch(self, rows: dict[int, int]) -> Microbatch:
        """rows: request number -> tokens to schedule. Rows of one token are put first; full requests are sampled."""
        ordered = sorted(rows, key=lambda number: rows[number] > 1)
        added: list[AddedRequest] = []
        extended: list[ExtendedTable] = []
        computed, token_ids, sampling_rows = [], [], []
        for row, number in enumerate(ordered):
            request = self.requests[number]
            end = request.num_computed + rows[number]
            assert end <= len(request.tokens), "scheduled a token that is not known yet"
            new_blocks = self._allocate(request, end)
            if not request.is_added:
                history = list(request.tokens) if request.sampler.needs_history else []
                added.append(AddedRequest(number, len(request.prompt), list(request.blocks), request.sampler, history))
                request.is_added = True
            elif new_blocks:
                extended.append(ExtendedTable(number, new_blocks))
            computed.append(request.num_computed)
            token_ids += request.tokens[request.num_computed : end]
            if end == len(request.tokens):
                sampling_rows.append(row)
            request.num_computed = end
        removed, self._removed = self._removed, []
        scheduled = [rows[number] for number in ordered]
        self._number += 1
        return Microbatch(
            0, self._number - 1, removed, added, extended, ordered, computed, scheduled, token_ids, sampling_rows
        )

    def append(self, microbatch: Microbatch, token_ids: list[int]) -> None:
        """The answer to a microbatch: a token for each of its sampling rows."""
        for row, token_id in zip(microbatch.sampling_rows, token_ids, strict=True):
            self.requests[microbatch.request_numbers[row]].tokens.append(token_id)

    def _allocate(self, request: RequestUnderTest, num_tokens: int) -> list[int]:
        missing = -(-num_tokens // self.limits.block_size) - len(request.blocks)
        new_blocks = [self._free_blocks.pop() for _ in range(missing)]
        request.blocks += new_blocks
        return new_blocks
