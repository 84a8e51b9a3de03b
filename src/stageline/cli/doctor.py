"""`stageline doctor`: whether `stageline serve` with the same flags would work, and what to do where it would not."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import signal
import sys
from typing import TYPE_CHECKING, Any

import msgspec

from stageline.cli.opening import SubParsers, add_command
from stageline.config.cluster_config import ClusterConfig
from stageline.config.engine_config import EngineConfig
from stageline.config.flags import add_cluster_flags, add_engine_flags, add_serve_flags
from stageline.config.serve_config import ServeConfig
from stageline.errors import ConfigError

if TYPE_CHECKING:
    from stageline.doctor.finding import Finding
    from stageline.doctor.patient import Asked

_USAGE = "stageline doctor [MODEL] [--peers HOST...] [flags of serve] | stageline doctor --listen ADDRESS[:PORT]"
_EXAMPLE = """examples:
  stageline doctor MODEL -pp 2                                         # would it start here?
  stageline doctor MODEL -pp 2 --first-request                         # start it, and wait for one token

before several machines are started:
  stageline doctor --listen 10.0.0.2 --cluster-key-file cluster.key    # on each of the others, until Ctrl-C
  stageline doctor MODEL -pp 2 --nnodes 2 --master-addr 10.0.0.1 --cluster-key-file cluster.key --peers 10.0.0.2

It takes the flags of `stageline serve`, and starts nothing without --first-request. One line for each check: ok, warn
(it will work, and not well), FAIL (it will not), with the way out.
Exit status: 0 nothing fails, 1 something does, 2 the command line cannot be read.
"""
_EXIT_FAILING = 1
_FIRST_REQUEST_S, _LONGEST_FIRST_REQUEST_S = 300.0, 86400.0


def add_parser(commands: SubParsers) -> None:
    parser = add_command(commands, "doctor", "find out what would keep a server from working", _USAGE, _EXAMPLE)
    parser.add_argument(
        "--peers", nargs="+", default=[], metavar="HOST[:PORT]", help="other machines, where `stageline doctor "
        "--listen` runs (port: that of their links, --port-range)",
    )  # fmt: skip
    parser.add_argument(
        "--listen", metavar="ADDRESS[:PORT]", help="answer another machine's doctor at an address of this one "
        "(port: where activations would arrive)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print a list of objects")
    parser.add_argument(
        "--first-request", action="store_true", help="start the stages here, and let one request through them"
    )
    parser.add_argument(
        "--first-request-s", type=float, default=_FIRST_REQUEST_S, metavar="SECONDS",
        help=f"how long that may take (default: {_FIRST_REQUEST_S:g})",
    )  # fmt: skip
    add_engine_flags(parser, is_model_optional=True)
    add_cluster_flags(parser)
    add_serve_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from stageline.doctor.checkup import CheckUp
    from stageline.doctor.finding import is_healthy
    from stageline.doctor.peers import parse_peers

    if not 0 < args.first_request_s <= _LONGEST_FIRST_REQUEST_S:
        most = f"{_LONGEST_FIRST_REQUEST_S:.0f} seconds"
        raise ConfigError(f"--first-request-s is {args.first_request_s:g}; it must be above 0 and at most {most}")
    asked = _asked(args)
    # What a start would log on the way is what the findings say.
    logging.getLogger("stageline").setLevel(logging.ERROR)
    if args.listen is not None:
        return _listen(args.listen, asked)
    checkup = CheckUp(asked, lambda finding: None if args.json else _print(finding))
    checkup.run(parse_peers(args.peers))
    if args.first_request:
        finding = _first_request(asked, args.first_request_s)
        checkup.findings.append(finding)
        if not args.json:
            _print(finding)
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(checkup.findings)).decode())
    return 0 if is_healthy(checkup.findings) else _EXIT_FAILING


def _print(finding: Finding) -> None:
    print(finding.line(is_coloured=sys.stdout.isatty()), flush=True)


def _first_request(asked: Asked, limit_s: float) -> Finding:
    from stageline.doctor.finding import skipped
    from stageline.doctor.first_request import check_first_request

    if not asked.has_model or asked.cluster.is_spread:
        return skipped("first request", "it takes a MODEL, and stages on this machine alone; --peers looks at the ring "
                                        "of several machines")  # fmt: skip
    return check_first_request(asked.engine, limit_s)


def _asked(args: argparse.Namespace) -> Asked:
    from stageline.doctor.patient import Asked

    given = vars(args)

    def made(kind: type[Any]) -> Any:
        values = {field.name: given[field.name] for field in dataclasses.fields(kind) if field.name in given}
        return kind(**values)

    has_model = args.model is not None
    args.model = args.model or ""
    return Asked(made(EngineConfig), made(ClusterConfig), made(ServeConfig), has_model)


def _listen(text: str, asked: Asked) -> int:
    from stageline.cluster.ports import HeldPort, resolve
    from stageline.doctor.devices import ask_devices
    from stageline.doctor.peer import Peer
    from stageline.links.key_file import given_security
    from stageline.links.tcp_address import TcpAddress, host_and_port, is_port

    host, port = host_and_port(text)
    if port is not None and not is_port(port):
        raise ConfigError(f"--listen {text}: {port!r} is no port; give ADDRESS or ADDRESS:PORT")
    address = resolve(host, "--listen")
    security = given_security(asked.cluster.cluster_key_file, asked.serve.insecure)
    devices: Any
    try:
        devices = ask_devices(asked.engine.device)
    except ConfigError as error:
        devices = str(error)
    held = HeldPort(address, asked.cluster.ports) if port is None else None
    try:
        peer = Peer(held.address if held else TcpAddress(address, int(port or 0)), asked, security, devices)
        try:
            print(f"answering another machine's doctor at {peer.address} until Ctrl-C", file=sys.stderr, flush=True)
            signal.pause()
        finally:
            peer.close()
    finally:
        if held is not None:
            held.close()
    return 0
