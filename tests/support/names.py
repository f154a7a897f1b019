"""Names of parameters that are the same in every process, as pytest-xdist needs them."""

from __future__ import annotations

import re

ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def stable(value: object) -> str:
    """The ``repr`` of a value without the address that Python puts into some."""
    return ADDRESS.sub("", repr(value))
