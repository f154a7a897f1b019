"""Handles: what stands for slots or protection, once. A copy would give the same slots back twice."""

from __future__ import annotations

from typing import Any, NoReturn

from .errors import ProtocolError


class Handle:
    """Something that can be moved or ended, and neither copied nor pickled."""

    __slots__ = ()

    def __copy__(self) -> NoReturn:
        raise ProtocolError(f"{type(self).__name__} stands for what it holds and cannot be copied")

    def __deepcopy__(self, memo: Any) -> NoReturn:
        self.__copy__()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise ProtocolError(f"{type(self).__name__} stands for what it holds here and cannot be pickled")
