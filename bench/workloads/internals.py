"""The internals of prefixloom that a few micro-benchmarks measure, such as copies between pools.

This is the only place that reaches behind the public names. A name is looked up by its definition, in whichever module
it stands, because modules move between commits and a workload runs on other commits too.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import prefixloom


@cache
def internal(name: str) -> Any:
    """Return the class, function or constant of this name at the top level of a module of prefixloom."""
    (package,) = map(Path, prefixloom.__path__)
    definition = re.compile(rf"^(class|def) {name}\b|^{name}\b[^=\n]*= ", re.MULTILINE)
    for source in sorted(package.rglob("*.py")):
        module = source.relative_to(package.parent).with_suffix("")
        if definition.search(source.read_text()) and "testing" not in module.parts:
            return getattr(import_module(".".join(module.parts).removesuffix(".__init__")), name)
    raise LookupError(f"no module of prefixloom defines {name}; see bench/workloads/internals.py")


@contextmanager
def replaced(name: str, substitute: Callable[..., Any]) -> Iterator[None]:
    """Make all modules of prefixloom call ``substitute`` in this block instead of the internal function ``name``."""
    function = internal(name)
    users = [module for path, module in sys.modules.items() if path.split(".")[0].startswith("prefixloom")]
    users = [module for module in users if vars(module).get(name) is function]
    for module in users:
        setattr(module, name, substitute)
    try:
        yield
    finally:
        for module in users:
            setattr(module, name, function)
