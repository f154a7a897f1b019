"""The command line. A subcommand is a module with ``add_arguments(parser)`` and ``run(args) -> int``.

This module knows their names and one line about each; a subcommand's module is imported only when it runs, so that none
pays for, or breaks, another.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Sequence
from typing import Any

from ..errors import PrefixloomError

COMMANDS = {
    "components": "what is installed, from which distribution, and what is broken",
    "demo": "synthetic conversations through a composed cache",
}
ERROR = 2
INTERRUPTED = 130
BROKEN_PIPE = 141


class _Version(argparse.Action):
    """Looks the version up only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        try:
            version = importlib.metadata.version("prefixloom")
        except importlib.metadata.PackageNotFoundError:
            version = "(not installed, run from its source)"
        print(f"prefixloom {version}")
        parser.exit()


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand. 0: fine; 1: the subcommand found something wrong; 2: it could not run."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    chosen = next((argument for argument in arguments if not argument.startswith("-")), None)
    try:
        parser = _parser(chosen)
        if not arguments:
            parser.print_help(sys.stderr)
            return ERROR
        args = parser.parse_args(arguments)
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except PrefixloomError as error:
        print(f"prefixloom: {' '.join(str(error).split())}", file=sys.stderr)
        return ERROR
    except KeyboardInterrupt:
        print("prefixloom: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has gone. Point stdout to nothing, or the interpreter's own flush at exit complains.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE


def _parser(chosen: str | None) -> argparse.ArgumentParser:
    """The whole parser, with the arguments of the chosen subcommand only."""
    parser = argparse.ArgumentParser(prog="prefixloom", description="The prefix cache for hybrid language models.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        if name == chosen:
            module = importlib.import_module(f"{__name__}.{name}")
            module.add_arguments(subparser)
            subparser.set_defaults(run=module.run)
    return parser
