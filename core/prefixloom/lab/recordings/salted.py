"""Salted hashes of pages: which prompts share what, for a file that must not tell any text.

The hash of a page is keyed with a secret, and covers the page and everything before it. With a lookahead it covers the
tokens that the page's content looks at as well. So two prompts have a hash in common exactly where a cache shares.
"""

from __future__ import annotations

from hashlib import blake2b

from ...tree.keys import TOKEN_BYTES, Span
from ..traces.recorded import HASH_BYTES


class Salted:
    """Makes the hashes of one recording."""

    __slots__ = ("_keyed", "_more", "page_bytes")

    def __init__(self, page: int, lookahead: int, salt: bytes) -> None:
        self.page_bytes = page * TOKEN_BYTES
        self._more = lookahead * TOKEN_BYTES
        self._keyed = blake2b(digest_size=HASH_BYTES, key=salt)

    def pages(self, size: int) -> int:
        """How many whole pages so many bytes of tokens have, with what their content looks at."""
        return max(0, size - self._more) // self.page_bytes

    def name(self, namespace: str) -> str:
        """A namespace without its name. The empty one stays empty."""
        return self.root(namespace).hex() if namespace else ""

    def root(self, namespace: str) -> bytes:
        """What the first page of a namespace follows."""
        return self._of(namespace.encode())

    def link(self, link: bytes, tokens: bytearray, pages: int, first: int, spans: tuple[Span, ...]) -> bytes:
        """The hashes of ``pages`` pages of ``tokens``, one behind the other. ``link`` is the hash of the page before.

        ``first`` is the number of the first page in the prompt, in which ``spans`` have extra keys.
        """
        size, more, copy = self.page_bytes, self._more, self._keyed.copy
        out = []
        for number in range(pages):
            at = number * size
            hashed = copy()
            hashed.update(link)
            hashed.update(tokens[at : at + size + more])
            if spans:
                start = (first + number) * size // TOKEN_BYTES
                hashed.update(_extra(spans, start, start + (size + more) // TOKEN_BYTES))
            link = hashed.digest()
            out.append(link)
        return b"".join(out)

    def _of(self, content: bytes) -> bytes:
        hashed = self._keyed.copy()
        hashed.update(content)
        return hashed.digest()


def _extra(spans: tuple[Span, ...], start: int, end: int) -> bytes:
    """The extra keys of the positions [start, end), by their kind as well: 1 and True differ."""
    return b"".join(
        f"{max(low, start) - start}:{min(high, end) - start}:{low < start}:{type(key).__name__}:{key!r};".encode()
        for low, high, key in spans
        if low < end and high > start
    )
