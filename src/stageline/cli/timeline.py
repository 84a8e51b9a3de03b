"""`stageline timeline`: what every stage did, from a file or from a running server, as text, picture or trace."""

from __future__ import annotations

import argparse
import json
import shutil
import ssl
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from stageline.cli.opening import SubParsers, add_command, check_can_write, newest_simulation, written
from stageline.config import environment
from stageline.errors import ConfigError, StagelineError
from stageline.timeline.analysis import analyse
from stageline.timeline.chrome_trace import spans_of_chrome_trace, write_chrome_trace
from stageline.timeline.journeys import LatencySplit, critical_path, journeys, mean_split
from stageline.timeline.picture import check_can_draw, write_picture
from stageline.timeline.saved import SavedTimeline
from stageline.timeline.span import Span
from stageline.timeline.text_gantt import format_gantt, three_digits
from stageline.timeline.view import format_critical_path, format_report, format_split

_USAGE = "stageline timeline (FILE | --url URL | --simulated) [--seconds N] [--png FILE] [--chrome FILE] [--save FILE]"
_EXAMPLE = """examples:
  stageline timeline timeline.json
  stageline timeline --url http://127.0.0.1:8000 --seconds 5 --png timeline.png

FILE is what `stageline bench --timeline` wrote, or an answer of a server's /debug/timeline.
"""
_DEFAULT_SECONDS = 5.0
_PATIENCE_S = 30.0


def add_parser(commands: SubParsers) -> None:
    parser = add_command(commands, "timeline", "show what every stage did, and when", _USAGE, _EXAMPLE)
    parser.add_argument("file", nargs="?", metavar="FILE", help="a saved timeline")
    parser.add_argument("--simulated", action="store_true", help="of the newest stageline plan --simulate")
    parser.add_argument("--url", metavar="URL", help="of a server that is running, such as http://127.0.0.1:8000")
    parser.add_argument(
        "--seconds",
        type=float,
        metavar="N",
        help=f"the last so many (default: {_DEFAULT_SECONDS:g} of a server, all of a file)",
    )
    parser.add_argument(
        "--api-key", metavar="KEY", help="default: the variable STAGELINE_API_KEY, or else OPENAI_API_KEY"
    )
    parser.add_argument("--ca-file", metavar="FILE", help="certificates to check an https server's against")
    parser.add_argument("--width", type=int, metavar="COLUMNS", help="of the text (default: the terminal's)")
    parser.add_argument("--png", metavar="FILE", help="draw it (needs matplotlib)")
    parser.add_argument("--chrome", metavar="FILE", help="write a Chrome trace, for ui.perfetto.dev")
    parser.add_argument("--save", metavar="FILE", help="write the spans as JSON, for this command")
    parser.set_defaults(run=run)


@dataclass(frozen=True)
class _Recording:
    """What was read, and what else a server says about it."""

    spans: list[Span]
    num_stages: int
    start_s: float
    end_s: float
    latencies: dict[str, LatencySplit]
    advice: list[str]


def run(args: argparse.Namespace) -> int:
    _check(args)
    if args.simulated:
        args.file = str(newest_simulation())
    recording = _of_server(args) if args.url else _of_file(args.file, args.seconds)
    if not any(span.kind == "forward" for span in recording.spans):
        print(f"nothing ran in these {three_digits(recording.end_s - recording.start_s)} s")
    else:
        print(_as_text(recording, args.width or shutil.get_terminal_size((100, 24)).columns))
    for name, split in recording.latencies.items():
        print(f"{name}, mean: {format_split(split)}")
    for line in recording.advice:
        print(line)
    return 0 if _write_files(args, recording) else 1


def _check(args: argparse.Namespace) -> None:
    if (args.file is not None) + (args.url is not None) + args.simulated != 1:
        raise ConfigError("give a file, --url or --simulated, one of them")
    if args.simulated and not newest_simulation().is_file():
        raise ConfigError("nothing was simulated yet; run `stageline plan MODEL --simulate` first")
    if args.seconds is not None and not 0 < args.seconds <= (60 if args.url else 1e9):
        raise ConfigError(f"--seconds is {args.seconds:g}; it must be above 0, and at most 60 of a server")
    for flag in ("png", "chrome", "save"):
        check_can_write(f"--{flag}", getattr(args, flag))
    if args.png is not None:
        check_can_draw("--png")


def _as_text(recording: _Recording, width: int) -> str:
    spans, num_stages = recording.spans, recording.num_stages
    picture = format_gantt(spans, num_stages, width, recording.start_s, recording.end_s)
    lines = [picture, "", format_report(analyse(spans, num_stages))]
    all_journeys = journeys(spans, num_stages)
    way = mean_split(all_journeys, num_stages)
    if way is not None:
        lines.append(f"critical path, {format_critical_path(critical_path(all_journeys, num_stages))}")
        lines.append(f"a microbatch's way, mean: {format_split(way)}")
    return "\n".join(lines)


def _write_files(args: argparse.Namespace, recording: _Recording) -> bool:
    spans, num_stages, start_s, end_s = recording.spans, recording.num_stages, recording.start_s, recording.end_s
    title = f"{num_stages} stage{'s' * (num_stages > 1)}, {three_digits(end_s - start_s)} s"
    saved = SavedTimeline(start_s, end_s, num_stages, spans)
    writers = {
        "png": lambda path: write_picture(path, spans, num_stages, start_s, end_s, title),
        "chrome": lambda path: write_chrome_trace(path, spans),
        "save": lambda path: saved.save(Path(path)),
    }
    is_all_written = True
    for flag, write in writers.items():
        path = getattr(args, flag)
        if path is not None:
            is_all_written &= written(f"--{flag}", path, lambda write=write, path=path: write(path))  # type: ignore[misc]
    return is_all_written


# ---- where it comes from ----


def _of_file(path: str, seconds: float | None) -> _Recording:
    try:
        body = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error
    spans = _decode(path, body)
    if not any(span.stage_index >= 0 for span in spans):
        raise ConfigError(f"{path} holds no span of a stage")
    end_s = max(span.end_s for span in spans)
    start_s = max(min(span.start_s for span in spans), end_s - (seconds or float("inf")))
    recent = [span for span in spans if span.end_s > start_s]
    return _Recording(recent, 1 + max(span.stage_index for span in recent), start_s, end_s, {}, [])


def _decode(path: str, body: bytes) -> list[Span]:
    try:
        found = msgspec.json.decode(body)
        if isinstance(found, dict) and "traceEvents" in found:
            return spans_of_chrome_trace(found)
        return msgspec.convert(found, SavedTimeline).spans
    except (msgspec.MsgspecError, ValueError) as error:
        raise ConfigError(f"{path} is neither a Chrome trace of Stageline nor saved spans: {error}") from error


def _of_server(args: argparse.Namespace) -> _Recording:
    server = _Server(args.url, args.api_key or environment.client_api_key(), args.ca_file)
    seconds = args.seconds or _DEFAULT_SECONDS
    saved = msgspec.json.decode(server.get(f"/debug/timeline?seconds={seconds:g}"), type=SavedTimeline)
    view = json.loads(server.get("/debug/pipeline"))
    return _Recording(saved.spans, saved.num_stages, saved.start_s, saved.end_s, _latencies(view), view["advice"])


def _latencies(view: dict[str, Any]) -> dict[str, LatencySplit]:
    """What the requests of the last seconds waited for, as far as there were some."""
    names = {"TTFT": "ttft", "ITL": "itl"}
    return {name: msgspec.convert(view[key], LatencySplit) for name, key in names.items() if view.get(key)}


class _Server:
    def __init__(self, url: str, key: str | None, ca_file: str | None) -> None:
        if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
            raise ConfigError(f"--url {url} must begin with http:// or https://")
        self._url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            self._tls = ssl.create_default_context(cafile=ca_file)
        except OSError as error:
            raise ConfigError(f"--ca-file {ca_file} cannot be used: {error.strerror or error}") from error

    def get(self, path: str) -> bytes:
        """Raises: StagelineError with what the server, or the network, says."""
        request = urllib.request.Request(self._url + path, headers=self._headers)
        try:
            with urllib.request.urlopen(request, timeout=_PATIENCE_S, context=self._tls) as answer:
                body: bytes = answer.read()
                return body
        except urllib.error.HTTPError as error:
            with error:
                raise StagelineError(f"{self._url} answered {error.code}: {_message(error.read())}") from None
        except (urllib.error.URLError, OSError) as error:
            reason = getattr(error, "reason", error)
            words = getattr(reason, "strerror", None) or reason
            raise StagelineError(f"{self._url} does not answer: {words}; is the server up, and --url right?") from None


def _message(body: bytes) -> Any:
    try:
        return json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return "it may not be a server of Stageline"
