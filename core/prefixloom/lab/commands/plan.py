"""``prefixloom plan``: what a memory budget holds, how many users fit, and what more memory would bring."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import attrs

from ...compose.sizing import Traffic, parse_numbers
from ..pages.report import plan_report
from ..plan import GRIDS, PAGES, SIZES, describe_plan, make_plan
from ..setup import Trace
from ..traces.synthetic import SyntheticTrace
from .arguments import (
    INTERRUPTED,
    CountBar,
    add_cache_arguments,
    add_output_arguments,
    add_service_arguments,
    add_trace_arguments,
    setup_of,
    trace_of,
    write_report,
)

__all__ = ["add_arguments", "run"]

FIELDS = tuple(field.name for field in attrs.fields(Traffic))
USERS = ("users", "turns", "think", "requests", "seed")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_cache_arguments(parser)
    parser.add_argument(
        "--memory", required=True, metavar="SIZE", help='the budget: bytes of all pools, such as "40GiB"'
    )
    parser.add_argument("--policy", default="lru", metavar="NAME", help="the order of eviction")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--trace", type=Path, metavar="FILE", help="requests to plan for: docs/lab.md has the formats")
    kind.add_argument(
        "--traffic", metavar="NAME=NUMBER,...", default="",
        help=f"requests to plan for, where there is no trace: {', '.join([*FIELDS, *USERS])}",
    )  # fmt: skip
    add_service_arguments(parser)
    add_trace_arguments(parser)
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print the plan, or write it. Returns 130 if it was interrupted."""
    setup = attrs.evolve(setup_of(args), memory=args.memory, policy=args.policy)
    trace: Trace
    if args.trace is not None:
        trace = trace_of(args)
    else:
        trace = synthetic_trace(args.traffic, args.limit)
        setup = attrs.evolve(setup, traffic=trace.traffic)
        if setup.service is not None:
            service = attrs.evolve(setup.service, max_running=trace.traffic.running, chunk=trace.traffic.chunk)
            setup = attrs.evolve(setup, service=service)
    bar = CountBar(len(SIZES) + len(PAGES) + len(GRIDS), "replays")
    try:
        plan = make_plan(setup, trace, jobs=args.jobs, told=lambda done, _: bar.told(done))
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        bar.clear()
    if args.report is not None:
        write_report(args.report, plan_report(plan))
    print(json.dumps(plan.as_dict()) if args.json else "\n".join(describe_plan(plan)))
    return 0


def synthetic_trace(text: str, limit: int | None = None) -> SyntheticTrace:
    """Return requests of a traffic as a command line has it: "prompt=4096,output=512,shared=0.5,users=200"."""
    numbers = parse_numbers(text, [*FIELDS, *USERS])
    users = {name: numbers.pop(name) for name in USERS if name in numbers}
    if limit is not None:
        users["requests"] = limit
    return SyntheticTrace(Traffic(**numbers), **users)  # type: ignore[arg-type]
