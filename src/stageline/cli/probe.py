"""`stageline probe`: how good the network between two machines is, for activations of a pipeline."""

from __future__ import annotations

import argparse
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from stageline.cli.opening import SubParsers, add_command
from stageline.cluster.addresses import candidate_pairs, own_addresses, wanted_interfaces
from stageline.cluster.probe import NoWay, Way, measure
from stageline.cluster.probe_listener import ProbeListener
from stageline.errors import ConfigError
from stageline.links.key_file import FLAG, given_security
from stageline.links.tcp_address import TcpAddress, host_and_port

DEFAULT_PROBE_PORT = 29600
_USAGE = "stageline probe HOST... [--port PORT] [--json] | stageline probe --listen ADDRESS[:PORT]"
_EXAMPLE = """examples:
  stageline probe --listen 10.0.0.2 --cluster-key-file cluster.key     # on one machine, until Ctrl-C
  stageline probe 10.0.0.2 --cluster-key-file cluster.key              # on the other

Measured as links work: with their encryption if there is a key. A host that has several names or addresses is measured
on each. Exit status: 0 every host was reached, 1 one was not, 2 the command line or the configuration is at fault.
"""
_EXIT_UNREACHED = 1


class Report(msgspec.Struct):
    """What `--json` prints: a list with one of these per way. Without `error`, every number is there."""

    host: str
    address: str
    source: str | None = None
    round_trip_s: float | None = None
    bytes_per_s: float | None = None
    step_s: float | None = None
    error: str | None = None


@dataclass(frozen=True)
class _Target:
    host: str
    source: str | None
    address: TcpAddress


def add_parser(commands: SubParsers) -> None:
    parser = add_command(commands, "probe", "measure the network between machines", _USAGE, _EXAMPLE)
    parser.add_argument("hosts", nargs="*", metavar="HOST", help="a machine that listens, by address or name")
    parser.add_argument("--listen", metavar="ADDRESS[:PORT]", help="answer probes at an address of this machine")
    parser.add_argument(
        "--port", type=int, default=DEFAULT_PROBE_PORT, metavar="PORT",
        help=f"the hosts' port (default: {DEFAULT_PROBE_PORT})",
    )  # fmt: skip
    parser.add_argument(
        "--interface", metavar="NAMES", help="interfaces to leave from, such as eth0 or ^docker; each is measured "
        "(default: STAGELINE_INTERFACE or NCCL_SOCKET_IFNAME, or else as the system chooses)",
    )  # fmt: skip
    parser.add_argument(
        FLAG, metavar="FILE", help="the machines' key (default: the variable STAGELINE_CLUSTER_KEY or "
        "STAGELINE_CLUSTER_KEY_FILE)",
    )  # fmt: skip
    parser.add_argument("--insecure", action="store_true", help="without a key, measure unencrypted")
    parser.add_argument("--json", action="store_true", help="print a list of objects, in seconds and bytes")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if bool(args.hosts) == (args.listen is not None):
        raise ConfigError("give hosts to measure, or --listen ADDRESS on the other machine, one of them")
    security = given_security(args.cluster_key_file, args.insecure)
    if args.listen is not None:
        listener = ProbeListener([_listening_address(args.listen)], security)
        try:
            print(f"answering probes at {listener.addresses[0]} until Ctrl-C", file=sys.stderr, flush=True)
            # A signal whose handler raises ends this; SIGTERM ends the process without one.
            signal.pause()
        finally:
            listener.close()
        return 0
    targets = [target for host in args.hosts for target in _targets_of(host, args.port, args.interface)]
    found = measure([(target.source, target.address) for target in targets], security)
    _print(targets, found, args.json)
    reached = {target.host for target, way in zip(targets, found, strict=True) if isinstance(way, Way)}
    return 0 if reached.issuperset(args.hosts) else _EXIT_UNREACHED


def _listening_address(text: str) -> TcpAddress:
    host, port = host_and_port(text)
    return TcpAddress.parse(str(TcpAddress(host, DEFAULT_PROBE_PORT)) if port is None else text)


def _targets_of(host: str, port: int, interface: str | None) -> list[_Target]:
    try:
        entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError, OverflowError) as error:
        raise ConfigError(
            f"{host}, port {port}: neither an address nor a name that this machine knows "
            f"({getattr(error, 'strerror', None) or error})"
        ) from None
    addresses = [TcpAddress(host, port) for host in dict.fromkeys(str(entry[4][0]) for entry in entries)]
    if wanted_interfaces(interface) is None:
        return [_Target(host, None, address) for address in addresses]
    pairs = candidate_pairs(own_addresses(interface), addresses)
    if not pairs:
        raise ConfigError(f"{host} has only addresses of another kind (IPv4, IPv6) than the chosen interfaces")
    return [_Target(host, pair.source, pair.destination) for pair in pairs]


def _print(targets: Sequence[_Target], found: Sequence[Way | NoWay], is_json: bool) -> None:
    reports = [_report(target, way) for target, way in zip(targets, found, strict=True)]
    if is_json:
        print(msgspec.json.format(msgspec.json.encode(reports)).decode())
        return
    for report, way in zip(reports, found, strict=True):
        step = f"; 64 tokens of hidden size 4096 take {report.step_s * 1000:.3g} ms" if report.step_s else ""
        print(f"{report.host}  {way}{step}")


def _report(target: _Target, way: Way | NoWay) -> Report:
    report = Report(target.host, str(target.address), target.source)
    if isinstance(way, NoWay):
        report.error = way.reason
    else:
        report.round_trip_s, report.bytes_per_s, report.step_s = way.round_trip_s, way.bytes_per_s, way.step_s()
    return report
