"""Which of several equal pipelines a request goes to: where its beginning was computed, if that one is not much busier.

One idea: a cached prefix saves work only once, while a queue costs every request in it. So the busyness that a request
accepts for the sake of its prefix is bounded, and the bound holds whatever is asked: a replica is chosen only while its
load is at most `most_accepted(least)`, `least` being the load of the least busy one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from stageline.request import EngineRequest, RequestUpdate

CHUNK_TOKENS = 64
"""Prefixes are compared in steps of so many tokens; shorter ones are not worth a detour."""

_MOST_CHUNKS_PER_PROMPT = 512
_MOST_CHUNKS_REMEMBERED = 2**14
"""Per replica: a million tokens, about what its KV cache may hold."""

_TOKENS_LIKE_A_REQUEST = 512
"""A prompt of so many tokens that is yet to be computed keeps a pipeline as busy as one more request's decodes."""

_ACCEPTED_REQUESTS, _ACCEPTED_SHARE = 4.0, 0.5


def most_accepted(least: float) -> float:
    """The highest load at which a replica is chosen for a prefix while another has the load `least`."""
    return least * (1 + _ACCEPTED_SHARE) + _ACCEPTED_REQUESTS


class Load:
    """How busy one replica is, as one of its clients knows: exactly of its own requests, by hearsay of others'.

    Measured in requests: those that run or wait, and more for prompts that are still to be computed.
    """

    def __init__(self) -> None:
        self._own: dict[str, int] = {}
        self._num_tokens_to_compute = 0
        self._num_others = 0

    @property
    def requests(self) -> float:
        return len(self._own) + self._num_others + self._num_tokens_to_compute / _TOKENS_LIKE_A_REQUEST

    @property
    def own_ids(self) -> list[str]:
        return list(self._own)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._own

    def add(self, request_id: str, num_tokens_to_compute: int) -> None:
        self._own[request_id] = num_tokens_to_compute
        self._num_tokens_to_compute += num_tokens_to_compute

    def took(self, update: RequestUpdate) -> None:
        """News of a request: a token means that its prompt is computed, and its end that it is no load any more."""
        if update.request_id not in self._own:
            return
        if update.finish_reason is not None or update.failure is not None:
            self.ended(update.request_id)
        elif update.token_ids:
            self._num_tokens_to_compute -= self._own[update.request_id]
            self._own[update.request_id] = 0

    def ended(self, request_id: str) -> None:
        """May be told of a request that it does not have."""
        self._num_tokens_to_compute -= self._own.pop(request_id, 0)

    def heard(self, num_requests: int) -> None:
        """What the replica has of all its clients, a moment ago."""
        self._num_others = max(0, num_requests - len(self._own))


class _Prefixes:
    """What one replica has probably cached: the newest chunks that it was given to compute."""

    def __init__(self) -> None:
        self._chunks: OrderedDict[int, None] = OrderedDict()

    def num_known(self, chunks: Sequence[int]) -> int:
        """How many chunks at the beginning."""
        for place, chunk in enumerate(chunks):
            if chunk not in self._chunks:
                return place
        return len(chunks)

    def add(self, chunks: Sequence[int]) -> None:
        # The beginning last: it is needed longest, for what follows it is of no use without it.
        for chunk in reversed(chunks):
            self._chunks[chunk] = None
            self._chunks.move_to_end(chunk)
        while len(self._chunks) > _MOST_CHUNKS_REMEMBERED:
            self._chunks.popitem(last=False)


class Router:
    """Decides for one client of all replicas. Its loads are to be kept up to date by its owner."""

    def __init__(self, num_replicas: int, uses_prefixes: bool = True) -> None:
        self.loads = [Load() for _ in range(num_replicas)]
        self._uses_prefixes = uses_prefixes
        self._prefixes = [_Prefixes() for _ in range(num_replicas)]
        self._chosen = [0] * num_replicas
        self._num_choices = 0

    def place(self, requests: Sequence[EngineRequest], usable: Sequence[int]) -> int:
        """Choose for the completions of one user request, and count them as that replica's load.

        Args:
            usable: indices of replicas that take requests, at least one.
        """
        first = requests[0]
        chunks = _chunks_of(first) if self._uses_prefixes and len(self.loads) > 1 else []
        accepted = most_accepted(min(self.loads[index].requests for index in usable))

        def order(index: int) -> tuple[int, float, int]:
            load = self.loads[index].requests
            num_known = self._prefixes[index].num_known(chunks) if load <= accepted else 0
            return -num_known, load, self._chosen[index]

        chosen = min(usable, key=order)
        num_cached = CHUNK_TOKENS * self._prefixes[chosen].num_known(chunks)
        self._prefixes[chosen].add(chunks)
        self._num_choices += 1
        self._chosen[chosen] = self._num_choices
        for request in requests:
            num_new = max(0, len(first.prompt_token_ids) - num_cached) if request is first else 0
            self.loads[chosen].add(request.request_id, num_new)
        return chosen

    def forget(self, index: int) -> None:
        """A replica has lost what it cached, and all of its requests."""
        self.loads[index] = Load()
        self.forget_prefixes(index)

    def forget_prefixes(self, index: int) -> None:
        """A replica has lost what it cached."""
        self._prefixes[index] = _Prefixes()


def _chunks_of(request: EngineRequest) -> list[int]:
    """A name for each chunk, made of it, of all before it, and of the salt. A clash only misleads one choice."""
    token_ids, name = request.prompt_token_ids, hash(request.cache_salt)
    names: list[int] = []
    for end in range(CHUNK_TOKENS, len(token_ids) + 1, CHUNK_TOKENS):
        if len(names) == _MOST_CHUNKS_PER_PROMPT:
            break
        name = hash((name, *token_ids[end - CHUNK_TOKENS : end]))
        names.append(name)
    return names
