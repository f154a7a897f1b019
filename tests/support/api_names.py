"""The public names of prefixloom with their signatures, as docs/api.txt has them, and what CHANGELOG.md says of them.

    python -m tests.support.api_names

writes docs/api.txt anew. tests/docs/test_api_names.py compares it with the code, and the code with the changelog: under
"### Public names" each release lists what was added, removed and changed, and the digest of the signatures.
"""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import prefixloom
from prefixloom import connections, lab, storage, testing
from prefixloom.contract import hookspecs
from tests.support.names import ADDRESS

ROOT = Path(__file__).resolve().parents[2]
LISTED = ROOT / "docs" / "api.txt"
CHANGELOG = ROOT / "CHANGELOG.md"
MODULES = (prefixloom, connections, lab, storage, testing)


def signature(value: Any) -> str:
    """The parameters and what comes back, as far as the code says it."""
    try:
        return ADDRESS.sub("", str(inspect.signature(value)))
    except (TypeError, ValueError):
        return ""


INTERNAL = "no part of the public interface"
"""What the docstring of a public-looking name says that is only for the packages of this repository."""


def is_internal(value: Any) -> bool:
    return INTERNAL in " ".join((getattr(value, "__doc__", None) or "").split())


def members(name: str, value: Any) -> Iterator[str]:
    """A name, and of a class that is ours its public methods and properties."""
    if inspect.isclass(value):
        made = getattr(value.__init__, "__module__", "")
        ours = made.partition(".")[0] == "prefixloom" or hasattr(value, "__attrs_attrs__")
        yield f"class {name}{signature(value) if ours else ''}"  # what Python says of its own differs by version
        for base in reversed(value.__mro__):
            if base.__module__.partition(".")[0] != "prefixloom":
                continue
            for member, found in sorted(vars(base).items()):
                if member.startswith("_") or is_internal(found):
                    continue
                if inspect.isfunction(found) or isinstance(found, classmethod | staticmethod):
                    yield f"{name}.{member}{signature(getattr(value, member))}"
                elif isinstance(found, property) or inspect.ismemberdescriptor(found):
                    yield f"{name}.{member}"
    elif callable(value) and not isinstance(value, type):
        yield f"{name}{signature(value)}"
    else:
        yield name


def names() -> list[str]:
    """Every public name: ``prefixloom.X``, ``prefixloom.storage.X``, ``prefixloom.testing.X``, and every hook."""
    found = [f"{module.__name__}.{name}" for module in MODULES for name in sorted(module.__all__)]
    hooks = [
        f"hook {name}"
        for specs in (hookspecs.RegistrySpecs, hookspecs.ComponentSpecs)
        for name in vars(specs)
        if not name.startswith("_")
    ]
    return found + hooks


def told() -> str:
    """docs/api.txt as it should be."""
    lines = [f"# version {hookspecs.API_VERSION} of the plugin contract; written by tests/support/api_names.py"]
    for module in MODULES:
        for name in sorted(module.__all__):
            lines += dict.fromkeys(members(f"{module.__name__}.{name}", getattr(module, name)))
    for specs in (hookspecs.RegistrySpecs, hookspecs.ComponentSpecs):
        lines += [f"hook {name}{signature(spec)}" for name, spec in vars(specs).items() if not name.startswith("_")]
    return "\n".join(lines) + "\n"


def digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def releases(changelog: str) -> list[str]:
    """The paragraphs under "### Public names" of every release, the oldest first."""
    found = re.findall(r"^### Public names\n(.*?)(?=^##|\Z)", changelog, re.MULTILINE | re.DOTALL)
    return found[::-1]


def replayed(changelog: str) -> tuple[set[str], str, list[str]]:
    """The names that the changelog's releases come to, the newest digest, and what they say that cannot be."""
    known: set[str] = set()
    wrong, newest = [], ""
    for release in releases(changelog):
        for verb, listed in re.findall(r"^- (Added|Removed|Changed)(.*?)(?=^- |\Z)", release, re.MULTILINE | re.DOTALL):
            for name in qualified(listed):
                if (name in known) is (verb == "Added"):
                    wrong.append(f"{verb} {name}")
                known = known - {name} if verb == "Removed" else known | {name}
        newest = "".join(re.findall(r"^- Signatures: `(\w+)`", release, re.MULTILINE)[-1:])
    return known, newest, wrong


def qualified(listed: str) -> list[str]:
    """ " of `prefixloom.storage`: `Key`, ..." as whole names; " hooks: `x`" as those of hooks."""
    where, _, rest = listed.partition(":")
    home = re.search(r"`([\w.]+)`", where)
    prefix = f"{home[1]}." if home else "hook "
    return [prefix + name for name in re.findall(r"`(\w+)`", rest)]


if __name__ == "__main__":
    LISTED.write_text(told())
    print(f"CHANGELOG.md must say under '### Public names': Signatures: `{digest(told())}`")
