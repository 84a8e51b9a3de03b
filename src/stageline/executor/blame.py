"""Which stage was lost, and in which words, when what is noticed first is only a consequence.

One idea: who tells of a broken link is alive, so the link's other end is to blame, unless it answers a question that
was asked afterwards; then it is the link itself. Who knows better (the end of a process, its own last words, what its
machine says of it) has a moment to say so first. A message names the machine, its stages and what was seen.
"""

from __future__ import annotations

from stageline.errors import WorkerLost
from stageline.executor.messages import Failed
from stageline.executor.remote_stages import RemoteStages
from stageline.executor.watch import Watch
from stageline.pipeline.rank_layout import RankLayout

_LOOKS_S = (0.0, 0.1, 0.3, 1.0)
"""When it is looked, after a report, whether the other end's machine is still connected, of which ZeroMQ tells only who
sends to it; the last look ends the inquiry."""

_RANK_S = 0.5
"""Within which the end of a rank is noticed that another one of its stage misses."""

_ALSO_SILENT_FRACTION = 0.5
"""Another machine is silent, too, if each of its stages has owed an answer for this part of the lost one's time."""


class Blame:
    """Args:
    remote: the stages that other machines run; None if there are none.
    """

    def __init__(self, ranks: RankLayout, watch: Watch, remote: RemoteStages | None) -> None:
        self._ranks = ranks
        self._watch = watch
        self._remote = remote
        self._report: Failed | None = None
        self._link_to = 0
        self._asked_s = 0.0
        self._num_looks = 0

    def reason_of(self, process: int, reason: str) -> str:
        """Why a stage is lost, if it is by this process."""
        words = self._ranks.reason_of(process, reason)
        machine = self._machine(self._ranks.all[process].stage_index)
        return f"{machine}: {words}" if machine else words

    def silent(self, process: int, reason: str) -> WorkerLost:
        """This one has been silent for too long. Args: reason: and for how long that was."""
        return self._silent(process, reason, "")

    # ---- a link that broke ----

    def begin(self, report: Failed, now_s: float) -> int | None:
        """A stage tells of a link that broke. Returns: the process to be pinged now; None if it is known already."""
        if self._report is not None or report.link_to is None:
            return None
        self._report, self._link_to, self._asked_s, self._num_looks = report, report.link_to, now_s, 0
        return None if self._is_within_stage else self._suspect

    def next_look_s(self) -> float | None:
        """When `look` is due; None if there is nothing to find out."""
        if self._report is None:
            return None
        return self._asked_s + (_RANK_S if self._is_within_stage else _LOOKS_S[self._num_looks])

    def answered(self, process: int, asked_s: float) -> WorkerLost | None:
        """An answer to a question of that time: the other end's shows that it is the link that was lost."""
        report = self._report
        if report is None or self._is_within_stage or process != self._suspect or asked_s < self._asked_s:
            return None
        ends = [self._short_name(report.stage_index), self._short_name(self._link_to)]
        between = f": look at the network between {' and '.join(ends)}" if all(ends) else ""
        reason = f"{report.message}, though stage {self._link_to} answers{between}"
        return WorkerLost(report.stage_index, self.reason_of(self._process_of(report), reason))

    def look(self, now_s: float) -> WorkerLost | None:
        """To be called when everything that was said has been heard. Returns: a loss that is certain by now."""
        report, due_s = self._report, self.next_look_s()
        if report is None or due_s is None:
            return None
        if self._is_within_stage:
            return None if now_s < due_s else self._own_word(report)
        # Who has owed an answer for long before the link broke is given no more time.
        owes_s = self._watch.silent_s(self._suspect)
        is_over = now_s - self._asked_s >= _LOOKS_S[-1] or owes_s >= _LOOKS_S[-1]
        if now_s < due_s and not is_over:
            return None
        self._num_looks = min(self._num_looks + 1, len(_LOOKS_S) - 1)
        seen = f"stage {report.stage_index} says: {report.message}"
        if self._is_remote(self._link_to) and not self._is_connected(self._link_to):
            what = "its connection to the head is closed: its `stageline`, or the machine, ended or was cut off"
            return WorkerLost(self._link_to, f"{self._machine(self._link_to)}: {what} ({seen})")
        if not is_over:
            return None
        silence_s = max(owes_s, now_s - self._asked_s)
        return self._silent(self._suspect, f"no answer for {silence_s:.1f} s", f", and {seen}")

    def word_of(self, process: int) -> WorkerLost | None:
        """What a process that has ended said before of another one, if nobody knew better."""
        report = self._report
        return None if report is None or self._process_of(report) != process else self._own_word(report)

    def _own_word(self, report: Failed) -> WorkerLost:
        reason = self.reason_of(self._process_of(report), report.message)
        return WorkerLost(report.stage_index, reason, report.traceback)

    @property
    def _is_within_stage(self) -> bool:
        """It is another rank of its own stage that the report misses; that one's end will be noticed."""
        return self._report is not None and self._report.stage_index == self._link_to

    @property
    def _suspect(self) -> int:
        """A link between machines leads to the first rank of a stage."""
        return self._ranks.leaders[self._link_to]

    def _process_of(self, report: Failed) -> int:
        return self._ranks.process_of(report.stage_index, report.rank)

    # ---- where stages are ----

    def _is_remote(self, stage_index: int) -> bool:
        return self._remote is not None and stage_index >= self._remote.num_local

    def _is_connected(self, stage_index: int) -> bool:
        return self._remote is None or self._remote.is_machine_connected(stage_index)

    def _machine(self, stage_index: int) -> str:
        return "" if self._remote is None else self._remote.describe_machine(stage_index)

    def _short_name(self, stage_index: int) -> str:
        return "" if self._remote is None else self._remote.machine_of(stage_index) or "the head"

    def _silent(self, lost: int, reason: str, seen: str) -> WorkerLost:
        """Its whole machine may be silent, and others, too."""
        stage_index = self._ranks.all[lost].stage_index
        own = self._short_name(stage_index)
        is_silent = self._silent_machines(self._watch.silent_s(lost))
        is_whole = is_silent.pop(own, False)
        if is_whole and self._num_processes_on(own) > 1:
            words = f"{self._machine(stage_index)}: {reason}, from any of its stages"
        else:
            words = self.reason_of(lost, reason)
        others = [name for name, is_one in is_silent.items() if is_one]
        if others:
            is_nobody_left = is_whole and len(others) == len(is_silent)
            hint = ": no other machine does; is this one's network up?" if is_nobody_left else ""
            seen += f"; nor does {', '.join(others)} answer{hint}"
        return WorkerLost(stage_index, words + seen)

    def _num_processes_on(self, machine: str) -> int:
        return sum(self._short_name(place.stage_index) == machine for place in self._ranks.all)

    def _silent_machines(self, silence_s: float) -> dict[str, bool]:
        """Whether nothing is heard from any stage of each other machine, by its name."""
        least_s = silence_s * _ALSO_SILENT_FRACTION
        found: dict[str, bool] = {}
        for process, place in enumerate(self._ranks.all):
            if self._is_remote(place.stage_index):
                name, owes_s = self._short_name(place.stage_index), self._watch.silent_s(process)
                found[name] = found.get(name, True) and owes_s > 0.0 and owes_s >= least_s
        return found
