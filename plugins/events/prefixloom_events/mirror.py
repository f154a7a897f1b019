"""Mirror: makes events of a journal's changes.

What is cached, and where requests can resume, it asks ``ResumablePages``. It says what is different after each lot of
changes, in the events' words: the pages that lead to a boundary, what each component keeps, and the boundaries.

It knows no socket, no thread and no cache. First read ``Mirror.apply``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from prefixloom import Change, Reach, Window
from prefixloom_resumable import Differences, Holder, PageRange, ResumablePages, Run

from .hashes import PageLabel, block_hash, root_digest, salt_digest
from .wire import (
    MEDIUMS,
    PAGES,
    PAGES_KIND,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEvent,
    plain_key,
    plain_text,
)


class Mirror:
    """The pages of one cache, and the events of what becomes of them. A page is named by its digest."""

    def __init__(self, composition: Any, label_of: Callable[[str], PageLabel], components: bool = True) -> None:
        """``label_of`` says what a namespace is called in events. ``components``: announce their groups as well."""
        self._pages = ResumablePages(composition, label_of, namer=self._digests)
        self.page = self._pages.page
        self.lookahead = self._pages.lookahead
        self._announces_components = components
        self.mediums = tuple(MEDIUMS[tier] for tier in self._pages.tiers)
        self._kinds = [_kind_of(part.reach) for part in composition.parts]
        """By component, what decoders of other projects call its group."""
        self._sizes = [part.page_tokens or self.page for part in composition.parts]
        """By component, the tokens of its blocks."""

    def apply(self, changes: Iterable[Change]) -> list[KVEvent]:
        """Follow some changes, and return their events. The first time, these begin with ``AllBlocksCleared``."""
        return self._events(self._pages.apply(changes))

    def begin_again(self) -> None:
        """Forget everything; the next ``apply`` announces all pages."""
        self._pages.begin_again()

    def snapshot(self) -> list[KVEvent]:
        """Return events for all pages, beginning with ``AllBlocksCleared``."""
        return self._events(self._pages.everything())

    @property
    def pages(self) -> int:
        """How many pages it knows."""
        return self._pages.pages

    def _digests(self, run: Run, first: int, end: int) -> list[bytes]:
        """Return the digests of some pages of a run."""
        chain = self._pages.chain
        return chain.pages(run.tokens, run.name_above(first) or root_digest(run.label, chain), first, end)

    # ------------------------------------------------------------ events
    def _events(self, found: Differences) -> list[KVEvent]:
        """Return events for all changes: pages removed, from the leaves up; then pages stored, from the root down."""
        removed: list[KVEvent] = []
        stored: list[KVEvent] = []
        for level, medium in enumerate(self.mediums):
            self._announce(PAGES, medium, *found.leading(level), removed, stored)
        if self._announces_components:
            for holder in self._pages.holders:
                medium = MEDIUMS[holder.tier]
                self._announce(_group_of(holder), medium, *found.kept(holder), removed, stored, holder)
            group = PAGES + 1 + len(self._kinds)
            for level, medium in enumerate(self.mediums):
                gone, come = found.resumable(level)
                if gone:
                    removed.append(BlockRemoved(self._hashes(gone, None), medium, group))
                if come:
                    stored.append(
                        BlockStored(
                            self._hashes(come, None), None, [], self.page, None, medium, None, group_idx=group,
                            boundaries=True,
                        )
                    )  # fmt: skip
        cleared: list[KVEvent] = [AllBlocksCleared()] if found.cleared else []
        return cleared + removed + stored

    def _announce(
        self,
        group: int,
        medium: str,
        gone: Sequence[PageRange],
        come: Sequence[PageRange],
        removed: list[KVEvent],
        stored: list[KVEvent],
        holder: Holder | None = None,
    ) -> None:
        """Make the events of one group."""
        if gone:
            removed.append(BlockRemoved(self._hashes(gone, holder)[::-1], medium, group))
        stored += [self._stored(pages, group, medium, holder) for pages in come]

    def _hashes(self, several: Iterable[PageRange], holder: Holder | None) -> list[int]:
        """Return the hashes of pages, or of the smaller pages of a component."""
        found = []
        for pages in several:
            parts = 1 if holder is None else holder.parts
            if parts == 1:
                found += [block_hash(digest) for digest in self._pages.names(pages)]
                continue
            first = pages.first // parts
            digests = self._pages.names(PageRange(pages.run, first, -(-pages.end // parts)))
            found += [block_hash(digests[at // parts - first], at % parts) for at in range(pages.first, pages.end)]
        return found

    def _stored(self, pages: PageRange, group: int, medium: str, holder: Holder | None) -> BlockStored:
        run, parts = pages.run, 1 if holder is None else holder.parts
        kind: str | None = PAGES_KIND
        window, size = None, self.page
        if holder is not None:
            (kind, window), size = self._kinds[holder.place], self.page // parts
        hashes = self._hashes([pages], holder)
        extras = self._pages.extras(pages) if parts == 1 else None
        return BlockStored(
            hashes,
            self._before(run, pages.first, parts),
            self._pages.tokens(pages, parts).tolist(),
            size,
            None,
            medium,
            run.label.lora_name and plain_text(run.label.lora_name),
            extra_keys=[_extra_keys(each) for each in extras] if extras else None,
            group_idx=group,
            kv_cache_spec_kind=kind,
            kv_cache_spec_sliding_window=window,
            lookahead_token_ids=self._pages.looked_at(pages) if self.lookahead and parts == 1 else None,
            cache_salt=salt_digest(run.label),
            component=None if holder is None else holder.component,
        )

    def _before(self, run: Run, first: int, parts: int) -> int | None:
        """Return the hash of the block before the ``first`` one of a run; None if there is none."""
        if parts > 1 and first % parts:
            (digest,) = self._pages.names(PageRange(run, first // parts, first // parts + 1))
            return block_hash(digest, first % parts - 1)
        digest = run.name_above(first // parts)
        if digest is None:
            return None
        return block_hash(digest, parts - 1) if parts > 1 else block_hash(digest)


def _group_of(holder: Holder) -> int:
    return PAGES + 1 + holder.place


def _kind_of(reach: Reach) -> tuple[str | None, int | None]:
    """Return the name that other projects' decoders have for a component's group, and its window.

    A component that needs whole paths has no name here: decoders would take its pages for pages to resume from.
    """
    if reach.unit == "boundary":
        return "mamba", None
    if isinstance(reach, Window):
        return "sliding_window", reach.w
    return None, None


def _extra_keys(extra: Sequence[tuple[int, int, bool, Any]]) -> list[Any] | None:
    """Return the extra keys of a block, each with its first position in the block."""
    if not extra:
        return None
    return [[plain_key(key), lo] for lo, _, _, key in extra]
