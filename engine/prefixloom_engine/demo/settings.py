"""The options of ``prefixloom demo``."""

from __future__ import annotations

import argparse
from pathlib import Path

import attrs

from prefixloom import InputError

LIMITS = {
    "conversations": (1, 1000),
    "turns": (1, 100),
    "seed": (0, 2**31 - 1),
    "capacity": (1, 1 << 20),
    "host": (0, 1 << 20),
    "speculate": (0, 16),
}
"""The least and the greatest value of each number."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    # ``read_settings`` converts the numbers: argparse would print the whole usage with every mistake.
    parser.add_argument("--conversations", default="8", metavar="N", help="how many there are (default: 8)")
    parser.add_argument("--turns", default="4", metavar="N", help="turns of each conversation (default: 4)")
    parser.add_argument("--size", help="of the built-in model: tiny, small, medium, large (default: small)")
    parser.add_argument(
        "--model", metavar="PATH", help="the folder of a Hugging Face model, in place of the built-in one"
    )
    parser.add_argument("--dtype", help="float32 or float64 (default: float64; of --model: float32)")
    parser.add_argument("--seed", default="0", metavar="N", help="of all random tokens and weights (default: 0)")
    parser.add_argument("--speculate", default="0", metavar="N", help="tokens guessed ahead (default: 0)")
    parser.add_argument("--capacity", metavar="N", help="tokens that the device holds (default: 40%% of all)")
    parser.add_argument("--host", metavar="N", help="tokens that the host holds for it, 0: no tier (default: all)")
    parser.add_argument("--report", metavar="FILE", help="write a page with pictures, in one HTML file")
    parser.add_argument("--trace", metavar="FILE", help="write a trace of the cached runs, for ui.perfetto.dev")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


@attrs.frozen
class Settings:
    conversations: int
    turns: int
    seed: int
    speculate: int
    capacity: int | None
    host: int | None
    size: str
    dtype: str
    model: Path | None
    report: Path | None
    trace: Path | None


def read_settings(args: argparse.Namespace) -> Settings:
    """Check and convert the parsed arguments."""
    found: dict[str, int | None] = {"capacity": None, "host": None}
    for name, (low, high) in LIMITS.items():
        text = getattr(args, name)
        option = "--" + name.replace("_", "-")
        if text is not None:
            try:
                value = int(text)
            except ValueError:
                raise InputError(f"{option} takes a whole number, got {text!r}") from None
            if not low <= value <= high:
                raise InputError(f"{option} must be from {low} to {high}, got {value}")
            found[name] = value
    report = None if args.report is None else Path(args.report)
    if report is not None and not report.absolute().parent.is_dir():
        raise InputError(f"--report {args.report}: there is no folder {str(report.absolute().parent)!r}")
    if report is not None and report.is_dir():
        raise InputError(f"--report takes the name of a file, and {str(report.absolute())!r} is a folder")
    model = None if args.model is None else Path(args.model)
    dtype = args.dtype or ("float64" if model is None else "float32")
    if dtype not in ("float32", "float64"):
        raise InputError(f"--dtype must be float32 or float64, got {dtype!r}: rounding to 16 bits hides errors")
    if model is not None and args.size is not None:
        raise InputError("--size is of the built-in model, and --model says which one to take instead: give one")
    trace = None if args.trace is None else Path(args.trace)
    size = args.size or "small"
    return Settings(**found, size=size, dtype=dtype, model=model, report=report, trace=trace)  # type: ignore[arg-type]
