"""A witness: remembers what live sequences computed, and says whether what the cache restores is the same, bitwise.

It reads the pools through page tables, page by page and state by state, and knows no component. A page is named by
everything that its content may depend on: component, namespace and all tokens up to its end, and as many more as the
component looks ahead; a state by the tokens up to its boundary. Where several sequences computed the same, rounding may
differ between them and the tree keeps one; a restored page or state must equal what one of them had.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..tree.keys import TOKEN_BYTES

if TYPE_CHECKING:
    from ..cache.cache import Cache
    from ..cache.sequence import Sequence


class Witness:
    """Call ``live`` on a sequence after its steps, at least before it publishes or closes (where checkpoints are kept
    while it runs: after every step), ``restored`` on one that was just opened or has just published.

    ``compared`` counts the restored pages that were looked at and ``states`` the states, ``wrong`` those of both that
    no live sequence ever had.
    """

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._seen: dict[bytes, set[bytes]] = {}
        self.compared = 0
        self.states = 0
        self.wrong = 0

    def live(self, sequence: Sequence) -> None:
        """Remember the complete pages that are committed, and the running states."""
        for name, content in self._pages(sequence, min(sequence.named, sequence.committed)):
            self._seen.setdefault(name, set()).add(content)
        waiting = self._waiting(sequence)
        for name, component, slot in (*self._running(sequence, sequence.committed), *self._singles(sequence)):
            if component not in waiting:
                self._seen.setdefault(name, set()).add(self._state(component, slot))

    def restored(self, sequence: Sequence) -> int:
        """Compare what the sequence has of the tree with what live sequences had; how many pages and states are wrong.

        A state that was not copied yet is looked at where it will be copied from.
        """
        wrong = 0
        for name, content in self._pages(sequence, sequence.published):
            self.compared += 1
            wrong += content not in self._seen.get(name, ())
        if sequence.committed == sequence.published:
            waiting = self._waiting(sequence)
            for name, component, slot in self._running(sequence, sequence.committed):
                source = waiting.get(component, slot)
                if source >= 0 and source not in sequence.rewind_slots(component):  # else cleared, or taken back
                    self.states += 1
                    wrong += self._state(component, source) not in self._seen.get(name, ())
        self.wrong += wrong
        return wrong

    def _pages(self, sequence: Sequence, upto: int) -> Iterator[tuple[bytes, bytes]]:
        """(name, digest of the content) of every complete page before ``upto`` that is present."""
        tokens = bytes(sequence.tokens)
        for part in self._cache.composition.parts:
            if not part.page_tokens:
                continue
            buffers = self._cache.pool(part.name).buffers
            ahead = part.manifest.lookahead
            name = hashlib.blake2b(f"{part.name}\0{sequence.namespace}\0".encode(), digest_size=16)
            seen = 0
            for page, slot in enumerate(sequence.pages(part.name)[: upto // part.page_tokens]):
                last = TOKEN_BYTES * (part.page_tokens * (page + 1) + ahead)
                if last > len(tokens):
                    break  # it is not known yet what it must be
                name.update(tokens[seen:last])
                seen = last
                if slot >= 0:
                    content = hashlib.blake2b(digest_size=16)
                    for buffer in buffers.values():
                        content.update(_bytes(buffer[:, slot].contiguous().cpu()))
                    yield name.digest(), content.digest()

    def _singles(self, sequence: Sequence) -> Iterator[tuple[bytes, str, int]]:
        """The states after each token of the last step, where it was so small that they were kept."""
        for lane, holding in sequence._states:
            if holding.steps_from >= 0:
                for i, slot in enumerate(holding.steps):
                    boundary = holding.steps_from + i + 1
                    if boundary <= sequence.committed:
                        yield from (
                            (name, lane.name, slot)
                            for name, component, _ in self._running(sequence, boundary)
                            if component == lane.name
                        )

    def _running(self, sequence: Sequence, boundary: int) -> Iterator[tuple[bytes, str, int]]:
        """(name, component, slot) of every running state; the name is that of the state at ``boundary``."""
        if not 0 < boundary <= sequence.named:
            return  # nothing was computed, or its tokens are not known yet
        tokens = bytes(sequence.tokens)[: TOKEN_BYTES * boundary]
        for part in self._cache.composition.parts:
            if not part.page_tokens:
                name = hashlib.blake2b(f"{part.name}\0{sequence.namespace}\0state\0".encode() + tokens, digest_size=16)
                yield name.digest(), part.name, sequence.pages(part.name)[0]

    def _waiting(self, sequence: Sequence) -> dict[str, int]:
        """The components whose running slot has no content yet, with the slot that it will be copied from."""
        return {lane.name: source for lane, _, _, source in sequence._fills}

    def _state(self, component: str, slot: int) -> bytes:
        content = hashlib.blake2b(digest_size=16)
        for buffer in self._cache.pool(component).buffers.values():
            content.update(_bytes(buffer[:, slot].contiguous().cpu()))
        return content.digest()


def _bytes(tensor: Any) -> bytes:
    """The memory of a contiguous CPU tensor; numpy, which would have a word for it, may not be installed."""
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())
