"""The command line. A subcommand is a module with ``add_arguments(parser)`` and ``run(args) -> int``.

This module knows their names and one line about each; a subcommand's module is imported only when it runs, so that none
pays for, or breaks, another. One that is no module here is found as an entry point of the group
``prefixloom.commands``, and so is any that another distribution adds.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Sequence
from typing import Any

from ..errors import CompositionError, PrefixloomError

COMMANDS = {
    "components": "what is installed, from which distribution, and what is broken",
    "conformance": "hold an installed component, store or policy against every law of the conformance kit",
    "demo": "conversations through the built-in model: what hits, what it saves, and whether all stays the same",
    "new-component": "a distribution with a component of your own, which installs and passes the kit at once",
}
GROUP = "prefixloom.commands"
ERROR = 2
INTERRUPTED = 130
BROKEN_PIPE = 141
CANNOT_WRITE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
"""Of a file that has no name: stdout."""


def version() -> str | None:
    """The installed version; None where only the source is on the path."""
    try:
        return importlib.metadata.version("prefixloom")
    except importlib.metadata.PackageNotFoundError:
        return None


class _Version(argparse.Action):
    """Looks the version up only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(f"prefixloom {version() or '(not installed, run from its source)'}")
        parser.exit()


class _Parser(argparse.ArgumentParser):
    """Refuses what it does not know by itself, so that a subcommand's mistake shows the subcommand's usage."""

    def parse_known_args(self, *arguments: Any, **options: Any) -> Any:
        known, unknown = super().parse_known_args(*arguments, **options)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return known, unknown

    def print_help(self, file: Any = None) -> None:
        """As argparse does, which hides that it cannot write."""
        print(self.format_help(), end="", file=file or sys.stdout)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand. 0: fine; 1: the subcommand found something wrong; 2: it could not run."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    chosen = next((argument for argument in arguments if not argument.startswith("-")), None)
    try:
        parser = _parser(chosen)
        if not arguments:
            parser.print_help(sys.stderr)
            return ERROR
        try:
            args = parser.parse_args(arguments)
        finally:
            sys.stdout.flush()  # of --help, which exits
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
        _close_stdout()
        return BROKEN_PIPE
    except OSError as error:
        if error.errno not in CANNOT_WRITE or error.filename is not None:
            raise
        _close_stdout()
        print(f"prefixloom: cannot write: {error.strerror}", file=sys.stderr)
        return ERROR


def _close_stdout() -> None:
    """Nothing can be written there any more. Point it to nothing, or the interpreter's own flush at exit complains."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser(chosen: str | None) -> argparse.ArgumentParser:
    """The whole parser, with the arguments of the chosen subcommand only."""
    parser = _Parser(prog="prefixloom", description="The prefix cache for hybrid language models.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, summary in {**_installed(), **COMMANDS}.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        if name == chosen:
            module = _module(name)
            module.add_arguments(subparser)
            subparser.set_defaults(run=module.run)
    return parser


def _installed() -> dict[str, str]:
    """The commands of other distributions, which say nothing of themselves before they are imported."""
    found = importlib.metadata.entry_points(group=GROUP)
    return {point.name: f"of distribution {point.dist.name if point.dist else '?'}" for point in found}


def _module(name: str) -> Any:
    own = f"{__name__}.{name.replace('-', '_')}"
    try:
        return importlib.import_module(own)
    except ModuleNotFoundError as error:
        if error.name != own:
            raise
    found = list(importlib.metadata.entry_points(group=GROUP, name=name))
    if not found:
        raise CompositionError(
            f"the command {name!r} is not installed: nothing offers it in the entry-point group {GROUP!r}. Install "
            f"prefixloom itself with pip (`pip install -e .` in a checkout)"
        )
    return found[0].load()
