"""RebuiltCache: what is cached, rebuilt from events alone.

It answers what a router asks: how many of these tokens could be resumed from there? It also says which events do not
fit what came before, so that a stream can be verified.

It knows no socket and no cache. First read ``RebuiltCache.apply``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from prefixloom import PageChain, encode

from .hashes import PageLabel, block_hash, root_digest
from .wire import PAGES, AllBlocksCleared, BlockRemoved, BlockStored, KVEvent

MOST_FAULTS = 100
"""Faults that are kept in words. All are counted."""


class RebuiltCache:
    """The blocks of each group, by their hashes.

    ``blocks``  by group and medium, the hashes that are cached
    ``names``   by group, the component that it is for; "" for the boundaries. The first group has none
    ``faults``  sentences: events that do not fit what came before
    """

    def __init__(self) -> None:
        self.blocks: dict[tuple[int, str], set[int]] = {}
        self.names: dict[int, str] = {}
        self.faults: list[str] = []
        self.fault_count = 0
        self.events = 0
        self._page = 0
        self._lookahead = 0
        self._sizes: dict[int, int] = {}
        """By group, the tokens of a block."""

    # ------------------------------------------------------------ following
    def apply(self, events: Iterable[KVEvent]) -> None:
        """Follow the events of one batch."""
        for event in events:
            self.events += 1
            if isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                self._remove(event)
            elif isinstance(event, AllBlocksCleared):
                self.blocks.clear()

    def _store(self, event: BlockStored) -> None:
        group = event.group_idx or PAGES
        blocks = self._blocks(group, event.medium)
        self._sizes[group] = event.block_size
        if event.component is not None:
            self.names[group] = event.component
        elif event.boundaries:
            self.names[group] = ""
            self._check(self._blocks(PAGES, event.medium).issuperset(event.block_hashes), event, "of no page")
        else:
            self._page = event.block_size
            if event.lookahead_token_ids:
                self._lookahead = len(event.lookahead_token_ids[0])
            above = event.parent_block_hash
            self._check(above is None or above in blocks, event, "below a page that is not there")
        whole = event.boundaries or len(event.token_ids) == event.block_size * len(event.block_hashes)
        self._check(whole, event, "with tokens of another number")
        self._check(blocks.isdisjoint(event.block_hashes), event, "twice")
        blocks.update(event.block_hashes)

    def _remove(self, event: BlockRemoved) -> None:
        blocks = self._blocks(event.group_idx or PAGES, event.medium)
        if not blocks.issuperset(event.block_hashes):
            self._fault(f"{len(event.block_hashes)} blocks are removed that were not there, of group {event.group_idx}")
        blocks.difference_update(event.block_hashes)

    def _check(self, right: bool, event: BlockStored, what: str) -> None:
        if not right:
            self._fault(f"{len(event.block_hashes)} blocks are stored {what}, of group {event.group_idx}")

    def _fault(self, what: str) -> None:
        self.fault_count += 1
        if len(self.faults) < MOST_FAULTS:
            self.faults.append(what)

    def _blocks(self, group: int, medium: str | None) -> set[int]:
        return self.blocks.setdefault((group, medium or "GPU"), set())

    # ------------------------------------------------------------ answering
    def pages(self, tokens: Any, *, medium: str = "GPU", group: int = PAGES, **named: Any) -> int:
        """Return how many of ``tokens`` one group announces. By default the first: many routers know no other.

        ``named``: ``salt``, ``lora_name`` and ``extra``, as in ``boundary``. The first group says how long a page is.
        Until it has had a page, the answer is 0.
        """
        blocks = self.blocks.get((group, medium), set())
        size = self._sizes.get(group, self._page)
        found = 0
        for _, digest in self._digests(tokens, **named):
            for part in range(self._page // size):
                if block_hash(digest, part if size < self._page else -1) not in blocks:
                    return found
                found += size
        return found

    def boundary(self, tokens: Any, *, medium: str = "GPU", **named: Any) -> int:
        """Return the deepest boundary of ``tokens`` to resume at, as ``Cache.peek`` does.

        With ``medium="CPU"`` pages below the device count as well, as in ``MatchPlan.restorable``. ``salt`` and
        ``lora_name`` are those of the request's events, ``extra`` the (start, end, key) spans of its extra keys.
        """
        group = next((group for group, name in self.names.items() if name == ""), None)
        if group is None:
            return 0
        pages, resumable = self.blocks.get((PAGES, medium), set()), self.blocks.get((group, medium), set())
        found = 0
        for page, digest in self._digests(tokens, **named):
            block = block_hash(digest)
            if block not in pages:
                break
            if block in resumable:
                found = page * self._page
        return found

    def _digests(
        self, tokens: Any, salt: str | None = None, lora_name: str | None = None, extra: Iterable[Any] = ()
    ) -> Iterable[tuple[int, bytes]]:
        """Yield the number of each page of ``tokens``, from 1 on, and its digest."""
        if not self._page:
            return
        chain = PageChain(self._page, self._lookahead)
        digests = chain.pages(encode(tokens).keyed(extra), root_digest(PageLabel(salt, lora_name), chain))
        yield from enumerate(digests, 1)

    def same_as(self, other: RebuiltCache) -> bool:
        """Return whether both have the same blocks."""
        mine = {where: blocks for where, blocks in self.blocks.items() if blocks}
        return mine == {where: blocks for where, blocks in other.blocks.items() if blocks}
