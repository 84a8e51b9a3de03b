"""Recorded traffic: files that say when requests came and how long they were.

    azure      CSV  TIMESTAMP,ContextTokens,GeneratedTokens         Azure LLM inference traces 2023 and 2024
    mooncake   JSON lines with timestamp (ms), input_length, output_length, hash_ids
    burstgpt   CSV  Timestamp (s), Request tokens, Response tokens  BurstGPT
    sharegpt   JSON list of conversations; texts without times

Rows without a prompt or an answer are left out: failed requests in the recordings.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from stageline.errors import ConfigError
from stageline.loadgen.workload import PlannedRequest, Segment

MOONCAKE_BLOCK_TOKENS = 512
"""Tokens that a hash id of the Mooncake traces stands for."""

_BYTES_PER_TOKEN = 4
# Contents of prompts that share nothing must not meet the hash ids of those that do.
_FIRST_OWN_CONTENT = 1 << 40


class _MooncakeRow(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


class _Turn(msgspec.Struct):
    sender: str = msgspec.field(name="from", default="")
    value: str = ""


class _Conversation(msgspec.Struct):
    conversations: list[_Turn] = []


def read_azure(path: str, limit: int | None = None) -> list[PlannedRequest]:
    """Raises: ConfigError, as all of these, naming the file and the line."""
    return _from_csv(path, limit, "TIMESTAMP", "ContextTokens", "GeneratedTokens", _utc_seconds)


def read_burstgpt(path: str, limit: int | None = None) -> list[PlannedRequest]:
    return _from_csv(path, limit, "Timestamp", "Request tokens", "Response tokens", float)


def read_mooncake(path: str, limit: int | None = None) -> list[PlannedRequest]:
    """Prompts share the blocks whose hash ids they share."""
    decoder = msgspec.json.Decoder(_MooncakeRow)
    rows: list[PlannedRequest] = []
    for number, line in enumerate(_text(path).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise ConfigError(f"--dataset-path {path}, line {number}: {error}") from None
        if row.input_length > 0 and row.output_length > 0:
            rows.append(PlannedRequest(_blocks(row, number), row.output_length, row.timestamp / 1000))
        if len(rows) == limit:
            break
    return _from_zero(path, rows)


def read_sharegpt(path: str, limit: int | None = None) -> list[PlannedRequest]:
    """First turns of conversations; an answer is as long as it was, at four bytes a token."""
    try:
        conversations = msgspec.json.decode(_text(path), type=list[_Conversation])
    except msgspec.DecodeError as error:
        raise ConfigError(f"--dataset-path {path} is no list of conversations: {error}") from None
    rows = [
        PlannedRequest((), max(1, len(turns[1].value.encode()) // _BYTES_PER_TOKEN), text=turns[0].value)
        for turns in (one.conversations for one in conversations)
        if len(turns) >= 2 and turns[0].sender in ("human", "user") and turns[0].value and turns[1].value
    ]
    if not rows:
        raise ConfigError(f"--dataset-path {path} holds no conversation of a human turn and an answer")
    return rows[:limit]


def _blocks(row: _MooncakeRow, number: int) -> tuple[Segment, ...]:
    left, segments = row.input_length, []
    for hash_id in row.hash_ids:
        if left <= 0:
            break
        segments.append(Segment(min(left, MOONCAKE_BLOCK_TOKENS), hash_id))
        left -= MOONCAKE_BLOCK_TOKENS
    if left > 0:
        segments.append(Segment(left, _FIRST_OWN_CONTENT + number))
    return tuple(segments)


def _from_csv(
    path: str,
    limit: int | None,
    time_column: str,
    input_column: str,
    output_column: str,
    seconds: Callable[[str], float],
) -> list[PlannedRequest]:
    reader = csv.DictReader(_text(path).splitlines())
    columns = (time_column, input_column, output_column)
    missing = [column for column in columns if column not in (reader.fieldnames or ())]
    if missing:
        raise ConfigError(f"--dataset-path {path} has no column {missing[0]!r}; its first line must name {columns}")
    rows: list[PlannedRequest] = []
    for number, row in enumerate(reader, start=2):
        try:
            at_s, num_prompt, num_output = seconds(row[time_column]), int(row[input_column]), int(row[output_column])
        except (TypeError, ValueError) as error:
            raise ConfigError(f"--dataset-path {path}, line {number}: {error}") from None
        if num_prompt > 0 and num_output > 0:
            segment = Segment(num_prompt, _FIRST_OWN_CONTENT + number)
            rows.append(PlannedRequest((segment,), num_output, at_s))
        if len(rows) == limit:
            break
    return _from_zero(path, rows)


def _utc_seconds(text: str) -> float:
    """Seconds of a date and time with up to seven decimals, or of a number."""
    try:
        return float(text)
    except ValueError:
        pass
    whole, _, fraction = text.strip().removesuffix("Z").partition(".")
    digits = fraction.split("+")[0]
    moment = datetime.fromisoformat(whole.split("+")[0]).replace(tzinfo=UTC)
    return moment.timestamp() + (float(f"0.{digits}") if digits else 0.0)


def _from_zero(path: str, rows: Iterable[PlannedRequest]) -> list[PlannedRequest]:
    """In order of time, the first at 0."""
    in_order = sorted(rows, key=lambda row: row.at_s or 0.0)
    if not in_order:
        raise ConfigError(f"--dataset-path {path} holds no request with a prompt and an answer")
    first_s = in_order[0].at_s or 0.0
    return [replace(row, at_s=(row.at_s or 0.0) - first_s) for row in in_order]


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"--dataset-path {path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--dataset-path {path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
