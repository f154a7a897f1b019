"""``prefixloom new-component NAME``: writes a distribution with a new component, which passes the kit at once.

It copies ``template``, a distribution with the component ``ring``, under another name.
"""

from __future__ import annotations

import argparse
import importlib.util
import keyword
import os
import re
from pathlib import Path

from ..errors import InputError

TEMPLATE = Path(__file__).parent / "template"
FILES = ("pyproject.toml", "README.md", "prefixloom_ring/__init__.py", "tests/test_conformance.py")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="the component's kind, which profiles and the command line say")
    parser.add_argument(
        "--into", type=Path, default=Path(), metavar="DIR", help="where its folder goes (default: here)"
    )


def run(args: argparse.Namespace) -> int:
    """Write the files. No existing file is overwritten."""
    name = str(args.name)
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or keyword.iskeyword(name):
        raise InputError(f"a component's kind is a lower-case word such as ring_kv, got {name!r}")
    package = f"prefixloom_{name}"
    folder = args.into / package.replace("_", "-")
    if os.path.exists(folder):  # unlike Path.exists, this is False for a name that is too long
        raise InputError(f"{folder} exists; give another name, or another folder with --into")
    if importlib.util.find_spec(package) is not None:
        raise InputError(f"a package {package!r} is installed already; give another name")
    try:
        for file in FILES:
            path = folder / _renamed(file, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(_renamed((TEMPLATE / file).read_text(encoding="utf-8"), name), encoding="utf-8")
    except OSError as error:
        raise InputError(f"{folder} cannot be written: {error.strerror}") from error
    print(f"{folder}: a component {name!r} with Sinks(4) | Window(64). Next:\n")
    print(f"    pip install -e '{folder}[test]'")
    print(f"    prefixloom conformance {name}")
    print(f"    python -m pytest {folder}\n")
    print(f"Then make it yours: {package}/__init__.py says what is stored and what resuming needs, and")
    print("prefixloom_truth there what your layers read and write. docs/writing-a-plugin.md has the rest.")
    return 0


def _renamed(text: str, name: str) -> str:
    """Return a text of the template with another name in place of ``ring``."""
    text = text.replace("prefixloom-ring", f"prefixloom-{name.replace('_', '-')}")
    text = text.replace("RingComponent", "".join(word.title() for word in name.split("_")) + "Component")
    return re.sub(r"(?<![a-z])ring(?![a-z])", name, text)
