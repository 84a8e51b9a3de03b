"""Log-probabilities as the two kinds of completion show them.

One idea: a token is described by its text and by its bytes, because a token may be a part of a character only; both are
looked up once per token id.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from stageline.checkpoint.tokenizer import Tokenizer
from stageline.outputs import Logprob
from stageline.server.protocol_chat import ChoiceLogprobs, PromptLogprob, PromptLogprobs, TokenLogprob, TopLogprob
from stageline.server.protocol_completions import CompletionLogprobs

# JSON has no infinity. OpenAI writes this for what is as good as impossible.
LOWEST_LOGPROB = -9999.0

Described = dict[int, Logprob]


@lru_cache(maxsize=65536)
def _bytes_of(tokenizer: Tokenizer, token_id: int) -> list[int]:
    return list(tokenizer.token_bytes(token_id))


def chat_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], described: Sequence[Described], num_top: int
) -> ChoiceLogprobs:
    """Args:
    token_ids, described: of the same tokens, in order.
    num_top: how many of the likeliest to show at each place.
    """
    content = []
    for token_id, by_id in zip(token_ids, described, strict=True):
        likeliest = sorted(by_id.items(), key=lambda entry: -entry[1].logprob)[:num_top]
        chosen = by_id[token_id]
        content.append(
            TokenLogprob(
                token=chosen.decoded_token,
                logprob=_finite(chosen),
                bytes=_bytes_of(tokenizer, token_id),
                top_logprobs=[
                    TopLogprob(token=one.decoded_token, logprob=_finite(one), bytes=_bytes_of(tokenizer, id_))
                    for id_, one in likeliest
                ],
            )
        )
    return ChoiceLogprobs(content=content)


def completion_logprobs(
    token_ids: Sequence[int],
    described: Sequence[Described | None],
    first_offset: int,
    texts_of_undescribed: Sequence[str] = (),
) -> CompletionLogprobs:
    """Args:
    described: per token; None for one that nothing predicts.
    first_offset: where the first token begins in the text, in characters.
    texts_of_undescribed: the texts of those that nothing predicts, in order.
    """
    undescribed = iter(texts_of_undescribed)
    offsets: list[int] = []
    tokens: list[str] = []
    chosen_logprobs: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offset = first_offset
    for token_id, by_id in zip(token_ids, described, strict=True):
        text = next(undescribed) if by_id is None else by_id[token_id].decoded_token
        offsets.append(offset)
        tokens.append(text)
        offset += len(text)
        chosen_logprobs.append(None if by_id is None else _finite(by_id[token_id]))
        tops.append(None if by_id is None else _by_text(by_id))
    return CompletionLogprobs(
        text_offset=offsets, token_logprobs=chosen_logprobs, tokens=tokens, top_logprobs=tops
    )


def _by_text(by_id: Described) -> dict[str, float]:
    """Of tokens with equal texts the first, which is the chosen one or the likelier."""
    by_text: dict[str, float] = {}
    for one in by_id.values():
        by_text.setdefault(one.decoded_token, _finite(one))
    return by_text


def prompt_logprobs(described: Sequence[Described | None]) -> PromptLogprobs:
    """Per token of the prompt, by token id; None for the first."""
    return [
        None
        if by_id is None
        else {
            str(token_id): PromptLogprob(logprob=_finite(one), rank=one.rank, decoded_token=one.decoded_token)
            for token_id, one in by_id.items()
        }
        for by_id in described
    ]


def narrowed(described: Sequence[Described | None], num_top: int) -> list[Described | None]:
    """The chosen token and this many of the likeliest, of more that another field of the request asked for."""
    return [
        None
        if by_id is None
        else {
            token_id: one
            for place, (token_id, one) in enumerate(by_id.items())
            if place == 0 or one.rank <= num_top
        }
        for by_id in described
    ]


def _finite(one: Logprob) -> float:
    return max(one.logprob, LOWEST_LOGPROB)
