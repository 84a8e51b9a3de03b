"""`stageline bench serve`: send a workload to a server that is running, and tell how it answered.

Any server with OpenAI's API will do; the exact lengths of prompts need one that also tokenises (`/tokenize`).
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import math
import random
import signal
import sys
import urllib.parse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from tqdm import tqdm

from stageline.cli.opening import SubParsers, add_command, check_can_write, written
from stageline.cli.workload_flags import add_arrival_flags, add_workload_flags, check_workload, planned_requests
from stageline.config import environment
from stageline.errors import ConfigError
from stageline.loadgen import workload
from stageline.loadgen.plot import check_can_plot, write_plot
from stageline.loadgen.prompts import PromptMaker, words
from stageline.loadgen.report import Objective, Report, format_rates, format_report
from stageline.loadgen.run import LoadRun, PreparedRequest, RunResult
from stageline.loadgen.workload import PlannedRequest

if TYPE_CHECKING:
    from stageline.loadgen.client import LoadClient

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130

_USAGE = "stageline bench serve [--base-url URL] [--request-rate R | --rates R,R,... | --max-concurrency N] [options]"
_EXAMPLE = """examples:
  stageline bench serve --max-concurrency 16 --input-len 128 --output-len 64
  stageline bench serve --dataset-name sharegpt --rates 1,2,4 --goodput ttft:500 tpot:50 --plot latency.png
  stageline bench serve --dataset-name mooncake --dataset-path trace.jsonl --time-scale 0.5 --output result.json

Requests come at --request-rate, whether or not earlier ones are answered (open loop); with --max-concurrency alone, as
many as that are always under way (closed loop); a trace brings times of its own.
"""


def add_parser(modes: SubParsers) -> None:
    summary = "load a server that is running, and measure how it answers"
    parser = add_command(modes, "serve", summary, _USAGE, _EXAMPLE)
    _add_server_flags(parser.add_argument_group("server"))
    group = parser.add_argument_group("workload")
    add_workload_flags(group)
    _add_answer_flags(group)
    group = parser.add_argument_group("arrivals")
    add_arrival_flags(group)
    group.add_argument("--rates", metavar="R,R,...", help="one run per rate, one after the other")
    _add_result_flags(parser.add_argument_group("results"))
    parser.set_defaults(run=run_serve)


def _add_server_flags(group: Any) -> None:
    group.add_argument("--base-url", default="http://127.0.0.1:8000", metavar="URL", help="(default: %(default)s)")
    group.add_argument("--model", metavar="NAME", help="what the server calls it (default: its first)")
    group.add_argument(
        "--endpoint",
        choices=("completions", "chat"),
        default="completions",
        help="completions sends token ids, where the server tells some: prompts are exactly as long as wanted; chat "
        "sends words (default: %(default)s)",
    )
    group.add_argument(
        "--api-key", metavar="KEY", help="default: the variable STAGELINE_API_KEY, or else OPENAI_API_KEY"
    )
    group.add_argument("--ca-file", metavar="FILE", help="certificates to check an https server's against")
    group.add_argument(
        "--timeout-s", type=float, metavar="SECONDS", help="give a request up when nothing comes for this long"
    )


def _add_answer_flags(group: Any) -> None:
    group.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0 is greedy (default: %(default)s)")
    group.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="answers are as long as planned; an extension that OpenAI's own server refuses (default: on)",
    )
    group.add_argument(
        "--num-warmup", type=int, default=1, metavar="N", help="requests that are not measured (default: %(default)s)"
    )


def _add_result_flags(group: Any) -> None:
    group.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="count answers that are fast enough, such as ttft:500 tpot:50 e2e:10000",
    )
    group.add_argument("--output", "--json", dest="output", metavar="FILE", help="write the result as JSON")
    group.add_argument("--plot", metavar="FILE", help="draw latency over throughput as PNG, a point per rate")


def run_serve(args: argparse.Namespace) -> int:
    """Returns: the exit status, 1 if no request was answered or a file could not be written."""
    rates, objective = _checked(args)
    plan = planned_requests(args)
    with asyncio.Runner() as runner:
        reports, is_interrupted = runner.run(_measure(args, plan, rates, objective))
    for report in reports if len(reports) == 1 else ():
        print(format_report(report))
    if len(reports) > 1:
        print(format_rates(reports))
    is_written = _write(args, reports)
    if is_interrupted:
        return EXIT_INTERRUPTED
    return 0 if is_written and all(report.answered for report in reports) else EXIT_FAILED


def _checked(args: argparse.Namespace) -> tuple[list[float | None], Objective | None]:
    """The rates to measure at, and what is good. Raises: ConfigError for whatever can be refused before the start."""
    check_workload(args)
    if args.num_warmup < 0:
        raise ConfigError(f"--num-warmup is {args.num_warmup}; it must be at least 0")
    if args.timeout_s is not None and not args.timeout_s > 0:
        raise ConfigError(f"--timeout-s is {args.timeout_s}; it must be above 0")
    if urllib.parse.urlsplit(args.base_url).scheme not in ("http", "https"):
        raise ConfigError(f"--base-url is {args.base_url!r}; it must begin with http:// or https://")
    check_can_write("--output", args.output)
    check_can_write("--plot", args.plot)
    if args.plot is not None:
        check_can_plot()
    return _rates(args), Objective.parse(args.goodput)


def _rates(args: argparse.Namespace) -> list[float | None]:
    if args.rates is None:
        return [None if args.request_rate is None or math.isinf(args.request_rate) else args.request_rate]
    if args.request_rate is not None:
        raise ConfigError("--rates and --request-rate are both given; give one")
    try:
        rates = [float(part) for part in args.rates.split(",")]
    except ValueError:
        rates = []
    if not rates or not all(0 < rate < math.inf for rate in rates):
        raise ConfigError(f"--rates is {args.rates!r}; give requests per second, such as 1,2,4")
    return list(rates)


async def _measure(
    args: argparse.Namespace, plan: list[PlannedRequest], rates: list[float | None], objective: Objective | None
) -> tuple[list[Report], bool]:
    """One report per rate, and whether the last one was interrupted."""
    # Its HTTP client takes long to import, and no other command needs it.
    from stageline.loadgen.client import LoadClient, Target

    extra: dict[str, Any] = {"temperature": args.temperature}
    if args.ignore_eos:
        extra["ignore_eos"] = True
    api_key = args.api_key or environment.client_api_key()
    target = Target(args.base_url, args.model or "", args.endpoint, api_key, extra, args.timeout_s, args.ca_file)
    async with LoadClient(target) as client:
        name, max_model_len = await client.model(args.model)
        client.target = dataclasses.replace(target, model=name)
        fitting, num_cut = (plan, 0) if max_model_len is None else workload.fitted(plan, max_model_len)
        maker = await _prompt_maker(client, args)
        if args.num_warmup:
            await LoadRun(client, _prepared(client, maker, fitting[: args.num_warmup], at_once=True), 1).run()
        reports = []
        for index, rate in enumerate(rates):
            # Each run has prompts of its own: the prefix cache must not know them from the run before.
            its_maker = PromptMaker(maker.pool, maker.tokens_per_item, args.seed + index + 1)
            its_plan = fitting
            if rate is not None:
                generator = random.Random(args.seed + index)
                its_plan = workload.arriving(fitting, workload.arrival_times(rate, args.burstiness, generator))
            prepared = _prepared(client, its_maker, its_plan, at_once=rate is None and args.request_rate is not None)
            result, is_interrupted = await _run(client, prepared, args.max_concurrency, rate)
            reports.append(Report(result, objective, rate, args.max_concurrency, num_cut))
            if is_interrupted:
                return reports, True
    return reports, False


async def _prompt_maker(client: LoadClient, args: argparse.Namespace) -> PromptMaker:
    token_ids = await client.word_tokens()
    if token_ids is None:
        return PromptMaker(words(), 1.0, args.seed)
    if args.endpoint == "completions":
        return PromptMaker(sorted(set(token_ids)), 1.0, args.seed)
    return PromptMaker(words(), len(token_ids) / len(words()), args.seed)


def _prepared(
    client: LoadClient, maker: PromptMaker, plan: list[PlannedRequest], *, at_once: bool
) -> list[PreparedRequest]:
    return [
        PreparedRequest(
            client.target.body(maker.prompt(request), request.num_output_tokens), None if at_once else request.at_s
        )
        for request in plan
    ]


async def _run(
    client: LoadClient, requests: list[PreparedRequest], max_concurrency: int | None, rate: float | None
) -> tuple[RunResult, bool]:
    """One run; Ctrl-C ends it with what there is."""
    loop = asyncio.get_running_loop()
    is_interrupted = False
    heading = "requests" if rate is None else f"{rate:g} requests/s"
    with tqdm(total=len(requests), desc=heading, disable=None, leave=False) as bar:
        run = LoadRun(client, requests, max_concurrency, on_done=bar.update)

        def interrupt() -> None:
            nonlocal is_interrupted
            is_interrupted = True
            run.stop()

        before = signal.getsignal(signal.SIGINT)
        loop.add_signal_handler(signal.SIGINT, interrupt)
        try:
            result = await run.run()
            return result, is_interrupted
        finally:
            loop.remove_signal_handler(signal.SIGINT)
            # The loop leaves Python's own, also where an interrupt was ignored before.
            signal.signal(signal.SIGINT, before)


def _write(args: argparse.Namespace, reports: list[Report]) -> bool:
    runs = [report.as_json() for report in reports]
    asked = {name: value for name, value in vars(args).items() if name not in ("run", "api_key")}
    result = {"mode": "serve", "config": asked} | (runs[0] if len(runs) == 1 else {"runs": runs})
    is_written = True
    if args.output:
        text = msgspec.json.format(msgspec.json.encode(result)) + b"\n"
        is_written = written("--output", args.output, lambda: Path(args.output).write_bytes(text))
    if args.plot:
        title = f"{args.dataset_name}, {args.base_url}"
        is_written &= written("--plot", args.plot, lambda: write_plot(args.plot, reports, title))
    for flag, path in (("result", args.output), ("plot", args.plot)):
        if path and is_written:
            print(f"{flag}: {path}", file=sys.stderr)
    return is_written
