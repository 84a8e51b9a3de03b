"""`stageline plan`: what a model would do on given machines, and which layout to choose, before anything is rented."""

from __future__ import annotations

import argparse
from functools import partial

from stageline.cli.opening import SubParsers, add_command
from stageline.cli.workload_flags import add_simulation_flags
from stageline.config.flags import add_plan_flags

_USAGE = "stageline plan MODEL --cluster FILE [options] | stageline plan (--table [PRESET] | --list)"
_EXAMPLE = """examples:
  stageline plan llama-3.1-70b --cluster cluster.yaml --concurrency 64
  stageline plan llama-3.1-70b --cluster cluster.yaml --objective tpot --yaml plan.yaml --pareto plan.png
  stageline plan --table

cluster.yaml:
  nodes:
    - {device: h100-sxm, devices_per_node: 8, count: 2, link: nvlink4}
  network: infiniband-ndr

docs/cost_model.md says how all this is computed, what is assumed, and how far off it was.
"""
_DEFAULT_TOP = 10


def add_parser(commands: SubParsers) -> None:
    summary = "predict memory, speed and the best layout on given machines"
    parser = add_command(commands, "plan", summary, _USAGE, _EXAMPLE)
    parser.add_argument(
        "model", metavar="MODEL", nargs="?",
        help="a name of --list, a directory with config.json (no weights needed), or a GGUF file",
    )  # fmt: skip
    parser.add_argument("--cluster", metavar="FILE", help="YAML or TOML: nodes, their devices and links")
    parser.add_argument(
        "--table",
        nargs="?",
        const="two-tensor-hop",
        metavar="PRESET",
        help="print a table of decode layouts from stated assumptions: two-tensor-hop (default) or one-tensor-hop",
    )
    parser.add_argument("--list", action="store_true", help="print known models, devices and links, with their sources")
    parser.add_argument("--top", type=int, default=_DEFAULT_TOP, metavar="N", help="layouts to show (default: 10)")
    parser.add_argument("--yaml", metavar="FILE", help="write the best layout with every node's command")
    parser.add_argument(
        "--pareto", metavar="FILE", help="draw TPOT and throughput of layouts, from one request on (needs matplotlib)"
    )
    parser.add_argument(
        "--calibrate", action="store_true", help="measure this host in less than a minute with layers like MODEL's, "
        "a small one's without it, and keep what was found for --simulate"
    )
    add_plan_flags(parser)
    add_simulation_flags(parser)
    parser.set_defaults(run=partial(run, parser))


def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    # Imported here: `--help` and a mistyped flag answer at once.
    from stageline.cli import plan_layouts
    from stageline.cli.plan_flags import check_all_used

    check_all_used(args, parser)
    if args.calibrate:
        from stageline.cli import plan_calibrate

        status = plan_calibrate.run_calibration(args)
        if status or not args.simulate:
            return status
    if args.simulate:
        from stageline.cli import plan_simulate

        return plan_simulate.run_simulation(args)
    if args.list:
        return plan_layouts.print_known()
    if args.table is not None:
        return plan_layouts.print_table(args.table)
    return plan_layouts.run(args)
