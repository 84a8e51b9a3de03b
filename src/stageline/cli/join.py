"""`stageline join`: bring this machine's stages to a head that was started with `stageline serve --master-addr`."""

from __future__ import annotations

import argparse

from stageline.cli.opening import SubParsers, add_command
from stageline.config.cluster_config import DEFAULT_CLUSTER_PORT, HIGHEST_PORT
from stageline.config.flags import add_cluster_flags, cluster_config_from_args
from stageline.errors import ConfigError
from stageline.links.tcp_address import host_and_port, is_port

_USAGE = "stageline join HEAD[:PORT] [--cluster-key-file FILE] [options]"
_EXAMPLE = """example:
  stageline join 10.0.0.1:29500 --cluster-key-file cluster.key

The head prints this line. It waits for the head, starts the stages it is given, ends them when the head is gone, and
waits for it again. Exit status: 0 stopped as told, 2 this machine cannot take part, and one line says why.
"""

_FLAGS = ("stages", "node_address", "interface", "port_range", "cluster_key_file", "model_source", "join_timeout_s")


def add_parser(commands: SubParsers) -> None:
    parser = add_command(commands, "join", "bring this machine's stages to a head", _USAGE, _EXAMPLE)
    parser.add_argument("head", metavar="HEAD[:PORT]", help=f"the head's address (port: {DEFAULT_CLUSTER_PORT})")
    parser.add_argument("--model", metavar="MODEL", help="where the model is here (default: where the head has it)")
    parser.add_argument(
        "--node-rank", type=int, metavar="RANK", help="this machine's place in the pipeline (default: the next free)"
    )
    parser.add_argument("--insecure", action="store_true", help="talk to the head without a key, in the clear")
    parser.add_argument(
        "--bind-cores", action=argparse.BooleanOptionalAction, default=True,
        help="bind each stage's process to its own CPU cores when there are enough",
    )  # fmt: skip
    add_cluster_flags(parser, _FLAGS)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from stageline.cluster.node import NodeSettings, run_node
    from stageline.cluster.start import link_access

    host, port = _split(args.head)
    if args.node_rank is not None and args.node_rank < 1:
        raise ConfigError(f"--node-rank is {args.node_rank}; 0 is the head itself: give 1 or more, or leave it out")
    given = argparse.Namespace(**vars(args))
    del given.node_rank
    given.master_addr, given.master_port = host, port
    cluster = cluster_config_from_args(given)
    run_node(
        NodeSettings(
            head=host,
            port=port,
            ports=cluster.ports,
            access=link_access(cluster, args.insecure),
            join_timeout_s=cluster.join_timeout_s,
            model=args.model,
            model_source=cluster.model_source,
            rank=args.node_rank,
            num_stages=cluster.stages,
            address=cluster.node_address,
            interface=cluster.interface,
            settings={},
            binds_cores=args.bind_cores,
        )
    )
    return 0


def _split(head: str) -> tuple[str, int]:
    """Host and port of `10.0.0.1`, `10.0.0.1:29500`, `head.local:29500` or `[fe80::1]:29500`. Raises: ConfigError."""
    host, port = host_and_port(head)
    port = str(DEFAULT_CLUSTER_PORT) if port is None else port
    if not host or not is_port(port) or not 0 < int(port) < HIGHEST_PORT:
        raise ConfigError(f"{head!r} is no HEAD:PORT; give the head's address and port, such as 10.0.0.1:29500")
    return host, int(port)
