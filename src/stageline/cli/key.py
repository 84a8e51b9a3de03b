"""`stageline key`: the secret that the machines of one pipeline share."""

from __future__ import annotations

import argparse
import sys

from stageline.cli.opening import SubParsers, add_command
from stageline.links.key_file import write_new_key
from stageline.links.keys import ClusterKey

_USAGE = "stageline key new [--out FILE]"
_EXAMPLE = """example:
  stageline key new --out cluster.key     # on one machine; then copy the file to the others
  stageline serve MODEL ... --cluster-key-file cluster.key

Who has the key can join the pipeline and read everything in it. Without --out it is written to standard output.
"""


def add_parser(commands: SubParsers) -> None:
    parser = add_command(commands, "key", "make the key that the machines of a pipeline share", _USAGE, _EXAMPLE)
    # Named, or the usage line of each action would begin with the whole usage of this command.
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True, prog="stageline key")
    new = actions.add_parser(
        "new", help="make a new key", description="Make a new cluster key.", allow_abbrev=False
    )
    new.add_argument("--out", metavar="FILE", help="write it to a new file that only its owner can read")
    new.set_defaults(run=run_new)


def run_new(args: argparse.Namespace) -> int:
    if args.out is None:
        print(ClusterKey.new().text())
        return 0
    key = write_new_key(args.out)
    print(f"{args.out}: a new cluster key, fingerprint {key.fingerprint}", file=sys.stderr)
    return 0
