"""Requests: what a trace asks of a cache, one prompt after the other.

A trace rarely has tokens. It names blocks: equal ids at equal places mean equal text. A ``BlockPrompt`` makes tokens
from the ids, so that two prompts share exactly the blocks that the trace says. A ``TokenPrompt`` has tokens of its own.
Nothing here knows a cache, a file or a clock.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import attrs

from ...errors import InputError
from ...keys.pages import PageChain
from ...keys.tokens import Tokens, encode

BASE = 1 << 31
"""Tokens of a trace that names blocks lie below."""
MOST_ID = (BASE - 2) * BASE
"""Ids of blocks lie below: an id is written as two tokens. A block of one token takes ids below ``BASE``."""
OWN = BASE - 1
"""The second token of text that belongs to one request alone."""


class BlockPrompt:
    """A prompt of ``length`` tokens in blocks of ``size``: ``ids`` name them from the front on.

    The last id may stand for a part of a block. Tokens behind the last whole block that have no id are the request's
    own: ``number`` tells them from those of all other requests.

    Block ids may be chained, so that an id stands for everything before it as well, or name a block's own text. Both
    mean the same here, since prompts share what they have in common from the front.
    """

    __slots__ = ("count", "ids", "number", "size")

    def __init__(self, ids: Sequence[int], size: int, length: int, number: int = 0) -> None:
        if size < 1 or length < 0 or not 0 <= number < BASE:
            raise InputError(f"a prompt of {length} tokens cannot lie in blocks of {size} tokens (request {number})")
        if len(ids) > -(-length // size):
            raise InputError(f"{len(ids)} ids are too many for {length} tokens in blocks of {size}")
        self.ids = check_ids(ids, MOST_ID if size > 1 else BASE)
        self.size = size
        self.count = length
        self.number = number

    def tokens(self) -> Tokens:
        """Return the prompt's tokens. The first two of a block are its id; the rest are equal in all blocks."""
        size, count = self.size, self.count
        words = array("q", bytes(8 * count))
        ids = self.ids
        if ids and max(ids) < BASE:
            words[0 : len(ids) * size : size] = array("q", ids)
        elif ids:
            words[0 : len(ids) * size : size] = array("q", [each % BASE for each in ids])
            highs = array("q", [each // BASE for each in ids])
            words[1 : len(ids) * size : size] = highs[: -(-(count - 1) // size)]
        named = len(ids) * size
        if named < count:  # text without an id
            words[named] = self.number
            if named + 1 < count:
                words[named + 1] = OWN
        elif named > count > named - size + 2:  # a part of a block is not the whole of it
            words[named - size + 2] = count % size
        return encode(words)

    def chain(self, namespace: str, page: int) -> tuple[int, list[int]]:
        """Return (tokens of a link, links): a number for each block, which stands for all text up to its end.

        Two prompts have a link in common exactly where they agree that far.
        """
        link = hash(namespace)
        links = []
        for each in self.ids:
            link = hash((link, each))
            links.append(link)
        if len(links) * self.size > self.count:
            links[-1] = hash((link, self.count))
        return self.size, links

    def __repr__(self) -> str:
        return f"<{self.count} tokens in {len(self.ids)} blocks of {self.size}>"


class TokenPrompt:
    """A prompt whose tokens are known."""

    __slots__ = ("count", "encoded")

    def __init__(self, encoded: Tokens) -> None:
        self.encoded = encoded
        self.count = encoded.count

    def tokens(self) -> Tokens:
        return self.encoded

    def chain(self, namespace: str, page: int) -> tuple[int, list[int]]:
        """Return (tokens of a link, links): a number for each whole page, which stands for all text up to its end."""
        return page, PageChain(page).numbers(self.encoded, namespace)

    def __repr__(self) -> str:
        return f"<{self.count} tokens>"


Prompt = BlockPrompt | TokenPrompt


@attrs.frozen
class LabRequest:
    """One request of a trace.

    ``at``         when it arrives, in seconds from the trace's beginning
    ``prompt``     what it asks
    ``output``     tokens of its answer
    ``whole``      the prompt and its answer behind it, if the trace knows the answer: a later prompt may begin so
    ``namespace``  where its prefixes are shared
    ``priority``   what an eviction policy may go by
    ``ttl``        seconds after its end until which what it uses is wanted; None: always
    ``session``    the conversation that it belongs to, if the trace says it
    ``line``       where it stands in its file
    """

    at: float
    prompt: Prompt
    output: int = 0
    whole: Prompt | None = None
    namespace: str = ""
    priority: int = 0
    ttl: float | None = None
    session: str = ""
    line: int = 0


def check_ids(ids: Sequence[int], most: int) -> list[int]:
    """Return ``ids`` as a list. InputError: one is no whole number from 0 up and below ``most``."""
    try:
        whole = array("q", ids)
    except (TypeError, OverflowError):
        whole = array("q")
    if len(whole) != len(ids) or (whole and not (min(whole) >= 0 and max(whole) < most)):
        wrong = next((each for each in ids if each.__class__ is not int or not 0 <= each < most), None)
        raise InputError(f"ids of blocks are whole numbers from 0 to {most - 1}, got {wrong!r}")
    return ids if isinstance(ids, list) else list(ids)
