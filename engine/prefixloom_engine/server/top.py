"""``prefixloom top``: the live page of a running server, in a terminal."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from prefixloom import CompositionError, InputError

from .client import ServerRefused, add_server_arguments, ask


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--once", action="store_true", help="print it once, and end")
    parser.add_argument("--every", default="1", metavar="S", help="seconds between two looks (default: 1)")
    add_server_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Show the figures until Ctrl-C. Return 1 if the server refuses."""
    try:
        from rich.console import Console
        from rich.live import Live
    except ModuleNotFoundError as error:
        raise CompositionError(
            "top needs the package 'rich': install the extra, pip install 'prefixloom[top]'"
        ) from error
    try:
        seconds = float(args.every)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise InputError(f"--every takes seconds from 0.1 to 3600, got {args.every!r}")
    console = Console()
    try:
        told = ask(args, "GET", "/insight")
        if args.once:
            console.print(frame(told))
            return 0
        with Live(frame(told), console=console, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(seconds)
                try:
                    told, trouble = ask(args, "GET", "/insight", seconds=10.0), ""
                except (InputError, ServerRefused) as error:
                    trouble = str(error)
                live.update(frame(told, trouble), refresh=True)
    except ServerRefused as error:
        print(f"prefixloom: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0


def frame(told: dict[str, Any], trouble: str = "") -> Any:
    """Draw one picture of the server's figures."""
    from rich.console import Group
    from rich.text import Text

    stats = told["stats"]
    asked, hit = stats["asked_tokens"], stats["hit_tokens"]
    rate = f"{hit / asked:.1%} of {asked:,} tokens hit" if asked else "no request yet"
    head = Text.assemble(
        (told["model"], "bold"), f"  {told['running']} running, {told['waiting']} waiting, ",
        f"{told['preempted']} set back so far.  {rate}", (f"  {trouble}" if trouble else "", "red"),
    )  # fmt: skip
    return Group(head, Text(), _pools(stats), Text(), _missed(told), Text(), _recent(told))


def _table(*columns: str) -> Any:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        table.add_column(column.removeprefix(">"), justify="right" if column.startswith(">") else "left")
    return table


def _pools(stats: dict[str, Any]) -> Any:
    from rich.progress_bar import ProgressBar
    from rich.text import Text

    table = _table("pool", "in use and cached", ">running", ">cached", ">of", "", ">evicted", ">stopped tokens")
    for name, each in stats["components"].items():
        unit = f"pages of {each['page_tokens']}" if each["page_tokens"] else "states"
        taken = each["running"] + each["cached"]
        table.add_row(
            Text(name), ProgressBar(total=max(1, each["capacity"]), completed=taken, width=24), f"{each['running']:,}",
            f"{each['cached']:,}", f"{each['capacity']:,}", unit, f"{each['evicted']:,}", f"{each['missed_tokens']:,}",
        )  # fmt: skip
    tier = stats["tier"] or {"cached": {}}
    for name, count in tier["cached"].items():
        table.add_row(Text(f"{name} (host)"), "", "", f"{count:,}", f"{tier['capacity'][name]:,}", "", "", "")
    return table


def _missed(told: dict[str, Any]) -> Any:
    from rich.text import Text

    table = _table("why tokens missed", "component", ">tokens")
    missed = told["figures"].get("prefixloom:missed_tokens", [])
    for each in sorted(missed, key=lambda each: -each["value"])[:8]:
        table.add_row(Text(each["labels"]["reason"]), Text(each["labels"]["component"] or "-"), f"{each['value']:,.0f}")
    return table


def _recent(told: dict[str, Any]) -> Any:
    from rich.text import Text

    table = _table("what went lately", "component", "why", ">pages")
    for each in told["recent"][:-9:-1]:
        where = f"{each['component']} ({each['tier']})"
        table.add_row(f"{each['seconds_ago']:.0f} s ago", Text(where), Text(each["cause"]), f"{each['count']:,}")
    return table
