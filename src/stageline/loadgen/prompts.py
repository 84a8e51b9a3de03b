"""Planned prompts become prompts: token ids where the server can say which there are, otherwise words.

One idea: what a segment holds follows from the seed and its content number alone, so prompts share what the plan says
they share, in every run and on every server.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from stageline.loadgen.workload import PlannedRequest, Segment

# Common words, most of them one token of any tokenizer of English.
_WORDS = """
    the of and to in is that for it was on with as be this at by are from or have an not which his but had her they
    were all one we there can been their more if will would who when what so up out about than into them some time
    could other then only its also two these may first new now people my made over did down way many must before
    through back years where much your well should because each just state those very good too even here work any own
    after most such under life us day same right look think great another place part house world school still last
    never against three number during hand high water light long little small large found between both while want
    does home end point system order group form line name turn word open case side power city study night book door
    force idea room paper story fact music market rest month least cost table family member white black food game
    summer winter river earth plant animal letter answer question reason second minute hour morning evening
"""


def words() -> list[str]:
    """Several hundred, in order."""
    return _WORDS.split()


@dataclass(frozen=True)
class PromptMaker:
    """Args:
    pool: token ids or words to draw from.
    tokens_per_item: how many tokens an item of the pool makes, on average; 1 for ids.
    seed: of everything drawn.
    """

    pool: Sequence[int] | Sequence[str]
    tokens_per_item: float
    seed: int

    def prompt(self, request: PlannedRequest) -> str | list[int]:
        """As the plan wants it: exactly as long with token ids, about as long with words."""
        if request.text is not None:
            return request.text
        items = [item for segment in request.segments for item in self._items(segment)]
        if self.pool and isinstance(self.pool[0], int):
            return items
        return " ".join(str(item) for item in items)

    def _items(self, segment: Segment) -> list[int]:
        num_items = max(1, round(segment.num_tokens / self.tokens_per_item))
        generator = random.Random((self.seed << 64) + segment.content)
        return generator.choices(self.pool, k=num_items)  # type: ignore[arg-type]
