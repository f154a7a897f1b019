"""The identity of a page of a prefix: a digest of what the page is and of all pages before it.

Stores, histories, events, routers, recordings and simulations all name pages by it. So what one of them takes for the
same page is the same for the others, and for the tree.
"""

from __future__ import annotations

import hashlib
import json

from .tokens import Tokens

DIGEST_BYTES = 32


class PageChain:
    """Names the pages of prefixes by digests, each of which covers the page, its extra keys and the page before.

    With a lookahead, the content of a page depends on the tokens that follow it, so the digest covers these as well.
    ``salt`` is a secret without which nobody can compute a digest from the tokens.
    """

    __slots__ = ("_salt", "lookahead", "page")

    def __init__(self, page: int, lookahead: int = 0, salt: bytes = b"") -> None:
        self.page, self.lookahead = page, lookahead
        self._salt = salt

    def root(self, namespace: str) -> bytes:
        """Return the digest before the first page of a namespace."""
        said = json.dumps([namespace, self.page, self.lookahead]).encode()  # any text, even half a surrogate pair
        return hashlib.blake2b(said, digest_size=DIGEST_BYTES, key=self._salt, person=b"loom.namespace").digest()

    def whole(self, tokens: int) -> int:
        """Return how many pages so many tokens complete, with the tokens that the last of them looks at."""
        return max(0, tokens - self.lookahead) // self.page

    def pages(self, tokens: Tokens, above: bytes, first: int = 0, end: int | None = None) -> list[bytes]:
        """Return the digests of the pages [first, end) of ``tokens``, which follow the page or the root ``above``."""
        page, width = self.page, self.page + self.lookahead
        found = []
        for at in range(first * page, (self.whole(tokens.count) if end is None else end) * page, page):
            hashed = hashlib.blake2b(above, digest_size=DIGEST_BYTES, person=b"loom.page")
            hashed.update(tokens.identity(at, at + width))
            above = hashed.digest()
            found.append(above)
        return found

    def numbers(self, tokens: Tokens, namespace: str) -> list[int]:
        """Return a number for each page of ``tokens``, for tables that need no more."""
        return [self.number(digest) for digest in self.pages(tokens, self.root(namespace))]

    @staticmethod
    def number(digest: bytes) -> int:
        """Return a digest as a signed number of 64 bits."""
        return int.from_bytes(digest[:8], "big", signed=True)
