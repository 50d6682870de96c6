"""The console script `everstep`: finds the command, runs it, turns its errors into a sentence and an exit code."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from everstep import __version__
from everstep.cli.client import EXIT_CODES, REFUSED
from everstep.errors import EverstepError

COMMANDS = {
    "demo": "everstep.cli.demo",
    "up": "everstep.cli.up",
    "agent": "everstep.cli.agent",
    "job": "everstep.cli.jobs",
    "incident": "everstep.cli.incidents",
    "drill": "everstep.cli.drills",
    "node": "everstep.cli.nodes",
    "checkpoint": "everstep.cli.checkpoints",
}
"""Each module offers `add_parser(subparsers)`, which sets `run`: called with the arguments, it returns an exit code."""

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    args = build_parser(words).parse_args(words)
    try:
        code: int = args.run(args)
        sys.stdout.flush()
    except EverstepError as err:
        print(f"everstep: {err}", file=sys.stderr)
        return getattr(err, "exit_code", REFUSED)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (`| head`) has seen enough; what Python flushes at exit must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return REFUSED
    return code


def build_parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """The parser with the command that `words` begin with, or with all commands, where that is not clear."""
    parser = argparse.ArgumentParser(
        prog="everstep",
        description="Training that never loses its place.",
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"everstep {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    named = words[0] if words else ""
    for module in [COMMANDS[named]] if named in COMMANDS else COMMANDS.values():
        importlib.import_module(module).add_parser(subparsers)
    return parser


if __name__ == "__main__":
    sys.exit(main())
