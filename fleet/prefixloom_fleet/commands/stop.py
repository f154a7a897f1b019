"""``prefixloom fleet stop``: end a running fleet. What runs is answered, and what waits for the store is written."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..deploy.config import read_fleet


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", help="of the fleet")
    parser.add_argument("--address", default="", help="of its Ray cluster (default: [ray] address, or the one here)")


def run(args: argparse.Namespace) -> int:
    config = read_fleet(Path(args.file))
    from ..deploy import application

    with application.joined(config, args.address):
        application.stop(config)
        print(f"the fleet {config.name!r} has ended")
    return 0
