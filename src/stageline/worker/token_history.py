"""The tokens of one request so far, for the rules of sampling that look back.

One idea: penalties need each distinct token once with its count, so those two columns are kept up to date token by
token instead of being counted anew at every step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class TokenHistory:
    """Prompt and output of one request.

    Args:
        token_ids: the tokens so far.
        num_prompt_tokens: how many of them are the prompt's.
    """

    def __init__(self, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        self.token_ids = list(token_ids)
        prompt, output = token_ids[:num_prompt_tokens], token_ids[num_prompt_tokens:]
        distinct = list(dict.fromkeys(prompt))
        self._place_of = {token_id: place for place, token_id in enumerate(distinct)}
        self._distinct = np.array(distinct, dtype=np.int64)
        self._counts = np.zeros(len(distinct), dtype=np.int64)
        for token_id in output:
            self._count(token_id)

    @property
    def distinct_token_ids(self) -> npt.NDArray[np.int64]:
        """[distinct tokens] every token of prompt or output once."""
        return self._distinct[: len(self._place_of)]

    @property
    def output_counts(self) -> npt.NDArray[np.int64]:
        """[distinct tokens] how often each occurs in the output."""
        return self._counts[: len(self._place_of)]

    def append(self, token_id: int) -> None:
        """Add a generated token."""
        self.token_ids.append(token_id)
        self._count(token_id)

    def ends_with(self, token_ids: Sequence[int]) -> bool:
        """Whether these are the latest tokens; true for none."""
        start = len(self.token_ids) - len(token_ids)
        return start >= 0 and self.token_ids[start:] == list(token_ids)

    def _count(self, token_id: int) -> None:
        place = self._place_of.setdefault(token_id, len(self._place_of))
        if place == len(self._distinct):
            self._distinct = np.concatenate((self._distinct, np.zeros(place + 64, dtype=np.int64)))
            self._counts = np.concatenate((self._counts, np.zeros(place + 64, dtype=np.int64)))
        self._distinct[place] = token_id
        self._counts[place] += 1
