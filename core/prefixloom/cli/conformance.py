"""``prefixloom conformance NAME``: what is installed, held against every law that the conformance kit has for it."""

from __future__ import annotations

import argparse
import ast
import json
import textwrap
import warnings
from typing import TYPE_CHECKING

import attrs

from ..errors import CompositionError
from . import version

if TYPE_CHECKING:
    from ..testing.conformance import Report, Verdict

MARKS = {"holds": "ok", "broken": "BROKEN", "wasteful": "COSTS", "not applicable": "-"}
WIDTH = 110


def add_arguments(parser: argparse.ArgumentParser) -> None:
    name = "a component's name, as `prefixloom components` lists it, or storage:NAME, policy:NAME, admission:NAME"
    option = (
        "an option to make the component with, its value as Python writes it; may be given again. Without it: its "
        "default, or what a small model with its layers has"
    )
    believe = "believe what only the component itself says of its layers; without it, that is a failure"
    parser.add_argument("name", metavar="NAME", help=name)
    parser.add_argument("--set", action="append", default=[], metavar="OPTION=VALUE", dest="options", help=option)
    parser.add_argument("--seed", type=int, default=0, help="of the random scripts (default: 0)")
    parser.add_argument("--believe", action="store_true", help=believe)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    """Print the result of every law as it ends, then what is wrong. Return 1 if a law is broken."""
    from ..testing.suites import report_on_installed

    options = dict(_option(text) for text in args.options)
    with warnings.catch_warnings():
        # Torch warns about this once, at its first import. Nothing here needs numpy.
        warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
        report: Report = report_on_installed(args.name, options, args.seed, args.believe, id if args.json else _tell)
    if args.json:
        print(json.dumps({"prefixloom": version(), "broken": len(report.broken), **attrs.asdict(report)}, indent=2))
        return 1 if report.broken else 0
    by_words: dict[str, list[Verdict]] = {}  # each mistake is told once, with all laws that it breaks
    for verdict in report.broken:
        by_words.setdefault(verdict.told, []).append(verdict)
    for told, (first, *others) in by_words.items():
        print(f"\n{first.law} ({', '.join(first.clauses)})")
        _list(f"The law: {first.statement}", f"Broken:  {told}")
        if others:
            _list(f"So are:  {', '.join(verdict.law for verdict in others)}")
        if first.script:
            print(textwrap.indent(f"\n{first.script}", "    "))
    if report.wasteful:
        print("\nIt is right in these, and costs more than it must:")
        _list(*(f"- {verdict.told}" for verdict in report.wasteful))
    print("\nNot tested:")
    _list(*(f"- {what}" for what in report.untested))
    applied = sum(verdict.status != "not applicable" for verdict in report.verdicts)
    print(f"\n{applied - len(report.broken)} of {applied} laws hold, {len(report.broken)} are broken.")
    if report.believed:
        print(f"Believed, because nobody but the component says it: {', '.join(report.believed)}.")
    return 1 if report.broken else 0


def _tell(verdict: Verdict) -> None:
    note = f"   {verdict.told}" if verdict.status == "not applicable" else ""
    print(f"{MARKS[verdict.status]:>6}  {verdict.law}{note}", flush=True)


def _list(*texts: str) -> None:
    for text in texts:
        print(textwrap.fill(text, WIDTH, initial_indent="  ", subsequent_indent="    "))


def _option(text: str) -> tuple[str, object]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise CompositionError(f"--set takes OPTION=VALUE, such as --set window=8; got {text!r}")
    if name == "name":
        raise CompositionError("--set takes no name: the kit names what it makes")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value  # a bare word is a string
