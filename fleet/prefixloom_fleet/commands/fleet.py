"""``prefixloom fleet``: its actions, each in a module of this room with ``add_arguments`` and ``run``.

No module imports Ray before it runs.
"""

from __future__ import annotations

import argparse
import importlib
from typing import Any

ACTIONS = {
    "deploy": "start a fleet, or change a running one, as its file says",
    "status": "the replicas of a running fleet, their load, and whether their events are followed",
    "update": "replace all replicas of a running fleet, a few at a time, such as for new weights",
    "stop": "end a running fleet: what runs is answered first",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True, dest="action")
    for name, summary in ACTIONS.items():
        action = actions.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        module_of(name).add_arguments(action)


def run(args: argparse.Namespace) -> int:
    code: int = module_of(args.action).run(args)
    return code


def module_of(name: str) -> Any:
    return importlib.import_module(f"{__package__}.{name}")
