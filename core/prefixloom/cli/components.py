"""``prefixloom components``: lists what is installed, from which distribution, and what is broken and why."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

import attrs

from ..compose.registry import Offer, Registry
from . import version

COLUMNS = ("OFFER", "NAME", "DISTRIBUTION", "VERSION", "STATUS", "SERVES")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    """Print every offer. Return 1 if one is broken."""
    offers = Registry().offers()
    broken = [offer for offer in offers if offer.status == "broken"]
    if args.json:
        told = {"prefixloom": version(), "offers": [attrs.asdict(offer) for offer in offers]}
        print(json.dumps(told, indent=2))
        return 1 if broken else 0
    if not offers:
        print("Nothing is installed in the entry-point group 'prefixloom', not even prefixloom's own components.")
        print("Run from an installation: pip install prefixloom, or pip install -e . in its source.")
        return 0
    print(table([COLUMNS, *map(_row, offers)]))
    if broken:
        print(f"\n{len(broken)} of {len(offers)} broken:")
        for reason in dict.fromkeys(offer.reason for offer in broken):
            print(f"  {reason}")
    return 1 if broken else 0


def _row(offer: Offer) -> tuple[str, ...]:
    serves = ", ".join(offer.layer_kinds) or offer.summary
    return (offer.offer, offer.name, offer.distribution or "?", offer.version or "?", offer.status, serves)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows in aligned columns, as plain text."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
