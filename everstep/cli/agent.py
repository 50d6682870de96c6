"""`everstep agent`: becomes the node agent. All its options are those of `python -m agents`."""

from __future__ import annotations

import argparse
import os
import sys


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "agent",
        help="run the node agent on this machine",
        description=__doc__,
        # Options are the agent's own, --help included: with a prefix that nobody types, all words are positional here.
        prefix_chars="\x00",
        add_help=False,
    )
    parser.add_argument("arguments", nargs="*")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Replace this process by the agent; it never returns."""
    os.execv(sys.executable, [sys.executable, "-m", "agents", *args.arguments])  # noqa: S606
