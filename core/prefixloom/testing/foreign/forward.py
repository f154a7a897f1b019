"""A simulated forward pass over an adapted cache: it reads what the layers read, and writes what they write.

The number of an entry stands for the namespace and all tokens up to the entry's own, so a wrong number tells whose
content was read. The pass itself decides nothing: all slots come from the adapter's tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from ...script import require
from ..inside.memory import POISON, STRANGE
from ..inside.names import Names
from .contract import ABSENT, AdaptedComponent, ForeignCache, PassPart


@attrs.define(eq=False)
class ForeignRequest:
    """A request as the kit knows it: its whole text, and how far it was scheduled and computed.

    ``ids``: the numbers of its prefixes; ``ids[n]`` stands for the first n tokens. ``text``: the prompt, and what the
    model is going to sample.
    """

    label: str
    namespace: str
    prompt: int
    text: tuple[int, ...]
    ids: list[int]
    known: int
    """How many of its tokens the engine knows: the prompt, and what was sampled so far."""
    handle: Any = None
    admitted: bool = False
    hit: int = 0
    scheduled: int = 0
    ran: int = 0
    ending: bool = False
    over: bool = False

    @property
    def in_prompt(self) -> bool:
        return self.scheduled < self.prompt

    @property
    def midway(self) -> bool:
        """Whether a part of its prompt was scheduled, and another part was not."""
        return self.admitted and not self.over and self.in_prompt


class Content:
    """What the entries of one cache must hold, and what they do hold."""

    def __init__(self, cache: ForeignCache) -> None:
        self.cache = cache
        self.names = Names()
        self._units = {pool: frozenset(units) for pool, units in cache.pools.items()}
        self._first: dict[int, str] = {
            0: "no token at all",
            POISON: "nothing, as it was free meanwhile",
            STRANGE: "nothing that was written there",
        }

    def request(self, label: str, namespace: str, prompt: Sequence[int], answer: Sequence[int]) -> ForeignRequest:
        text = (*prompt, *answer)
        ids = self.names.prefixes(namespace, text)
        for length, number in enumerate(ids):
            self._first.setdefault(number, f"the first {length} tokens of {label}")
        return ForeignRequest(label, namespace, len(prompt), text, ids, len(prompt))

    def said(self, number: int) -> str:
        return self._first.get(number, f"an unknown number, {number}")

    def check(self, component: AdaptedComponent, slot: int, wanted: int, reader: str) -> None:
        """Check that a slot holds what is wanted. ``reader`` says who reads it and why."""
        require(slot != ABSENT, "absent", "%s, and there is no slot", reader)
        known = slot // component.entries in self._units[component.pool]
        require(known, "absent", "%s, in slot %s, which the pool does not have", reader, slot)
        found = self.cache.read(component.name, slot)
        said = "%s, in slot %s: it stands for %s, not for %s"
        require(found == wanted, "content", said, reader, slot, self.said(found), self.said(wanted))

    def check_needs(
        self, request: ForeignRequest, n: int, slots: Mapping[str, Sequence[int]], seen: set[tuple[str, int]]
    ) -> None:
        """Check all entries that the token at ``n`` reads, through the given tables, but for those in ``seen``."""
        for component in self.cache.components:
            if component.is_state:
                continue
            name, table = component.name, slots[component.name]
            for first, end in component.reach.needs(n):
                for position in range(first, end):
                    if (name, position) in seen:
                        continue
                    seen.add((name, position))
                    reader = f"{request.label}, for the token at {n}, reads {name!r} of the token at {position}"
                    require(position < len(table), "absent", "%s, and its table ends before that", reader)
                    self.check(component, table[position], request.ids[position + 1], reader)

    def run(self, pieces: Sequence[tuple[ForeignRequest, PassPart]]) -> None:
        """Run the layers of one pass. All layers write before they read; states are read before any is written."""
        for request, part in pieces:
            for component in self.cache.components:
                if component.is_state and not request.over:
                    source = part.states[component.name].source
                    reader = f"{request.label} goes on at {part.start} from the state of {component.name!r}"
                    if source is not None:
                        self.check(component, source, request.ids[part.start], reader)
                    require(source is not None or not part.start, "absent", "%s, and there is none", reader)
        for request, part in pieces:
            for component in self.cache.components:
                if component.is_state:
                    for slot, boundary in part.states[component.name].writes:
                        self.cache.write(component.name, slot, request.ids[boundary])
                    continue
                table = part.slots[component.name]
                for position in range(part.start, part.end):
                    if table[position] != ABSENT:
                        self.cache.write(component.name, table[position], request.ids[position + 1])
        for request, part in pieces:
            if not request.over:
                seen: set[tuple[str, int]] = set()
                for n in range(part.start, part.end):
                    self.check_needs(request, n, part.slots, seen)
                request.ran = part.end

    def poison(self, component: AdaptedComponent, unit: int) -> None:
        """Overwrite one unit of a component's pool."""
        for entry in range(component.entries):
            self.cache.write(component.name, unit * component.entries + entry, POISON)
