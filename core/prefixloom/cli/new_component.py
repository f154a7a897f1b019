"""``prefixloom new-component NAME``: writes a distribution with a new component, which passes the kit at once."""

from __future__ import annotations

import argparse
import importlib.util
import keyword
import re
from pathlib import Path

from ..errors import CompositionError, InputError
from .skeleton import Skeleton, files
from .skeleton_reach import ReachSaid, read_reach

FACTS = ("page_size", "grid", "lookahead", "tokens_per_slot")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="the component's kind, which profiles and the command line say")
    parser.add_argument(
        "--reach",
        default="path",
        help="what resuming needs: path, window:N, sinks:N, chunk:N, tail:N:K, several joined by '+', point (a state),"
        " or custom, for one in plain Python (default: path)",
    )
    parser.add_argument(
        "--buffer",
        action="append",
        default=[],
        metavar="NAME:SHAPE[:DTYPE]",
        help="a tensor of a slot, such as k:8x64:bfloat16; may be given again (default: k and v, or h for a state)",
    )
    parser.add_argument("--layers", type=int, default=1, help="how many layers keep it (default: 1)")
    for fact in FACTS:
        said = f"the manifest's {fact}"
        parser.add_argument(f"--{fact.replace('_', '-')}", type=int, default=None, metavar="N", help=said)
    parser.add_argument(
        "--into", type=Path, default=Path(), metavar="DIR", help="where its folder goes (default: here)"
    )


def run(args: argparse.Namespace) -> int:
    """Write the files. No existing file is overwritten."""
    name = str(args.name)
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        raise InputError(f"a component's kind is a lower-case word such as ring_kv, got {name!r}")
    if args.layers < 1:
        raise InputError(f"--layers must be at least 1, got {args.layers}")
    reach = read_reach(args.reach)
    buffers = [_buffer(text) for text in args.buffer] or list(reach.buffers)
    facts = {fact: getattr(args, fact) for fact in FACTS if getattr(args, fact) is not None}
    skeleton = Skeleton(name, reach, tuple(buffers), args.layers, facts)
    _checked(skeleton, reach)
    folder = args.into / f"prefixloom-{name.replace('_', '-')}"
    if folder.exists():
        raise InputError(f"{folder} exists; give another name, or another folder with --into")
    if importlib.util.find_spec(skeleton.package) is not None:
        raise InputError(f"a package {skeleton.package!r} is installed already; give another name")
    try:
        for path, text in files(skeleton).items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
    except OSError as error:
        raise InputError(f"{folder} cannot be written: {error.strerror}") from error
    print(f"{folder}: a component {name!r} with {skeleton.reach_code}. Next:\n")
    print(f"    pip install -e '{folder}[test]'")
    print(f"    prefixloom conformance {name}")
    print(f"    python -m pytest {folder}\n")
    print(f"Then make it yours: {skeleton.package}/__init__.py says what is stored and what resuming needs, and")
    print("prefixloom_truth there what your layers read and write. docs/writing-a-plugin.md has the rest.")
    return 0


def _buffer(text: str) -> tuple[str, tuple[int, ...], str]:
    name, _, rest = text.partition(":")
    shape, _, dtype = rest.partition(":")
    if not name.isidentifier() or not re.fullmatch(r"\d+(x\d+)*", shape):
        raise InputError(f"--buffer takes NAME:SHAPE[:DTYPE], such as k:8x64:bfloat16; got {text!r}")
    return name, tuple(int(extent) for extent in shape.split("x")), dtype or "bfloat16"


def _checked(skeleton: Skeleton, reach: ReachSaid) -> None:
    """Refuse what cannot be composed before anything is written."""
    from ..contract.manifest import Buffer, Manifest

    facts = skeleton.facts
    manifest = Manifest([Buffer(*buffer, range(skeleton.layers)) for buffer in skeleton.buffers], **facts)
    if reach.is_state and (manifest.page_size or manifest.tokens_per_slot != 1):
        raise CompositionError("a state has no pages: --page-size and --tokens-per-slot are for positions")
