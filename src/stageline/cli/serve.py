"""`stageline serve`: a server that speaks OpenAI's HTTP API."""

from __future__ import annotations

import argparse

from stageline.cli.opening import SubParsers, add_command
from stageline.config.flags import (
    add_cluster_flags,
    add_engine_flags,
    add_serve_flags,
    cluster_config_from_args,
    engine_config_from_args,
    serve_config_from_args,
)

_USAGE = "stageline serve MODEL [-pp STAGES] [--host ADDRESS] [--port PORT] [options]"
_EXAMPLE = """example:
  stageline serve ./SmolLM2-135M-Instruct -pp 2
  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
      -d '{"model": "./SmolLM2-135M-Instruct", "messages": [{"role": "user", "content": "Hello!"}]}'

several machines, the head first or last:
  stageline serve MODEL -pp 2 --nnodes 2 --node-rank 0 --master-addr 10.0.0.1 --cluster-key-file cluster.key
  stageline serve MODEL -pp 2 --nnodes 2 --node-rank 1 --master-addr 10.0.0.1 --cluster-key-file cluster.key --headless
or, instead of the second line, what the head prints:
  stageline join 10.0.0.1:29500 --cluster-key-file cluster.key

SIGTERM, SIGINT (Ctrl-C) and SIGHUP let running requests finish; a second SIGTERM or SIGINT stops at once.
Exit status: 0 stopped as told, 1 something broke, 2 the command line, the configuration or the model is at fault.
"""


def add_parser(commands: SubParsers) -> None:
    parser = add_command(commands, "serve", "serve OpenAI's HTTP API", _USAGE, _EXAMPLE)
    add_engine_flags(parser)
    add_cluster_flags(parser)
    add_serve_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    engine, config = engine_config_from_args(args), serve_config_from_args(args)
    if args.headless:
        from stageline.cluster.ray_fleet import refuse_headless

        # Before --master-addr is asked for, which would not help.
        refuse_headless(engine)
    cluster = cluster_config_from_args(args)
    if cluster.headless:
        from stageline.cluster.headless import run_headless
        from stageline.cluster.start import check_replicas

        check_replicas(config.data_parallel_size, cluster)
        run_headless(engine, cluster, is_insecure=config.insecure)
        return 0
    from stageline.server.start import serve

    serve(engine, config, cluster)
    return 0
