"""``prefixloom fleet deploy``: start a fleet as its file says, and serve until a signal comes."""

from __future__ import annotations

import argparse
import signal
import threading
from pathlib import Path
from types import FrameType

from ..deploy.config import read_fleet

SIGNALS = (signal.SIGINT, signal.SIGTERM)
LOOK_SECONDS = 2.0
"""How often it is looked whether the fleet was ended by ``prefixloom fleet stop``."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", help="of the fleet, such as fleet.toml")


def run(args: argparse.Namespace) -> int:
    """Deploy. In a Ray cluster that others started, return then; else serve until SIGINT or SIGTERM."""
    config = read_fleet(Path(args.file))
    from ..deploy import application

    ending = threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        ending.set()

    before = {each: signal.signal(each, end) for each in SIGNALS}
    try:
        application.start_ray(config)
        for each in SIGNALS:  # Ray has put its own handlers there
            signal.signal(each, end)
        url = application.deploy(config)
        count = str(config.least) if config.least == config.most else f"{config.least} to {config.most}"
        print(f"prefixloom serves a fleet of {count} replicas at {url}")
        if config.address:
            return 0
        print(f"  its Ray cluster is at {application.cluster_address()}", flush=True)
        while not ending.wait(LOOK_SECONDS) and application.is_running(config):
            pass
        ending.wait(LOOK_SECONDS)  # `fleet stop` still looks whether all has ended
        application.stop(config)
        return 0
    finally:
        application.end_ray(config)
        for each, handler in before.items():
            signal.signal(each, handler)
