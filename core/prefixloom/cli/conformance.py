"""``prefixloom conformance NAME``: what is installed, held against every law that the conformance kit has for it."""

from __future__ import annotations

import argparse
import ast
import json
import textwrap
import warnings
from collections.abc import Sequence
from typing import Any

import attrs

from ..errors import CompositionError
from . import version

MARKS = {"holds": "ok", "broken": "BROKEN", "wasteful": "COSTS", "not applicable": "-"}
WIDTH = 110


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name",
        metavar="NAME",
        help="a component's name, as `prefixloom components` lists it, or storage:NAME, policy:NAME, admission:NAME",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="OPTION=VALUE",
        dest="options",
        help="an option to make the component with, its value as Python writes it; may be given again. Without it:"
        " its default, or what a small model with its layers has",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random scripts (default: 0)")
    parser.add_argument(
        "--believe",
        action="store_true",
        help="believe what only the component itself says of its layers; without it, that is a failure",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    """Print the result of every law as it ends, then what is wrong. Return 1 if a law is broken."""
    from ..testing.suites import report_on_installed

    options = dict(_option(text) for text in args.options)
    with warnings.catch_warnings():
        # Torch warns about this once, at its first import. Nothing here needs numpy.
        warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
        report = report_on_installed(args.name, options, args.seed, args.believe, id if args.json else _tell)
    if args.json:
        print(json.dumps({"prefixloom": version(), "broken": len(report.broken), **attrs.asdict(report)}, indent=2))
        return 1 if report.broken else 0
    _tell_broken(report.broken)
    if report.wasteful:
        print("\nIt is right in these, and costs more than it must:")
    for verdict in report.wasteful:
        print(_wrapped(f"- {verdict.told}"))
    print("\nNot tested:")
    for what in report.untested:
        print(_wrapped(f"- {what}"))
    applied = sum(verdict.status != "not applicable" for verdict in report.verdicts)
    print(f"\n{applied - len(report.broken)} of {applied} laws hold, {len(report.broken)} are broken.")
    if report.believed:
        print(f"Believed, because nobody but the component says it: {', '.join(report.believed)}.")
    return 1 if report.broken else 0


def _tell(verdict: Any) -> None:
    note = f"   {verdict.told}" if verdict.status == "not applicable" else ""
    print(f"{MARKS[verdict.status]:>6}  {verdict.law}{note}", flush=True)


def _tell_broken(broken: Sequence[Any]) -> None:
    """Tell each mistake once: laws that are broken in the same words are named together."""
    by_words: dict[str, list[Any]] = {}
    for verdict in broken:
        by_words.setdefault(verdict.told, []).append(verdict)
    for told, (first, *others) in by_words.items():
        print(f"\n{first.law} ({', '.join(first.clauses)})")
        print(_wrapped(f"The law: {first.statement}"))
        print(_wrapped(f"Broken:  {told}"))
        if others:
            print(_wrapped(f"So are:  {', '.join(verdict.law for verdict in others)}"))
        if first.script:
            print(textwrap.indent(f"\n{first.script}", "    "))


def _wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent="  ", subsequent_indent="    ")


def _option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise CompositionError(f"--set takes OPTION=VALUE, such as --set window=8; got {text!r}")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value  # a bare word is a string
