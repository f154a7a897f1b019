"""A witness: it remembers what live sequences computed and checks that the cache restores exactly these bytes.

The witness reads the pools through page tables and knows no component. It names a page by everything that the page's
content may depend on: the component, the namespace, all tokens up to the page's end, and the tokens that the component
looks ahead. It names a state by the tokens up to its boundary. Several sequences may compute the same page with
different rounding, and the tree keeps one of these pages. A restored page or state must therefore equal what any one
of the sequences had.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from . import backdoor

if TYPE_CHECKING:
    from ...cache.cache import Cache
    from ...cache.sequence import Sequence


class Witness:
    """Records live content with ``live`` and compares restored content with ``restored``.

    Call ``live`` on a sequence before it publishes or closes; if checkpoints are kept while it runs, call it after
    every step. Call ``restored`` on a sequence that was just opened or has just published.

    ``compared`` counts the restored pages that were compared and ``states`` the states. ``wrong`` counts those of both
    that no live sequence ever had.
    """

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._seen: dict[bytes, set[bytes]] = {}
        self.compared = 0
        self.states = 0
        self.wrong = 0

    def live(self, sequence: Sequence) -> None:
        """Remember the complete committed pages and the running states of a sequence."""
        for name, content in self._pages(sequence, min(sequence.named, sequence.committed)):
            self._seen.setdefault(name, set()).add(content)
        waiting = self._waiting(sequence)
        for name, component, slot in (*self._running(sequence, sequence.committed), *self._singles(sequence)):
            if component not in waiting:
                self._seen.setdefault(name, set()).add(self._state(component, slot))

    def restored(self, sequence: Sequence) -> int:
        """Compare what a sequence got from the tree with what live sequences had. Return how many are wrong.

        A state that is not yet copied is read at the slot that it will be copied from.
        """
        wrong = 0
        for name, content in self._pages(sequence, sequence.published):
            self.compared += 1
            wrong += content not in self._seen.get(name, ())
        if sequence.committed == sequence.published:
            waiting = self._waiting(sequence)
            for name, component, slot in self._running(sequence, sequence.committed):
                source = waiting.get(component, slot)
                if source >= 0 and source not in sequence.rewind_slots(component):  # otherwise it is cleared or rewound
                    self.states += 1
                    wrong += self._state(component, source) not in self._seen.get(name, ())
        self.wrong += wrong
        return wrong

    def _pages(self, sequence: Sequence, upto: int) -> Iterator[tuple[bytes, bytes]]:
        """Yield (name, digest of the content) of every complete page before ``upto`` that is present."""
        tokens = sequence.tokens
        for part in self._cache.composition.parts:
            if not part.page_tokens:
                continue
            buffers = self._cache.pool(part.name).buffers
            ahead = part.manifest.lookahead
            name = hashlib.blake2b(f"{part.name}\0{sequence.namespace}\0".encode(), digest_size=16)
            seen = 0
            for page, slot in enumerate(sequence.pages(part.name)[: upto // part.page_tokens]):
                last = part.page_tokens * (page + 1) + ahead
                if last > tokens.count:
                    break  # the tokens that the component looks ahead at are not known yet
                name.update(tokens.part(seen, last))
                seen = last
                if slot >= 0:
                    content = hashlib.blake2b(digest_size=16)
                    for buffer in buffers.values():
                        content.update(_bytes(buffer[:, slot].contiguous().cpu()))
                    yield name.digest(), content.digest()

    def _singles(self, sequence: Sequence) -> Iterator[tuple[bytes, str, int]]:
        """Yield the states after each token of the last step, if the step was small enough that they were kept."""
        for lane, holding in backdoor.state_holdings(sequence):
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
        """Yield (name, component, slot) of every running state. The name is that of the state at ``boundary``."""
        if not 0 < boundary <= sequence.named:
            return  # nothing was computed, or its tokens are not known yet
        tokens = sequence.tokens.part(0, boundary)
        for part in self._cache.composition.parts:
            if not part.page_tokens:
                name = hashlib.blake2b(f"{part.name}\0{sequence.namespace}\0state\0".encode() + tokens, digest_size=16)
                yield name.digest(), part.name, sequence.pages(part.name)[0]

    def _waiting(self, sequence: Sequence) -> dict[str, int]:
        """Return the components whose running slot has no content yet, with the slot it will be copied from."""
        return {component: source for component, _, source in backdoor.fills(sequence)}

    def _state(self, component: str, slot: int) -> bytes:
        content = hashlib.blake2b(digest_size=16)
        for buffer in self._cache.pool(component).buffers.values():
            content.update(_bytes(buffer[:, slot].contiguous().cpu()))
        return content.digest()


def _bytes(tensor: Any) -> bytes:
    """Return the bytes of a contiguous CPU tensor without numpy, which may not be installed."""
    return ctypes.string_at(tensor.data_ptr(), tensor.numel() * tensor.element_size())
