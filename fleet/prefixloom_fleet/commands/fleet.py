"""``prefixloom fleet``: several replicas of a server. It has sub-commands, each a module of this room.

A sub-command is a module with ``add_arguments(parser)`` and ``run(args) -> int``. It is imported only when it is the
one that runs, so that what one of them needs is no matter to the others.
"""

from __future__ import annotations

import argparse
import importlib
from typing import Any

SUBCOMMANDS = {
    "deploy": "start a fleet on Ray Serve, or change a running one, as its file says",
    "status": "the replicas of a running fleet, their load, and whether their events are followed",
    "update": "replace all replicas of a running fleet, a few at a time, such as for new weights",
    "stop": "end a running fleet: what runs is answered first",
    "simulate": "a trace through several replicas on paper: what a routing policy computes, and how long requests wait",
}


class LaterParser(argparse.ArgumentParser):
    """A parser of a sub-command that gets its arguments when it is used. ``module`` is set before that."""

    module = ""

    def parse_known_args(self, *arguments: Any, **options: Any) -> Any:
        if self.module:
            subcommand = importlib.import_module(self.module)
            self.module = ""
            subcommand.add_arguments(self)
            self.set_defaults(subcommand=subcommand)
        return super().parse_known_args(*arguments, **options)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(
        title="sub-commands", metavar="SUBCOMMAND", dest="fleet", required=True, parser_class=LaterParser
    )
    for name, summary in SUBCOMMANDS.items():
        each = kinds.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        each.module = f"{__package__}.{name}"


def run(args: argparse.Namespace) -> int:
    """Run the sub-command."""
    code: int = args.subcommand.run(args)
    return code
