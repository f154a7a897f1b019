"""Handles: what stands for slots or protection, once. A copy would give the same slots back twice.

Where the caller's code asked for something: for reports of what was dropped without release.
"""

from __future__ import annotations

import traceback
from typing import Any, NoReturn

from ..errors import ProtocolError


class Handle:
    """Something that can be moved or ended, and neither copied nor pickled."""

    __slots__ = ()

    def __copy__(self) -> NoReturn:
        raise ProtocolError(f"{type(self).__name__} stands for what it holds and cannot be copied")

    def __deepcopy__(self, memo: Any) -> NoReturn:
        self.__copy__()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ProtocolError(f"{type(self).__name__} stands for what it holds here and cannot be pickled")


def site() -> str:
    """The innermost frame outside of this package."""
    inside = __file__.rsplit("/", 2)[0]
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(inside):
            return f"{frame.filename}:{frame.lineno} in {frame.name}"
    return "unknown"
