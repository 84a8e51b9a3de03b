"""The Microbatch: the one noun of the spine.

The scheduler emits it, the window holds it, the executor ships it to every stage, a stage runs it, the timeline draws
it, and its result answers it. It is a frozen message and the wire format at once, made of integers only. Messages are
deltas: a stage keeps each request's block table and is told only what changed, so stages must apply them in order.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import accumulate
from operator import add, lt

import msgspec

from stageline.errors import FrameError
from stageline.sampling import SamplerSpec, TokenLogprobs


class AddedRequest(msgspec.Struct, frozen=True, array_like=True):
    """A request the stages hear of for the first time, or again after it was preempted.

    Args:
        request_number: the engine's number for it, never reused; a preempted request comes back under a new one.
        num_prompt_tokens: where its generated tokens begin.
        block_ids: its block table so far, in order.
        sampler: how its tokens are chosen.
        history: prompt and tokens generated so far, if `sampler.needs_history`; otherwise empty.
        window_block_ids: as many, for layers with a window where they have blocks of their own; otherwise empty.
            Those that have left the window may be any.
    """

    request_number: int
    num_prompt_tokens: int
    block_ids: list[int]
    sampler: SamplerSpec
    history: list[int]
    window_block_ids: list[int] = []


class ExtendedTable(msgspec.Struct, frozen=True, array_like=True):
    """Blocks appended to one request's block table, or tables, before the microbatch runs."""

    request_number: int
    block_ids: list[int]
    window_block_ids: list[int] = []


class Microbatch(msgspec.Struct, frozen=True, array_like=True, tag="microbatch"):
    """Some tokens of some requests that go through all stages together. One row per request, decodes first.

    Order of effects at a stage: `removed`, `added`, `extended`, then the forward pass.

    Args:
        epoch: grows when the pipeline is rebuilt; stages drop microbatches of an older one.
        number: counts up by one in an epoch; m17 in logs and traces.
        removed: requests whose state the stages drop.
        request_numbers: [rows]
        num_computed_tokens: [rows] tokens of the request already in the KV cache (or on their way there).
        num_scheduled_tokens: [rows] tokens this microbatch adds, at least 1.
        token_ids: [sum(num_scheduled_tokens)] the rows' new tokens, row by row.
        sampling_rows: rows whose last token's logits give a new token; ascending.
        masked_rows: those of them whose token must be one that a mask allows, which comes as `TokenMasks`; ascending.
        oldest: the oldest microbatch that was in flight when this one was launched, perhaps this one itself; nobody
            asks for the tokens of earlier ones any more. -1 if that is not said.
        pending_rows: decodes whose one new token is not known yet, for it is one that `oldest` samples; ascending. In
            `token_ids` a 0 holds its place.
        pending_places: [pending rows] which of the tokens that `oldest` samples it is.
    """

    epoch: int
    number: int
    removed: list[int]
    added: list[AddedRequest]
    extended: list[ExtendedTable]
    request_numbers: list[int]
    num_computed_tokens: list[int]
    num_scheduled_tokens: list[int]
    token_ids: list[int]
    sampling_rows: list[int]
    masked_rows: list[int] = []
    oldest: int = -1
    pending_rows: list[int] = []
    pending_places: list[int] = []

    @property
    def num_rows(self) -> int:
        return len(self.request_numbers)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_decode_rows(self) -> int:
        """Leading rows with a single new token."""
        for row, num_tokens in enumerate(self.num_scheduled_tokens):
            if num_tokens != 1:
                return row
        return self.num_rows

    @property
    def row_ends(self) -> list[int]:
        """[rows] index one past each row's last token in `token_ids`."""
        return list(accumulate(self.num_scheduled_tokens))

    def __str__(self) -> str:
        return f"m{self.number}"


NO_TOKEN = -1
"""In the place of a token id: the row's mask had not come when its logits were there, so nothing was sampled."""


class TokenMasks(msgspec.Struct, frozen=True, array_like=True, tag="masks"):
    """Which tokens may be chosen for some rows of one microbatch; for the last stage alone.

    They follow the microbatch, together or one by one, whenever they are known.

    Args:
        rows: some of the microbatch's `masked_rows`.
        masks: [rows] one bit per token of the vocabulary, token 0 the lowest of the first byte, in words of 32 bits.
    """

    epoch: int
    number: int
    rows: list[int]
    masks: list[bytes]


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of consecutive prompt tokens; `first_position` is the index in the prompt of the first."""

    request_number: int
    first_position: int
    positions: list[TokenLogprobs]


class MicrobatchResult(msgspec.Struct, frozen=True, array_like=True, tag="result"):
    """What the last stage answers to a microbatch, also when nothing was sampled (it frees a place in the window).

    Args:
        token_ids: one per sampling row, in their order; NO_TOKEN where a mask had not come.
        logprobs: one per sampling row if any row of the microbatch asked for them, else empty.
        computing_s: time the stages computed it, all together.
        slowest_s: time of the slowest stage alone.
    """

    epoch: int
    number: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    prompt_logprobs: list[PromptLogprobs]
    computing_s: float = 0.0
    slowest_s: float = 0.0

    def after(self, computing_s: float, slowest_s: float) -> MicrobatchResult:
        """The same result, with these times."""
        return msgspec.structs.replace(self, computing_s=computing_s, slowest_s=slowest_s)


class MicrobatchLimits(msgspec.Struct, frozen=True):
    """What a stage has room for. A microbatch outside of it is refused before memory is touched.

    Args:
        num_window_blocks: of layers with a window; 0 if these use the same blocks as all.
    """

    num_blocks: int
    block_size: int
    vocab_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_window_blocks: int = 0

    @property
    def max_blocks_per_request(self) -> int:
        return -(-self.max_model_len // self.block_size)


def check_microbatch(microbatch: Microbatch, limits: MicrobatchLimits) -> None:
    """Check everything about a received microbatch that does not need the stage's own state.

    Raises: FrameError with the number that is out of bounds.
    """
    rows = microbatch.num_rows
    if microbatch.epoch < 0 or microbatch.number < 0:
        raise FrameError(f"microbatch epoch {microbatch.epoch}, number {microbatch.number}: both must be at least 0")
    if len(microbatch.num_computed_tokens) != rows or len(microbatch.num_scheduled_tokens) != rows:
        raise FrameError(f"{microbatch}: columns of different lengths for {rows} rows")
    if rows > limits.max_num_seqs or len(microbatch.added) > limits.max_num_seqs:
        raise FrameError(f"{microbatch}: {rows} rows, more than max_num_seqs {limits.max_num_seqs}")
    if len(set(microbatch.request_numbers)) != rows:
        raise FrameError(f"{microbatch}: a request has two rows")
    if rows and min(microbatch.num_scheduled_tokens) < 1:
        raise FrameError(f"{microbatch}: a row without tokens")
    if sum(microbatch.num_scheduled_tokens) != microbatch.num_tokens:
        raise FrameError(
            f"{microbatch}: {microbatch.num_tokens} token ids for {sum(microbatch.num_scheduled_tokens)} scheduled"
        )
    if microbatch.num_tokens > limits.max_num_batched_tokens:
        raise FrameError(f"{microbatch}: {microbatch.num_tokens} tokens, limit {limits.max_num_batched_tokens}")
    longest = max(map(add, microbatch.num_computed_tokens, microbatch.num_scheduled_tokens), default=0)
    if longest > limits.max_model_len or min(microbatch.num_computed_tokens, default=0) < 0:
        raise FrameError(
            f"{microbatch}: rows of up to {longest} tokens, at least {min(microbatch.num_computed_tokens)} of them "
            f"computed; max_model_len {limits.max_model_len}"
        )
    _check_ids(microbatch, "token id", microbatch.token_ids, limits.vocab_size)
    _check_ids(microbatch, "sampling row", microbatch.sampling_rows, rows)
    if not _is_ascending(microbatch.sampling_rows):
        raise FrameError(f"{microbatch}: sampling rows are not ascending")
    _check_masked_rows(microbatch)
    _check_pending_rows(microbatch, limits)
    tables: list[AddedRequest | ExtendedTable] = [*microbatch.added, *microbatch.extended]
    for table in tables:
        block_ids = table.block_ids
        _check_ids(microbatch, "block id", block_ids, limits.num_blocks)
        _check_ids(microbatch, "block id of a window", table.window_block_ids, limits.num_window_blocks)
        if limits.num_window_blocks and len(table.window_block_ids) != len(block_ids):
            raise FrameError(
                f"{microbatch}: {len(block_ids)} blocks, but {len(table.window_block_ids)} for layers with a window"
            )
        if len(block_ids) > limits.max_blocks_per_request:
            raise FrameError(
                f"{microbatch}: {len(block_ids)} blocks for one request, limit {limits.max_blocks_per_request}"
            )
    for added in microbatch.added:
        _check_ids(microbatch, "token id in a history", added.history, limits.vocab_size)
        _check_sampler(microbatch, added.sampler, limits.vocab_size)
        if len(added.history) > limits.max_model_len or not 1 <= added.num_prompt_tokens <= limits.max_model_len:
            raise FrameError(f"{microbatch}: history or prompt longer than max_model_len {limits.max_model_len}")


def _is_ascending(rows: list[int]) -> bool:
    return all(map(lt, rows, rows[1:]))


def _check_masked_rows(microbatch: Microbatch) -> None:
    masked = microbatch.masked_rows
    if masked and (not _is_ascending(masked) or not set(masked) <= set(microbatch.sampling_rows)):
        raise FrameError(f"{microbatch}: masked rows {masked} are not some of its sampling rows, ascending")


def _check_pending_rows(microbatch: Microbatch, limits: MicrobatchLimits) -> None:
    rows, places, oldest = microbatch.pending_rows, microbatch.pending_places, microbatch.oldest
    if not -1 <= oldest <= microbatch.number:
        raise FrameError(f"{microbatch}: launched while m{oldest} was the oldest in flight")
    if not rows and not places:
        return
    if len(places) != len(rows) or not 0 <= oldest < microbatch.number:
        raise FrameError(f"{microbatch}: {len(rows)} rows wait for {len(places)} tokens of m{oldest}")
    if not _is_ascending(rows) or rows[0] < 0 or rows[-1] >= microbatch.num_decode_rows:
        raise FrameError(f"{microbatch}: rows {rows} that wait for a token are not decodes, ascending")
    _check_ids(microbatch, "place of a token", places, limits.max_num_seqs)


def mask_bytes(vocab_size: int) -> int:
    """Bytes of a mask: one bit per token, in whole words of 32."""
    return -(-vocab_size // 32) * 4


def check_masks(masks: TokenMasks, masked_rows: Collection[int], vocab_size: int) -> None:
    """Check masks against the microbatch they are for. Raises: FrameError with the numbers."""
    if len(masks.rows) != len(masks.masks):
        raise FrameError(f"m{masks.number}: {len(masks.masks)} masks for {len(masks.rows)} rows")
    for row, mask in zip(masks.rows, masks.masks, strict=True):
        if row not in masked_rows:
            raise FrameError(f"m{masks.number}: a mask for row {row}, which asked for none")
        if len(mask) != mask_bytes(vocab_size):
            raise FrameError(f"m{masks.number}: a mask of {len(mask)} bytes, expected {mask_bytes(vocab_size)}")


def _check_sampler(microbatch: Microbatch, sampler: SamplerSpec, vocab_size: int) -> None:
    _check_ids(microbatch, "biased token id", [token_id for token_id, _ in sampler.logit_bias], vocab_size)
    _check_ids(microbatch, "stop token id", sampler.forbidden_before_min_tokens, vocab_size)
    _check_ids(microbatch, "allowed token id", sampler.allowed_token_ids, vocab_size)
    for word in sampler.bad_words:
        _check_ids(microbatch, "bad word's token id", word, vocab_size)
        if not word:
            raise FrameError(f"{microbatch}: an empty bad word")


def _check_ids(microbatch: Microbatch, what: str, ids: list[int] | tuple[int, ...], limit: int) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < limit):
        raise FrameError(f"{microbatch}: {what} outside [0, {limit})")
