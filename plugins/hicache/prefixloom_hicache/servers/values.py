"""Values: what a server must offer to be a store. It knows no record and no client.

A server that fails raises. What failed for one value alone is that value's answer, so that the others of its batch are
answered nevertheless. Time-outs are the client's: every call returns after a bounded time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol


class Full(Exception):
    """The server has no room for a value, and evicts nothing for it."""


class Busy(Exception):
    """Another client has begun to write a value, and it is not there yet."""


Failure = Exception
"""What failed for one value, as its answer."""


class Values(Protocol):
    """Values under names, on a server. Several threads may call it at the same time.

    A call has a batch of names, none of them twice, and answers for each, in their order. Names are of lower-case
    letters, digits, ``-`` and ``/``.

    ``largest``   the bytes of the largest value that the server takes
    """

    largest: int

    def read(self, names: Sequence[str], most: Sequence[int]) -> Sequence[memoryview | Failure | None]:
        """Return the beginning of each value, of at most ``most`` bytes; None: there is none.

        A value may be empty, although no store writes such ones. One that is removed while it is read may be any bytes.
        """

    def write(self, values: Sequence[tuple[str, Sequence[memoryview]]]) -> Sequence[bool | Failure]:
        """Write values, each given in parts, where there is none of that name. False: there is one, and it stays."""

    def present(self, names: Sequence[str]) -> Sequence[bool]:
        """Return whether there is a value of each name."""

    def remove(self, names: Sequence[str]) -> None:
        """Remove values. Some of the names may have none."""

    def note(self, name: str, text: str) -> None:
        """Keep a short text under a name, beside the values. There are few of them. ``Full``: there is no room."""

    def notes(self) -> Mapping[str, str]:
        """Return the texts that were noted, by any client."""

    def room(self) -> tuple[int, int | None]:
        """Return the bytes that the server uses, and those that it has; None: as many as are written, or not known."""

    def close(self) -> None:
        """Release everything. It may be called twice."""
