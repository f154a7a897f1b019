"""``prefixloom fleet update``: replace all replicas of a running fleet, a few at a time."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from ..deploy.config import read_fleet


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", help="of the fleet, as it is to be from now on")
    parser.add_argument("--address", default="", help="of its Ray cluster (default: [ray] address, or the one here)")


def run(args: argparse.Namespace) -> int:
    config = read_fleet(Path(args.file))
    from ..deploy import application

    with application.joined(config, args.address):
        began = time.monotonic()
        url = application.deploy(config, revision=f"{time.time():.0f}")
        print(f"all replicas at {url} were replaced, in {time.monotonic() - began:.0f} s")
    return 0
