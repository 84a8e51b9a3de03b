"""Text of a growing token sequence, piece by piece, never half a character.

One idea: decode a short window of the latest tokens and emit what is new and settled. The window begins where earlier
text was complete, so that decoders which look back (a leading space, runs of byte tokens) see the same context twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"
# Tokens of context kept from the prompt; more if they would begin in the middle of a character.
PROMPT_CONTEXT_TOKENS = 6
LONGEST_PROMPT_CONTEXT_TOKENS = 32
# Bytes that never become text, from a model that emits noise, are given out as they are rather than held for ever.
LONGEST_WINDOW_TOKENS = 64


class DecodeStream:
    """Args:
    decode: token ids to text.
    prompt_token_ids: what came before; its text is not emitted, but decides about spaces and half characters.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt_token_ids: Sequence[int] = ()) -> None:
        self._decode = decode
        self._window = _prompt_context(decode, prompt_token_ids)
        text = decode(self._window)
        self._num_emitted = _num_settled(text)
        # A prompt that ends inside a character is no place where later context may begin.
        self._num_context = len(self._window) if self._num_emitted == len(text) else 0

    def step(self, token_id: int) -> str:
        """Returns: the new text that is complete; often empty while a character is unfinished."""
        self._window.append(token_id)
        text = self._decode(self._window)
        num_settled = _num_settled(text)
        is_long = len(self._window) > LONGEST_WINDOW_TOKENS
        if is_long:
            num_settled = len(text)
        new_text = text[self._num_emitted : num_settled]
        if num_settled == len(text) and (new_text or is_long):
            self._restart()
        else:
            self._num_emitted = max(self._num_emitted, num_settled)
        return new_text

    def finish(self, token_ids: Sequence[int] = ()) -> str:
        """The stream ends, perhaps with some last tokens.

        Returns: what `step` would give for these one by one, and then what was held back, as it is. Valid text is
            decoded in one go; anything else one by one, because where a replacement is emitted decides what follows.
        """
        if token_ids:
            text = self._decode([*self._window, *token_ids])
            if REPLACEMENT not in text:
                return text[self._num_emitted :]
        stepped = "".join([self.step(token_id) for token_id in token_ids])
        return stepped + self._decode(self._window)[self._num_emitted :]

    def _restart(self) -> None:
        """Everything is emitted: keep only the tokens added since the last time as context."""
        self._window = self._window[self._num_context :]
        self._num_context = len(self._window)
        self._num_emitted = len(self._decode(self._window))


def _prompt_context(decode: Callable[[Sequence[int]], str], prompt_token_ids: Sequence[int]) -> list[int]:
    """The last few tokens, from the beginning of a character on."""
    for num_tokens in range(PROMPT_CONTEXT_TOKENS, LONGEST_PROMPT_CONTEXT_TOKENS):
        context = list(prompt_token_ids[-num_tokens:])
        if num_tokens >= len(prompt_token_ids) or not decode(context).startswith(REPLACEMENT):
            break
    return context


def _num_settled(text: str) -> int:
    """Characters that later tokens cannot change. A trailing replacement may be the beginning of a real character, and
    a run of byte tokens is replaced as a whole until it is valid, so the whole trailing run is open."""
    return len(text.rstrip(REPLACEMENT))
