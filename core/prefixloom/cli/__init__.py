"""The command line. A subcommand is a module with ``add_arguments(parser)`` and ``run(args) -> int``.

This module knows the names of the subcommands and one line about each. It imports a subcommand's module only when the
subcommand runs, so that one subcommand cannot slow down or break another. A subcommand that is not a module of this
package is found as an entry point of the group ``prefixloom.commands``; other distributions can add such entry points.

Read this file first, then ``components``.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import importlib.metadata
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from ..errors import CompositionError, PrefixloomError

COMMANDS = {
    "cache": "administer the cache of a server: statistics, flushing, namespaces, its store",
    "components": "what is installed, from which distribution, and what is broken",
    "conformance": "hold an installed component, store or policy against every law of the conformance kit",
    "demo": "conversations through the built-in model: what hits, what it saves, and whether all stays the same",
    "explain": "why a server would hit what it hits of a prompt, and what would have helped",
    "fleet": "several replicas of a server behind one address; and what routing policies save, on paper",
    "plan": "what a memory budget holds of a model's requests, how many users fit, and what more memory would bring",
    "replay": "serve a trace with a cache on paper: what hits, what stops the rest, and what another policy would do",
    "serve": "serve a model over HTTP, as OpenAI's API has it",
    "top": "the live figures of a server, in a terminal",
    "new-component": "a distribution with a component of your own, which installs and passes the kit at once",
}
GROUP = "prefixloom.commands"
APART = {"fleet": ("prefixloom-fleet", "fleet")}
"""By command, its distribution where that is not prefixloom itself, and the folder of it in a checkout."""
ERROR = 2
INTERRUPTED = 130
BROKEN_PIPE = 141
CANNOT_WRITE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
"""Error numbers that mean stdout cannot be written, if the error names no file."""


def version() -> str | None:
    """Return the installed version; None if only the source is on the path."""
    try:
        return importlib.metadata.version("prefixloom")
    except importlib.metadata.PackageNotFoundError:
        return None


class _Parser(argparse.ArgumentParser):
    """A parser that itself refuses unknown arguments, so that the error shows the subcommand's usage."""

    def parse_known_args(self, *arguments: Any, **options: Any) -> Any:
        known, unknown = super().parse_known_args(*arguments, **options)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return known, unknown

    def print_help(self, file: Any = None) -> None:
        """Print the help. Unlike argparse's own method, this does not hide an error of writing."""
        print(self.format_help(), end="", file=file or sys.stdout)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand. Return 0: success; 1: the subcommand found something wrong; 2: it could not run."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    chosen = next((argument for argument in arguments if not argument.startswith("-")), None)
    try:
        if arguments[:1] == ["--version"]:
            print(f"prefixloom {version() or '(not installed, run from its source)'}", flush=True)
            return 0
        parser = _parser(chosen)
        if not arguments:
            parser.print_help(sys.stderr)
            return ERROR
        try:
            args = parser.parse_args(arguments)
        finally:
            sys.stdout.flush()  # --help prints and exits
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
    """Point stdout to the null device: it cannot be written any more, and the interpreter flushes it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser(chosen: str | None) -> argparse.ArgumentParser:
    """Make the parser of all subcommands. Only the chosen subcommand gets its arguments."""
    parser = _Parser(prog="prefixloom", description="The prefix cache for hybrid language models.")
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, summary in {**_installed(), **COMMANDS}.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        if name == chosen:
            module = _module(name)
            module.add_arguments(subparser)
            subparser.set_defaults(run=module.run)
    return parser


def _installed() -> dict[str, str]:
    """Return the commands of other distributions. Their own descriptions are unknown until they are imported."""
    found = importlib.metadata.entry_points(group=GROUP)
    return {point.name: f"of distribution {point.dist.name if point.dist else '?'}" for point in found}


def _module(name: str) -> ModuleType:
    own = f"{__name__}.{name.replace('-', '_')}"
    try:
        return importlib.import_module(own)
    except ModuleNotFoundError as error:
        if error.name != own:
            raise
    found = list(importlib.metadata.entry_points(group=GROUP, name=name))
    if not found:
        distribution, folder = APART.get(name, ("prefixloom", "."))
        raise CompositionError(
            f"the command {name!r} is not installed: nothing offers it in the entry-point group {GROUP!r}. Install "
            f"{distribution} with pip (`pip install -e {folder}` in a checkout)"
        )
    module: ModuleType = found[0].load()
    return module
