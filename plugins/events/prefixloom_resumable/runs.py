"""Run: pages of one path that follow each other, where no other path begins or ends between them.

What is known of the pages are bits, one for each: so an operation on a run of thousands of pages costs little more than
one on a single page. Page 0 of a run has the lowest bit.

It knows no cache, no component and no event.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs

from prefixloom import Tokens, encode


class Run:
    """Some pages of a path, below those of its ``parent``. The root of a namespace has no pages and no parent.

    ``label``      what its root was given: it belongs to the namespace
    ``identity``   of its first page, among the children of its parent
    ``first``      how many pages of the path lie above it
    ``page``       how many tokens a page has
    ``count``      its pages
    ``tokens``     those of its pages, as a piece of the path, and with a lookahead of L the L that follow
    ``names``      of its first pages, for whoever follows them: what an engine calls each
    ``kept``       by holder: one bit for each page of the component that is there
    ``resumable``  by level: one bit for each page at whose end a request can resume
    ``leads``      by level: how many of its pages, from the first on, lead to a boundary that can be resumed at
    ``branches``   by level: how many of its children lead to one
    ``live``       the pages of which something is left, here or below. Those behind are cut off later
    ``before``     what it was when the changes began that are being followed; None if nothing of it has changed
    """

    __slots__ = (
        "before", "branches", "children", "count", "first", "identity", "kept", "label", "leads", "live", "names",
        "page", "parent", "resumable", "tokens",
    )  # fmt: skip

    def __init__(self, parent: Run | None, label: Any, identity: Any, page: int, holders: int, levels: int) -> None:
        self.parent = parent
        self.page = page
        self.label = label
        self.identity = identity
        self.first: int = 0 if parent is None else parent.end // page
        self.count = self.live = 0
        self.tokens: Tokens = encode(())
        self.names: list[Any] = []
        self.children: dict[Any, Run] = {}
        self.kept = [0] * holders
        self.resumable = [0] * levels
        self.leads = [0] * levels
        self.branches = [0] * levels
        self.before: Before | None = None

    @property
    def end(self) -> int:
        """The number of tokens that the path has up to its end."""
        return (self.first + self.count) * self.page

    def name_above(self, page: int) -> Any:
        """Return the name of the page before a page of this run; None if there is none."""
        if page:
            return self.names[page - 1]
        parent = self.parent
        assert parent is not None
        return None if parent.parent is None else parent.names[parent.count - 1]


@attrs.frozen
class Before:
    """What a run was."""

    kept: tuple[int, ...]
    resumable: tuple[int, ...]
    leads: tuple[int, ...]

    def halves(self, page: int, parts: tuple[int, ...]) -> tuple[Before, Before]:
        """Split at ``page`` what this run was. ``parts``: by holder, bits of a page."""
        low = [halved(bits, page * each) for bits, each in zip(self.kept, parts, strict=True)]
        can = [halved(bits, page) for bits in self.resumable]
        return (
            Before(tuple(a for a, _ in low), tuple(a for a, _ in can), tuple(min(each, page) for each in self.leads)),
            Before(
                tuple(b for _, b in low), tuple(b for _, b in can), tuple(max(0, each - page) for each in self.leads)
            ),
        )


def ones(count: int) -> int:
    return (1 << count) - 1


def halved(bits: int, at: int) -> tuple[int, int]:
    """Split bits into the lowest ``at`` and the others."""
    return bits & ones(at), bits >> at


def stretches(bits: int) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each stretch of set bits, the lowest first."""
    at = 0
    while bits:
        zeros = (bits & -bits).bit_length() - 1
        bits >>= zeros
        count = (~bits & (bits + 1)).bit_length() - 1
        yield at + zeros, at + zeros + count
        bits >>= count
        at += zeros + count
