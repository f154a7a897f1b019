"""``prefixloom fleet simulate``: a trace through several replicas on paper, with several routing policies."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import attrs

from prefixloom import InputError
from prefixloom.compose.sizing import size_text
from prefixloom.contract.manifest import parse_memory
from prefixloom.lab import RequestFile, SyntheticTrace
from prefixloom.lab.commands.arguments import (
    INTERRUPTED,
    CountBar,
    add_cache_arguments,
    add_division_argument,
    add_output_arguments,
    add_service_arguments,
    add_trace_arguments,
    divided,
    parse_capacity,
    setup_of,
    trace_of,
    write_report,
)
from prefixloom.lab.commands.plan import synthetic_trace

from ..routing import POLICIES, USUAL
from ..simulation import FleetOutcome, FleetSetup, Outage, RepeatedTrace, StoreSpeed, simulate_all
from ..simulation.fleet_outcome import describe_fleets
from ..simulation.fleet_report import fleet_report

__all__ = ["add_arguments", "run"]

Value = TypeVar("Value")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("trace", nargs="?", type=Path, metavar="TRACE", help="requests: docs/lab.md has the formats")
    kind.add_argument("--traffic", metavar="NAME=NUMBER,...", help="made requests, as in `prefixloom plan`")
    add_cache_arguments(parser)
    add_division_argument(parser)
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--memory", metavar="SIZE", help="bytes of all pools of one replica together")
    size.add_argument("--capacity", metavar="TOKENS", help="tokens of every pool of one replica, or NAME=TOKENS,...")
    parser.add_argument("--policy", default="lru", metavar="NAME", help="the order of eviction")
    parser.add_argument("--replicas", default="1,2,4", metavar="N,...", help="how many replicas (default: 1,2,4)")
    parser.add_argument(
        "--routing",
        default=",".join(USUAL),
        metavar="NAME,...",
        help=f"of {', '.join(POLICIES)} (default: {', '.join(USUAL)})",
    )
    parser.add_argument(
        "--late", default="0", metavar="SECONDS",
        help="until a router hears what a replica has cached; never: it goes by what it sent (default: 0)",
    )  # fmt: skip
    parser.add_argument(
        "--fail", action="append", default=[], metavar="N@SECOND+SECONDS",
        help="replica N, counted from 0, dies at that second and joins again empty after so many, or never",
    )  # fmt: skip
    parser.add_argument(
        "--lies", type=int, nargs="+", default=[], metavar="N", help="replicas that say they have every prompt"
    )
    parser.add_argument("--store", metavar="SIZE", help="memory of a store behind all replicas")
    parser.add_argument(
        "--bandwidth", default="10GiB", metavar="SIZE", help="what the store's link moves in a second (default: 10GiB)"
    )
    parser.add_argument(
        "--latency", type=float, default=0.002, metavar="SECONDS", help="until a read of the store begins"
    )
    copies = parser.add_mutually_exclusive_group()
    copies.add_argument("--copies", type=int, default=1, metavar="N", help="the trace N times, with other content each")
    copies.add_argument(
        "--scale", action="store_true", help="as many copies as replicas: a replica always has as much to do"
    )
    parser.add_argument("--speed", type=float, default=1.0, metavar="FACTOR", help="the trace so many times as fast")
    add_service_arguments(parser)
    add_trace_arguments(parser)
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Simulate each number of replicas with each policy. Return 130 after an interrupt, and print what is done."""
    asked = _asked(args)
    done: dict[int, FleetOutcome] = {}
    bar = CountBar(len(asked), "fleets")

    def told(number: int, outcome: FleetOutcome) -> None:
        done[number] = outcome
        bar.told(len(done))

    status = 0
    try:
        simulate_all(asked, jobs=args.jobs, told=told)
    except KeyboardInterrupt:
        status = INTERRUPTED
    finally:
        bar.clear()
    outcomes = [done[number] for number in sorted(done)]
    if outcomes:
        if args.report is not None:
            write_report(args.report, fleet_report(outcomes))
        print(json.dumps({"fleets": [each.as_dict() for each in outcomes]}) if args.json else _text(outcomes))
    return status


def _asked(args: argparse.Namespace) -> list[tuple[FleetSetup, RepeatedTrace]]:
    """Return every fleet that is asked for, with its trace. What is wrong is told before anything is simulated."""
    size = {"memory": args.memory} if args.memory is not None else {"capacity": parse_capacity(args.capacity)}
    trace: RequestFile | SyntheticTrace
    trace = trace_of(args) if args.traffic is None else synthetic_trace(args.traffic, args.limit)
    setup = divided(attrs.evolve(setup_of(args), policy=args.policy, **size), args, trace)
    late = None if args.late == "never" else _number("--late", args.late, float)
    store = None
    if args.store is not None:
        store = StoreSpeed(parse_memory(args.store), parse_memory(args.bandwidth), args.latency)
    return [
        (
            FleetSetup(
                setup, replicas, routing, late=late, lies=tuple(args.lies), outages=tuple(map(Outage.parse, args.fail)),
                store=store,
            ),
            RepeatedTrace(trace, replicas if args.scale else args.copies, args.speed),
        )
        for replicas in [_number("--replicas", each, int) for each in args.replicas.split(",")]
        for routing in args.routing.split(",")
    ]  # fmt: skip


def _number(option: str, text: str, kind: Callable[[str], Value]) -> Value:
    try:
        return kind(text)
    except ValueError:
        raise InputError(f"{option} has a number where it has {text!r}") from None


def _text(outcomes: list[FleetOutcome]) -> str:
    """Return outcomes as text: a table for each trace, of which there is one for each number of copies."""
    first = outcomes[0]
    told = [f"{size_text(first.bytes)} of pools a replica, {first.prefill:,.0f} tokens of prompts a second", ""]
    for trace in dict.fromkeys(each.trace for each in outcomes):
        told += [*describe_fleets([each for each in outcomes if each.trace == trace]), ""]
    if any(each.read for each in outcomes):
        most = max(outcomes, key=lambda each: each.read / each.span if each.span else math.inf)
        told.append(
            f"The store read at most {size_text(round(most.read / most.span))} a second "
            f"({most.routing}, {most.places:,} replicas)"
        )
    return "\n".join(told).rstrip()
