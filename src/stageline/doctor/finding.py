"""What a check found: one line, whether that is in order, and the way out where it is not.

One idea: a check asks what a start would ask, of the same functions, and tells what they would say. So the doctor and a
start never differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from stageline.errors import ConfigError

Status = Literal["ok", "warning", "failed", "skipped"]

_MARKS: dict[Status, tuple[str, str]] = {
    "ok": ("ok", "32"),
    "warning": ("warn", "33"),
    "failed": ("FAIL", "31"),
    "skipped": ("-", "2"),
}
_CHECK_WIDTH = 14


class Finding(msgspec.Struct, frozen=True):
    """Args:
    check: its name.
    where: the machine, if it is not this one.
    message: one line; if something is wrong, with the way out.
    """

    check: str
    status: Status
    message: str
    where: str = ""

    def line(self, is_coloured: bool = False) -> str:
        mark, colour = _MARKS[self.status]
        shown = f"{mark:<4}"
        shown = f"\033[{colour}m{shown}\033[0m" if is_coloured else shown
        where = f"{self.where}: " if self.where else ""
        return f"{shown}  {self.check:<{_CHECK_WIDTH}}  {where}{self.message}"


def ok(check: str, message: str, where: str = "") -> Finding:
    return Finding(check, "ok", message, where)


def warning(check: str, message: str, where: str = "") -> Finding:
    return Finding(check, "warning", message, where)


def failed(check: str, message: str, where: str = "") -> Finding:
    return Finding(check, "failed", message, where)


def skipped(check: str, message: str, where: str = "") -> Finding:
    return Finding(check, "skipped", message, where)


def finding_of(check: str, look: Callable[[], str], where: str = "") -> Finding:
    """What `look` returns is in order; a ConfigError that it raises is not."""
    try:
        return ok(check, look(), where)
    except ConfigError as error:
        return failed(check, str(error), where)


def is_healthy(findings: Sequence[Finding]) -> bool:
    """Nothing would fail."""
    return all(finding.status != "failed" for finding in findings)
