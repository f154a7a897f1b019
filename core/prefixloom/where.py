"""Where the caller's code asked for something: for reports of what was dropped without release."""

from __future__ import annotations

import traceback


def site() -> str:
    """The innermost frame outside of this package."""
    inside = __file__.rsplit("/", 1)[0]
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(inside):
            return f"{frame.filename}:{frame.lineno} in {frame.name}"
    return "unknown"
