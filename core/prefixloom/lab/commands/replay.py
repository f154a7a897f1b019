"""``prefixloom replay``: serve a trace with a composed cache on paper, and tell what hit and what stopped the rest."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from ...compose.sizing import size_text
from ...errors import InputError
from ...insight.explanation import Explanation
from ..beside.side_by_side import table
from ..beside.sides import check_beside, replay_beside
from ..outcome import ReplayOutcome, columns, table_of
from ..pages.report import html_report
from ..recordings.rerun import RecordedCalls, rerun, shrink
from ..setup import Setup, replay_all
from ..trace_bounds import Bound, TraceBounds, share_closed
from ..traces.reading import RequestFile
from .arguments import (
    INTERRUPTED,
    CountBar,
    ProgressBar,
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

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "trace", type=Path, metavar="TRACE", help="a file of requests, .gz or not: docs/lab.md has the formats"
    )
    add_cache_arguments(parser)
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--memory", nargs="+", metavar="SIZE", help='bytes of all pools together, such as "40GiB"')
    size.add_argument(
        "--capacity", nargs="+", metavar="TOKENS", help="tokens of every pool, or NAME=TOKENS,NAME=STATES"
    )
    add_division_argument(parser)
    parser.add_argument(
        "--policy",
        nargs="+",
        default=[],
        metavar="NAME",
        help="orders of eviction (default: lru, or what was recorded)",
    )
    add_service_arguments(parser)
    add_trace_arguments(parser)
    parser.add_argument(
        "--rerun", action="store_true", help="of a recording: make the same calls again, and compare what comes of them"
    )
    parser.add_argument(
        "--shrink",
        type=Path,
        metavar="FILE",
        help="of a recording that fails in debug mode: the least that fails",
    )
    parser.add_argument(
        "--beside",
        action="append", default=[], metavar="ENGINE",
        help="replay with this engine's own cache manager as well, at the same bytes: vllm, sglang, or module:Class",
    )  # fmt: skip
    parser.add_argument(
        "--settings",
        nargs="+",
        default=[],
        metavar="NAME",
        help="of --beside: these settings (default: all that matter)",
    )
    parser.add_argument(
        "--no-bound", action="store_true",
        help="of several replays: do not compute what no policy can hit (it keeps the blocks of all prompts in memory)",
    )  # fmt: skip
    parser.add_argument(
        "--explain", type=int, nargs="+", default=[], metavar="N",
        help="say why these requests, counted from 1, hit what they hit",
    )  # fmt: skip
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Replay the trace with each policy and each size. Returns 130 if it was interrupted, after what was measured."""
    if args.rerun or args.shrink is not None:
        return _rerun(args)
    if args.memory is None and args.capacity is None:
        raise InputError("say how large the cache is: --memory SIZE or --capacity TOKENS")
    trace = trace_of(args)
    base = divided(setup_of(args), args, trace)
    policies = dict.fromkeys(args.policy or ["lru"])
    setups = [attrs.evolve(base, policy=policy, **size) for size in _sizes(args) for policy in policies]
    if args.beside:
        if len(_sizes(args)) > 1:
            raise InputError("--beside takes one memory or capacity at a time")
        check_beside(setups[0], args.beside, args.settings)
    elif args.jobs > 1 and len(setups) > 1 and not args.explain:
        return _run_apart(setups, trace, args)
    outcomes: list[ReplayOutcome] = []
    explained: list[Explained] = []
    for setup in setups:
        bar = ProgressBar(trace, setup.policy)
        driver = setup.driver(trace.name, bar.told, args.explain)
        try:
            outcomes.append(driver.run(trace))
            explained += [Explained(outcomes[-1], *each) for each in sorted(driver.explained.items())]
        except (KeyboardInterrupt, InputError) as error:  # what was measured until then is told
            bar.clear()
            if driver.outcome().requests:
                outcomes.append(driver.outcome())
                _tell(outcomes, args)
            if isinstance(error, InputError):
                raise
            return INTERRUPTED
        finally:
            bar.clear()
    return _run_beside(setups, trace, outcomes, explained, args)


@attrs.frozen
class Explained:
    """Why the request of this number hit what it hit, in the replay of ``outcome``."""

    outcome: ReplayOutcome
    number: int
    why: Explanation


def _run_beside(
    setups: Sequence[Setup],
    trace: RequestFile,
    outcomes: list[ReplayOutcome],
    explained: list[Explained],
    args: argparse.Namespace,
) -> int:
    """Replay with the managers of other engines as well, and tell everything."""
    peers: dict[str, list[ReplayOutcome]] = {}
    status = 0
    for engine in args.beside:
        bar = ProgressBar(trace, engine)
        peers[engine] = []
        try:
            for outcome in replay_beside(setups[0], trace, engine, settings=args.settings, told=bar.told):
                bar.clear()
                peers[engine].append(outcome)
        except KeyboardInterrupt:
            status = INTERRUPTED
            break
        finally:
            bar.clear()
    _tell(outcomes, args, peers, explained, [] if status else _bounds(setups, trace, outcomes, args))
    return status


def _bounds(
    setups: Sequence[Setup], trace: RequestFile, outcomes: Sequence[ReplayOutcome], args: argparse.Namespace
) -> list[Bound]:
    """Return what no policy hits with each of the memories of several replays.

    There is none for a memory in which requests were retracted, since their prompts were computed out of their order,
    nor for answers that are cached after others were looked up.
    """
    overlapping_answers = setups[0].service is not None and setups[0].outputs == "published"
    if args.no_bound or len(outcomes) < 2 or overlapping_answers:
        return []
    retracted = {each.bytes for each in outcomes if each.retracted}
    found: dict[int, Bound] = {}
    traced: TraceBounds | None = None
    bar = CountBar(len({each.bytes for each in outcomes}), "bounds")
    try:
        for setup, outcome in zip(setups, outcomes, strict=True):
            if outcome.bytes in found or outcome.bytes in retracted:
                continue
            if traced is None:
                traced = TraceBounds(trace, outcome.page, answers=setup.outputs == "published")
            best = traced.hit_rate(setup.compose(), setup.chunk if setup.service is None else setup.service.chunk)
            if best is not None:
                found[outcome.bytes] = Bound(outcome.bytes, min(best, outcome.ideal_rate))
            bar.told(len(found))
    except KeyboardInterrupt:
        return []
    finally:
        bar.clear()
    return [found[size] for size in sorted(found)]


def _run_apart(setups: list[Setup], trace: RequestFile, args: argparse.Namespace) -> int:
    """Do as ``run`` in processes. After an interrupt, report the replays that are over."""
    done: dict[int, ReplayOutcome] = {}
    bar = CountBar(len(setups), "replays")

    def told(number: int, outcome: ReplayOutcome) -> None:
        done[number] = outcome
        bar.told(len(done))

    try:
        replay_all(setups, trace, jobs=args.jobs, told=told)
        status = 0
    except KeyboardInterrupt:
        status = INTERRUPTED
    finally:
        bar.clear()
    if done:
        outcomes = [done[number] for number in sorted(done)]
        _tell(outcomes, args, bounds=[] if status else _bounds(setups, trace, outcomes, args))
    return status


def _rerun(args: argparse.Namespace) -> int:
    """Make the calls of a recording again. Returns 1 if something came out otherwise, or fails."""
    told = {
        "--beside": args.beside, "--settings": args.settings, "--explain": args.explain, "--report": args.report,
        "--json": args.json, "--limit": args.limit, "--block": args.block, "--in-turn": args.in_turn,
        "--divide": args.divide, "--jobs": args.jobs > 1, "more than one --policy": len(args.policy) > 1,
        "more than one size": len(args.memory or args.capacity or ()) > 1,
    }  # fmt: skip
    if wrong := [name for name, value in told.items() if value]:
        raise InputError(f"where the calls of a recording are made again, {' and '.join(wrong)} cannot be used")
    recording = RecordedCalls.read(args.trace)
    size = {"capacity": _recorded_capacity(recording)} if args.capacity is args.memory is None else _sizes(args)[0]
    setup = attrs.evolve(
        setup_of(args),
        page_size=args.page or _recorded_page(recording),
        policy=args.policy[0] if args.policy else recording.head.policy,
        service=None,
        debug=True if args.shrink is not None else None,
        **size,
    )
    if args.shrink is None:
        done = rerun(recording, setup.compose())
        print("\n".join((f"{done.calls:,} calls made again, {done.differences:,} came out otherwise", *done.told)))
        return 1 if done.differences else 0
    shrunk = shrink(recording, setup.compose)
    if shrunk is None:
        print(f"In debug mode {len(recording.entries):,} calls of {len(recording.requests):,} requests fail nowhere.")
        return 0
    shrunk.recording.write(args.shrink)
    print(
        f"{len(shrunk.recording.requests):,} of {len(recording.requests):,} requests are enough, in "
        f"{len(shrunk.recording.entries):,} calls: {args.shrink} ({shrunk.attempts:,} attempts)\n"
        f"{type(shrunk.error).__name__}: {shrunk.error}"
    )
    return 1


def _recorded_page(recording: RecordedCalls) -> int:
    """Return the page that was composed with. That of the tree may be a multiple of it."""
    return min((page for _, page in recording.head.pools.values() if page), default=recording.head.page)


def _recorded_capacity(recording: RecordedCalls) -> dict[str, int]:
    """Return the pools of the cache that was recorded, as ``compose`` takes them."""
    return {name: slots * (page or 1) for name, (slots, page) in recording.head.pools.items()}


def _sizes(args: argparse.Namespace) -> list[dict[str, Any]]:
    if args.memory is not None:
        return [{"memory": each} for each in dict.fromkeys(args.memory)]
    return [{"capacity": parse_capacity(each)} for each in dict.fromkeys(args.capacity)]


def _tell(
    outcomes: list[ReplayOutcome],
    args: argparse.Namespace,
    peers: Mapping[str, list[ReplayOutcome]] | None = None,
    explained: Sequence[Explained] = (),
    bounds: Sequence[Bound] = (),
) -> None:
    beside = {engine: many for engine, many in (peers or {}).items() if many}
    if args.report is not None:
        write_report(
            args.report, html_report([*outcomes, *(each for many in beside.values() for each in many)], bounds)
        )
    if args.json:
        told: dict[str, Any] = {"replays": [outcome.as_dict() for outcome in outcomes]}
        if bounds:
            told["bounds"] = [attrs.asdict(each) for each in bounds]
        if beside:
            told["beside"] = {engine: [each.as_dict() for each in many] for engine, many in beside.items()}
        if explained:
            told["explained"] = [
                {
                    "policy": each.outcome.policy,
                    "bytes": each.outcome.bytes,
                    "request": each.number,
                    **each.why.as_dict(),
                }
                for each in explained
            ]
        print(json.dumps(told))
        return
    print("\n\n".join(map(str, outcomes)))
    if len(outcomes) > 1:
        print()
        print("\n".join(comparison(outcomes, bounds)))
    if beside:
        print()
        print("\n".join(table(outcomes, beside)))
    for each in explained:
        print(f"\nRequest {each.number}, with {each.outcome.policy} and {size_text(each.outcome.bytes)}:")
        print(each.why)
    if missing := sorted(set(args.explain) - {each.number for each in explained}):
        print(f"\nNot served, so there is nothing to explain: {', '.join(map(str, missing))}")
    sys.stdout.flush()


def comparison(outcomes: Sequence[ReplayOutcome], bounds: Sequence[Bound] = ()) -> list[str]:
    """Return replays of one trace in a table, one line each, and what no policy hits with each memory."""
    names = ["policy", "memory", "x ideal", "hit", "gap closed", "p50", "p99", "states used", "retracted", "refused"]
    if not bounds:
        names.remove("gap closed")
    rows = table_of(outcomes, names, gap_closed=lambda each: share_closed(each, outcomes, bounds))
    for bound in bounds:
        rows.append(("no policy", size_text(bound.bytes), "", f"{bound.hit_rate:.2%}", *[""] * (len(names) - 4)))
    return columns(rows)
