"""``prefixloom replay``: serve a trace with a composed cache on paper, and tell what hit and what stopped the rest."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import CompositionError, InputError
from .beside.side_by_side import table
from .beside.sides import check_beside, replay_beside
from .outcome import ReplayOutcome, columns
from .replay import CHUNK
from .report import html_report
from .rerun import Recording, rerun, shrink
from .service import Service
from .setup import Setup
from .traces import RequestFile, read_trace

__all__ = ["add_arguments", "run"]

USUAL = Service()
INTERRUPTED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "trace", type=Path, metavar="TRACE", help="a file of requests, .gz or not: docs/lab.md has the formats"
    )
    parser.add_argument(
        "--model", required=True, metavar="CONFIG", help="a model's config.json or its folder, or a profile (.toml)"
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--memory", metavar="SIZE", help='bytes of all pools together, such as "40GiB"')
    size.add_argument("--capacity", metavar="TOKENS", help="tokens of every pool, or NAME=TOKENS,NAME=STATES")
    parser.add_argument("--page", type=int, metavar="N", help="tokens of a page (default: the profile's, or 16)")
    parser.add_argument(
        "--policy", nargs="+", default=["lru"], metavar="NAME", help="orders of eviction, one replay each"
    )
    parser.add_argument("--admission", default="all", metavar="NAME", help="which states the cache takes")
    parser.add_argument("--host", metavar="SIZE", help="memory of a tier below the device")
    parser.add_argument("--in-turn", action="store_true", help="one request after the other, each at its arrival")
    parser.add_argument(
        "--max-running", type=int, default=USUAL.max_running, metavar="N", help="requests that run at once"
    )
    parser.add_argument("--chunk", type=int, default=CHUNK, metavar="N", help="tokens of a prompt that a step computes")
    parser.add_argument("--prefill", type=float, default=USUAL.prefill, metavar="RATE", help="prompt tokens a second")
    parser.add_argument(
        "--decode", type=float, default=USUAL.decode, metavar="RATE", help="tokens a second that each request decodes"
    )
    parser.add_argument(
        "--outputs",
        choices=("running", "published"),
        default="running",
        help="what becomes of answers: they take memory while they run, or are cached as well",
    )
    parser.add_argument(
        "--block", type=int, metavar="N", help="tokens of a block of the trace, where its lines do not tell"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="replay the first N requests only")
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
        "--beside", action="append", default=[], metavar="ENGINE",
        help="replay with this engine's own cache manager as well, at the same bytes: vllm, sglang, or module:Class",
    )  # fmt: skip
    parser.add_argument(
        "--settings",
        nargs="+",
        default=[],
        metavar="NAME",
        help="of --beside: these settings (default: all that matter)",
    )
    parser.add_argument("--report", type=Path, metavar="FILE", help="write a page of pictures")
    parser.add_argument("--json", action="store_true", help="print one JSON object")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Replay the trace once with each policy. Returns 130 if it was interrupted, after what was measured."""
    if args.rerun or args.shrink is not None:
        return _rerun(args)
    service = None if args.in_turn else Service(args.prefill, args.decode, args.max_running, args.chunk)
    if args.memory is None and args.capacity is None:
        raise InputError("say how large the cache is: --memory SIZE or --capacity TOKENS")
    trace = read_trace(args.trace, block=args.block, limit=args.limit)
    outcomes: list[ReplayOutcome] = []
    setups = [
        Setup(
            args.model,
            page_size=args.page,
            capacity=_capacity(args),
            memory=args.memory,
            policy=name,
            admission=args.admission,
            host=args.host,
            service=service,
            chunk=args.chunk,
            outputs=args.outputs,
        )
        for name in dict.fromkeys(args.policy)
    ]
    if args.beside:
        check_beside(setups[0], args.beside, args.settings)
    for name, setup in zip(dict.fromkeys(args.policy), setups, strict=True):
        bar = ProgressBar(trace, name)
        driver = setup.driver(trace.name, bar.told)
        try:
            outcomes.append(driver.run(trace))
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
    peers: dict[str, list[ReplayOutcome]] = {}
    try:
        for engine in args.beside:
            bar = ProgressBar(trace, engine)
            peers[engine] = []
            for outcome in replay_beside(setups[0], trace, engine, settings=args.settings, told=bar.told):
                bar.clear()
                peers[engine].append(outcome)
    except KeyboardInterrupt:
        bar.clear()
        _tell(outcomes, args, peers)
        return INTERRUPTED
    _tell(outcomes, args, peers)
    return 0


def _rerun(args: argparse.Namespace) -> int:
    """Make the calls of a recording again. Returns 1 if something came out otherwise, or fails."""
    recording = Recording.read(args.trace)
    setup = Setup(
        args.model,
        page_size=args.page or recording.head.page,
        capacity=_recorded_capacity(recording) if args.capacity is args.memory is None else _capacity(args),
        memory=args.memory,
        policy=args.policy[0],
        admission=args.admission,
        host=args.host,
        service=None,
        debug=True if args.shrink is not None else None,
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


def _recorded_capacity(recording: Recording) -> Mapping[str, int]:
    """The pools of the cache that was recorded, as ``compose`` takes them."""
    return {name: slots * (page or 1) for name, (slots, page) in recording.head.pools.items()}


def _capacity(args: argparse.Namespace) -> int | Mapping[str, int] | None:
    return None if args.capacity is None else parse_capacity(args.capacity)


def _tell(
    outcomes: list[ReplayOutcome], args: argparse.Namespace, peers: Mapping[str, list[ReplayOutcome]] | None = None
) -> None:
    beside = {engine: many for engine, many in (peers or {}).items() if many}
    if args.report is not None:
        try:
            every = [*outcomes, *(each for many in beside.values() for each in many)]
            args.report.write_text(html_report(every), encoding="utf-8")
        except OSError as error:
            raise InputError(f"--report {args.report} cannot be written: {error.strerror}") from error
    if args.json:
        told: dict[str, Any] = {"replays": [outcome.as_dict() for outcome in outcomes]}
        if beside:
            told["beside"] = {engine: [each.as_dict() for each in many] for engine, many in beside.items()}
        print(json.dumps(told))
        return
    print("\n\n".join(map(str, outcomes)))
    if len(outcomes) > 1:
        print()
        print("\n".join(comparison(outcomes)))
    if beside:
        print()
        print("\n".join(table(outcomes, beside)))
    sys.stdout.flush()


def comparison(outcomes: list[ReplayOutcome]) -> list[str]:
    """Replays of one trace in a table, one line each."""
    rows: list[tuple[str, ...]] = [("policy", "x ideal", "hit", "p50", "p99", "states used")]
    for each in outcomes:
        rows.append((
            each.policy, f"{each.multiple:.3f}", f"{each.hit_rate:.2%}", f"{each.to_compute(0.5):,}",
            f"{each.to_compute(0.99):,}", f"{each.states_used:,} of {each.states_made:,}",
        ))  # fmt: skip
    return columns(rows)


def parse_capacity(text: str) -> int | Mapping[str, int]:
    """A capacity as a command line has it: "1000000", or "NAME=1000000,NAME=200"."""
    try:
        if "=" not in text:
            return int(text)
        pairs = [each.partition("=") for each in text.split(",")]
        return {name.strip(): int(value) for name, _, value in pairs}
    except ValueError:
        raise CompositionError(
            f"--capacity is a number of tokens, or NAME=NUMBER for each component, with commas; got {text!r}"
        ) from None


class ProgressBar:
    """A line on a terminal that says how far a replay is. Where stderr is no terminal it shows nothing."""

    WIDTH = 30
    SECONDS = 0.2

    def __init__(self, trace: RequestFile, name: str, file: Any = None) -> None:
        self._trace, self._name = trace, name
        self._file = sys.stderr if file is None else file
        self._on = self._file.isatty()
        self._shown = 0.0
        self._length = 0

    def told(self, requests: int, now: float) -> None:
        if not self._on or time.monotonic() - self._shown < self.SECONDS:
            return
        self._shown = time.monotonic()
        part = self._trace.progress.part
        if self._trace.limit is not None:
            part = max(part, requests / self._trace.limit)
        full = int(part * self.WIDTH)
        text = f"{self._name} [{'#' * full}{'.' * (self.WIDTH - full)}] {part:4.0%}  {requests:,} requests"
        print("\r" + text.ljust(self._length), end="", file=self._file, flush=True)
        self._length = len(text)

    def clear(self) -> None:
        if self._length:
            print("\r" + " " * self._length + "\r", end="", file=self._file, flush=True)
            self._length = 0
