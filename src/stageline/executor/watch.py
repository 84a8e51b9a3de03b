"""Which stage has been silent for too long. One idea: only time in which a stage could have answered counts.

The engine asks for signs of life only while it waits for the stages. Between two looks at most one interval passes
here, however long the engine was away: idle between two calls, stopped by Ctrl-Z, busy in a user's callback.
"""

from __future__ import annotations

_ROUNDS_PER_TIMEOUT = 8

_PATIENCE_WHILE_LOADING = 4
"""Timeouts a loading stage may be silent for: it imports and packs, and every other stage keeps the machine as busy."""


class Watch:
    """Counts each stage's silence.

    Args:
        heartbeat_timeout_s: a stage that answers no ping for this long is lost.
        load_timeout_s: so is one that makes no progress while it starts or loads.
        now_s: now, on the clock of all other times given here.
    """

    def __init__(self, heartbeat_timeout_s: float, load_timeout_s: float, num_stages: int, now_s: float) -> None:
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._load_timeout_s = load_timeout_s
        self._interval_s = heartbeat_timeout_s / _ROUNDS_PER_TIMEOUT
        self._last_look_s = now_s
        # From here on everything is in seconds of waiting.
        self._waited_s = 0.0
        self._next_round_s = 0.0
        self._asked_s: list[float | None] = [None] * num_stages
        self._progress_s: list[float | None] = [0.0] * num_stages
        self._can_answer = [False] * num_stages

    def can_answer(self, stage_index: int) -> bool:
        """It has spoken before. A stage that is starting up may be too busy importing to answer."""
        return self._can_answer[stage_index]

    def heard_of(self, stage_index: int) -> None:
        """A sign of life, whatever it is."""
        self._asked_s[stage_index] = None

    def progressed(self, stage_index: int) -> None:
        """It is up, and reads weights."""
        self._can_answer[stage_index] = True
        self._progress_s[stage_index] = self._waited_s

    def loaded(self, stage_index: int) -> None:
        """Its weights are there; from now on the heartbeat alone counts."""
        self._can_answer[stage_index] = True
        self._progress_s[stage_index] = None

    def look(self, now_s: float) -> None:
        """Let the time since the last look pass; to be called before and after each wait."""
        self._waited_s += min(max(0.0, now_s - self._last_look_s), self._interval_s)
        self._last_look_s = now_s

    def stages_to_ask(self) -> range:
        """All stages if a round is due, else none; who is asked has to answer from now on."""
        if self._waited_s < self._next_round_s:
            return range(0)
        self._next_round_s = self._waited_s + self._interval_s
        self._asked_s = [self._waited_s if asked_s is None else asked_s for asked_s in self._asked_s]
        return range(len(self._asked_s))

    def patience_s(self) -> float:
        """How long to wait before the next round."""
        return max(0.0, self._next_round_s - self._waited_s)

    def silent_s(self, stage_index: int) -> float:
        """For how long it has owed an answer."""
        asked_s = self._asked_s[stage_index]
        return 0.0 if asked_s is None else self._waited_s - asked_s

    def silence(self) -> tuple[int, str] | None:
        """A stage that is lost, and why; None as long as there is hope."""
        for stage_index, asked_s in enumerate(self._asked_s):
            is_loading = self._progress_s[stage_index] is not None
            patience = _PATIENCE_WHILE_LOADING if is_loading else 1
            # The last interval of a timeout may have passed before the question was asked.
            hearing_s = patience * self._heartbeat_timeout_s - self._interval_s
            if asked_s is not None and self._waited_s - asked_s >= hearing_s:
                allowed = f"{patience} times " if is_loading else ""
                limit = f"{allowed}--heartbeat-timeout-s {self._heartbeat_timeout_s:g}"
                return stage_index, f"no sign of life within {limit}"
        for stage_index, progress_s in enumerate(self._progress_s):
            if progress_s is not None and self._waited_s - progress_s >= self._load_timeout_s:
                limit = f"--load-timeout-s {self._load_timeout_s:g}"
                doing = "it made no progress loading" if self._can_answer[stage_index] else "it did not come up"
                return stage_index, f"{doing} for {self._waited_s - progress_s:.1f} s ({limit})"
        return None
