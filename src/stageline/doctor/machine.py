"""Checks of this machine alone: flags, software, room on disks, names, ports, the key."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import socket
import sys
import tempfile
import time
from pathlib import Path

import zmq

from stageline.cluster.handshake import HandshakeError, this_software
from stageline.cluster.messages import Here
from stageline.cluster.ports import HeldPort, own_address_towards, resolve
from stageline.cluster.reach import Reach
from stageline.cluster.start import check_head, link_access
from stageline.config import environment
from stageline.doctor.finding import Finding, failed, finding_of, ok, warning
from stageline.doctor.patient import Asked
from stageline.engine.startup_table import format_bytes
from stageline.errors import ConfigError
from stageline.links.frames import encode_message
from stageline.links.ipc_folder import IpcFolder
from stageline.links.key_file import given_security
from stageline.links.keys import LinkSecurity
from stageline.links.sockets import Links
from stageline.links.tcp_address import TcpAddress
from stageline.server.listening_socket import bind
from stageline.server.preflight import check_open_files, make_ssl_context, with_all_api_keys

_LEAST_FREE_BYTES = 2**30
_REACH_S = 3.5
"""A little more than a connection is tried for."""


def check_machine(asked: Asked) -> list[Finding]:
    """What can be known without the model and without other machines."""
    return [
        finding_of("flags", lambda: _look_at_flags(asked)),
        finding_of("software", _look_at_software),
        _disk(),
        finding_of("sockets", _look_at_sockets),
        finding_of("open files", lambda: _look_at_open_files(asked)),
        *([finding_of("API port", lambda: _look_at_api(asked))] if asked.is_head else []),
    ]


def _look_at_flags(asked: Asked) -> str:
    if asked.has_model:
        asked.engine.check()
    asked.cluster.check()
    asked.serve.check()
    return "they fit one another"


def _look_at_software() -> str:
    software = this_software()
    python = platform.python_version()
    wanted = str(importlib.metadata.metadata("stageline")["Requires-Python"] or "")
    least = tuple(int(part) for part in wanted.removeprefix(">=").split(".") if part.isdecimal())
    if sys.version_info[: len(least)] < least:
        raise ConfigError(f"Python is {python}, and stageline needs {wanted}; make its environment anew with that")
    if (pinned := _pinned_torch()) is not None and pinned != software.torch:
        raise ConfigError(
            f"torch is {software.torch}, and stageline {software.stageline} is made for {pinned}; type: "
            f"pip install torch=={pinned}"
        )
    if not zmq.has("curve"):
        raise ConfigError(
            "this machine's ZeroMQ cannot encrypt (CURVE is missing); install pyzmq from its wheel: "
            "pip install --force-reinstall --only-binary pyzmq pyzmq"
        )
    return f"stageline {software.stageline}, protocol {software.protocol}, torch {software.torch}, Python {python}"


def _pinned_torch() -> str | None:
    requirements = importlib.metadata.requires("stageline") or []
    pins = [text.partition("==")[2] for text in requirements if text.startswith("torch==")]
    return pins[0].partition(";")[0].strip() if pins else None


def _disk() -> Finding:
    """Room for temporary files, and for what is kept: compiled kernels, profiles, models."""
    short = []
    shown = []
    for name, path in (("TMPDIR", Path(tempfile.gettempdir())), ("XDG_CACHE_HOME", environment.cache_directory())):
        place = existing(path)
        free_bytes = free_disk_bytes(path)
        shown.append(f"{format_bytes(free_bytes)} free in {place}")
        if not os.access(place, os.W_OK):
            return failed("disk", f"{place} cannot be written; set {name} to a folder that can be")
        if free_bytes < _LEAST_FREE_BYTES:
            short.append(f"{shown[-1]}: make room, or set {name} to another disk")
    return warning("disk", "; ".join(short)) if short else ok("disk", ", ".join(shown))


def existing(path: Path) -> Path:
    """The path, or the nearest folder above it that is there."""
    return next(folder for folder in (path, *path.parents) if folder.exists())


def free_disk_bytes(path: Path) -> int:
    return shutil.disk_usage(existing(path)).free


def _look_at_sockets() -> str:
    folder = IpcFolder("s9999.control")
    try:
        return f"stages of one machine can talk in {Path(folder.path).parent}"
    finally:
        folder.close()


def _look_at_open_files(asked: Asked) -> str:
    check_open_files(asked.engine.pipeline_parallel_size)
    return "enough may be open"


def _look_at_api(asked: Asked) -> str:
    config = with_all_api_keys(asked.serve.check())
    make_ssl_context(config)
    with bind(config) as listening:
        host, port = listening.getsockname()[:2]
    return f"{host} port {port} is free"


# ---- what concerns other machines ----


def check_cluster(asked: Asked) -> tuple[list[Finding], LinkSecurity | None]:
    """Key, names and ports. Returns: how links are protected; None keeps them on loopback addresses."""
    try:
        security = given_security(asked.cluster.cluster_key_file, asked.serve.insecure)
    except ConfigError as error:
        return [failed("key", str(error))], None
    findings = [_key(security), _own_name()]
    if asked.cluster.master_addr is None:
        return findings, security
    if asked.is_head:
        findings += [
            _head_name(asked.cluster.master_addr),
            finding_of("head port", lambda: _look_at_head(asked)),
            finding_of("links port", lambda: _look_at_links_port(asked, _own_host(asked))),
        ]
    else:
        findings += _way_to_head(asked, security)
    return findings, security


def _key(security: LinkSecurity | None) -> Finding:
    if security is None:
        return failed(
            "key", "there is no cluster key, and links to other machines want one: give --cluster-key-file FILE "
            "(`stageline key new --out FILE` makes one, the same file for every machine), or type --insecure",
        )  # fmt: skip
    if security.key is None:
        return warning("key", "--insecure: whoever reaches the ports can join and read everything")
    return ok("key", f"fingerprint {security.key.fingerprint}, which has to be the same on every machine")


def _own_name() -> Finding:
    name = socket.gethostname()
    try:
        address = resolve(name, "the host's name")
    except ConfigError:
        return warning("own name", f"{name} is not known here; give addresses in figures, or add it to /etc/hosts")
    return ok("own name", f"{name} is {address}")


def _head_name(master_addr: str) -> Finding:
    try:
        address = TcpAddress(resolve(master_addr, "--master-addr"), 0)
    except ConfigError as error:
        return failed("head name", str(error))
    if address.is_loopback():
        return warning(
            "head name", f"--master-addr {master_addr} is {address.host}, which no other machine reaches; give the "
            "address that the others know, in figures, or take the name out of /etc/hosts' loopback lines",
        )  # fmt: skip
    return _leads_to(master_addr, address.host)


def _leads_to(master_addr: str, host: str) -> Finding:
    told = f"--master-addr is {host}, in figures" if master_addr == host else f"{master_addr} is {host}"
    return ok("head name", told)


def _look_at_head(asked: Asked) -> str:
    check_head(asked.engine, asked.cluster, link_access(asked.cluster, asked.serve.insecure))
    return f"{asked.cluster.master_addr} port {asked.cluster.master_port} is free"


def _own_host(asked: Asked) -> str:
    """Where this machine gets activations."""
    if asked.cluster.node_address is not None:
        return resolve(asked.cluster.node_address, "--node-address")
    assert asked.cluster.master_addr is not None
    head = resolve(asked.cluster.master_addr, "--master-addr")
    return head if asked.is_head else own_address_towards(TcpAddress(head, asked.cluster.master_port))


def _look_at_links_port(asked: Asked, host: str) -> str:
    held = HeldPort(host, asked.cluster.ports)
    try:
        return f"activations arrive at {held.address}; let {_shown(asked.cluster.ports)} through"
    finally:
        held.close()


def _shown(ports: range) -> str:
    return f"TCP port {ports.start}" if len(ports) == 1 else f"TCP ports from {ports.start} on, one a machine,"


def _way_to_head(asked: Asked, security: LinkSecurity | None) -> list[Finding]:
    """On a node: whether the head answers, and takes this node's key."""
    assert asked.cluster.master_addr is not None
    try:
        head = TcpAddress(resolve(asked.cluster.master_addr, "--master-addr"), asked.cluster.master_port)
    except ConfigError as error:
        return [failed("head name", str(error))]
    ports = finding_of("links port", lambda: _look_at_links_port(asked, _own_host(asked)))
    return [_leads_to(asked.cluster.master_addr, head.host), ports, _reach_head(head, security)]


def _reach_head(head: TcpAddress, security: LinkSecurity | None) -> Finding:
    """A head answers who says that it is there, and is not: `say hello`. Nothing changes for it."""
    links = Links(security)
    try:
        caller = links.caller(head.url)
        caller.send(encode_message(Here(0, time.time())))
        if caller.poll(int(_REACH_S * 1000)):
            return ok("head", f"{head} answers, and takes this key")
        Reach(head, links).look(is_last_look=True)
    except HandshakeError as error:
        return failed("head", error.reason)
    except ConfigError as error:
        return failed("head", str(error))
    finally:
        links.close()
    raise AssertionError("the last look tells what is wrong")
