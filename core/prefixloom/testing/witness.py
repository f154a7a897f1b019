"""A witness: remembers what live sequences computed, and says whether what the cache restores is the same, bitwise.

It reads the pools through page tables, page by page, and knows no component. A page is named by everything that its
content may depend on: component, namespace and all tokens up to its end. Where several sequences computed the same
page, rounding may differ between them and the tree keeps one; a restored page must equal what one of them had.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..keys import TOKEN_BYTES

if TYPE_CHECKING:
    from ..cache import Cache
    from ..sequence import Sequence


class Witness:
    """Call ``live`` on a sequence before it publishes or closes, ``restored`` on one that was just opened or
    has just published.

    ``compared`` counts the restored pages that were looked at, ``wrong`` those that no live sequence ever had.
    """

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._seen: dict[bytes, set[bytes]] = {}
        self.compared = 0
        self.wrong = 0

    def live(self, sequence: Sequence) -> None:
        """Remember the complete pages that are committed."""
        for name, content in self._pages(sequence, min(sequence.named, sequence.committed)):
            self._seen.setdefault(name, set()).add(content)

    def restored(self, sequence: Sequence) -> int:
        """Compare the pages that the sequence reads in the tree with what live sequences had; how many are wrong."""
        wrong = 0
        for name, content in self._pages(sequence, sequence.published):
            self.compared += 1
            wrong += content not in self._seen.get(name, ())
        self.wrong += wrong
        return wrong

    def _pages(self, sequence: Sequence, upto: int) -> Iterator[tuple[bytes, bytes]]:
        """(name, digest of the content) of every complete page before ``upto`` that is present."""
        tokens = bytes(sequence.tokens)
        for part in self._cache.composition.parts:
            if not part.page_tokens:
                continue
            buffers = self._cache.pool(part.name).buffers
            name = hashlib.blake2b(f"{part.name}\0{sequence.namespace}\0".encode(), digest_size=16)
            for page, slot in enumerate(sequence.pages(part.name)[: upto // part.page_tokens]):
                first, last = (TOKEN_BYTES * part.page_tokens * at for at in (page, page + 1))
                name.update(tokens[first:last])
                if slot >= 0:
                    content = hashlib.blake2b(digest_size=16)
                    for buffer in buffers.values():
                        content.update(_bytes(buffer[:, slot].contiguous().cpu()))
                    yield name.digest(), content.digest()


def _bytes(tensor: Any) -> bytes:
    """The memory of a contiguous CPU tensor; numpy, which would have a word for it, may not be installed."""
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())
