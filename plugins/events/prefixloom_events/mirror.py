"""Mirror: makes events of a journal's changes.

What is cached, and where requests can resume, it asks ``ResumablePages``. It says what is different after each lot of
changes, in the events' words: the pages that lead to a boundary, what each component keeps, and the boundaries.

It knows no socket, no thread and no cache. First read ``Mirror.apply``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from prefixloom import Change, Reach
from prefixloom_resumable import TOKEN_BYTES, Differences, KeptPart, PageNode, ResumablePages, runs

from .hashes import PageLabel, block_hash, root_digest
from .wire import MEDIUMS, PAGES, PAGES_KIND, AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, token_list


class Mirror:
    """The pages of one cache, and the events of what becomes of them."""

    def __init__(self, composition: Any, label_of: Callable[[str], PageLabel], components: bool = True) -> None:
        """``label_of`` says what a namespace is called in events. ``components``: tell their groups as well."""

        def root_of(namespace: str) -> tuple[bytes, PageLabel]:
            label = label_of(namespace)
            return root_digest(label), label

        self._pages = ResumablePages(composition, root_of)
        self.page = self._pages.page
        self.lookahead = self._pages.lookahead
        self._tells_components = components
        self.mediums = tuple(MEDIUMS[tier] for tier in self._pages.tiers)
        self._kinds = [_kind_of(part.reach) for part in composition.parts]
        """By component, what decoders of other projects call its group."""
        self._sizes = [part.page_tokens or self.page for part in composition.parts]
        """By component, the tokens of its blocks."""

    def apply(self, changes: Iterable[Change]) -> list[KVEvent]:
        """Follow some changes, and say what is different. The first time, that begins with ``AllBlocksCleared``."""
        return self._events(self._pages.apply(changes))

    def begin_again(self) -> None:
        """Forget everything; what is applied next tells all there is."""
        self._pages.begin_again()

    def snapshot(self) -> list[KVEvent]:
        """All there is, as events that begin with ``AllBlocksCleared``."""
        return self._events(self._pages.everything())

    @property
    def pages(self) -> int:
        """How many pages it knows."""
        return self._pages.pages

    def _events(self, found: Differences) -> list[KVEvent]:
        """Events for what is not as it was: what is gone, from the leaves up; then what has come, from the root."""
        removed: list[KVEvent] = []
        stored: list[KVEvent] = []
        for level, medium in enumerate(self.mediums):
            self._tell(PAGES, medium, *found.told(level), removed, stored)
        if self._tells_components:
            was = dict(found.kept)
            for keeper in self._pages.keepers:
                self._tell_keeper(keeper, found, was, removed, stored)
            group = PAGES + 1 + len(self._kinds)
            for level, medium in enumerate(self.mediums):
                gone, come = found.resumable(level)
                if gone:
                    removed.append(BlockRemoved([block_hash(node.digest) for node in gone], medium, group))
                if come:
                    hashes = [block_hash(node.digest) for node in come]
                    stored.append(
                        BlockStored(hashes, None, [], self.page, None, medium, None, group_idx=group, boundaries=True)
                    )
        cleared: list[KVEvent] = [AllBlocksCleared()] if found.cleared else []
        return cleared + removed + stored

    def _tell(
        self,
        group: int,
        medium: str,
        gone: Sequence[PageNode],
        come: Sequence[PageNode],
        removed: list[KVEvent],
        stored: list[KVEvent],
        keeper: KeptPart | None = None,
    ) -> None:
        """Tell whole pages of one group; those that follow each other in one event."""
        if gone:
            removed.append(BlockRemoved([block_hash(node.digest) for node in reversed(gone)], medium, group))
        stored += [self._stored(run, group, medium, keeper) for run in runs(come)]

    def _stored(self, run: Sequence[PageNode], group: int, medium: str, keeper: KeptPart | None) -> BlockStored:
        first, size = run[0], self.page * TOKEN_BYTES
        assert first.parent is not None
        kind, window = (PAGES_KIND, None) if keeper is None else self._kinds[keeper.place]
        return BlockStored(
            [block_hash(node.digest) for node in run],
            block_hash(first.parent.digest) if first.parent.parent is not None else None,
            token_list(b"".join(node.key[:size] for node in run)),
            self.page,
            None,
            medium,
            first.label.lora_name,
            extra_keys=[_extra_keys(node) for node in run] if any(node.extra for node in run) else None,
            group_idx=group,
            kv_cache_spec_kind=kind,
            kv_cache_spec_sliding_window=window,
            lookahead_token_ids=[token_list(node.key[size:]) for node in run] if self.lookahead else None,
            cache_salt=first.label.salt,
            component=None if keeper is None else keeper.component,
        )

    def _tell_keeper(
        self,
        keeper: KeptPart,
        found: Differences,
        was: Mapping[PageNode, int],
        removed: list[KVEvent],
        stored: list[KVEvent],
    ) -> None:
        """Tell what one component has come to keep and has lost on one tier."""
        group, medium = _group_of(keeper), MEDIUMS[keeper.tier]
        gone, come = found.changed(keeper)
        if keeper.parts == 1:
            self._tell(group, medium, gone, come, removed, stored, keeper)
            return
        lost = [
            block_hash(node.digest, part)
            for node in reversed(gone)
            for part in reversed(range(keeper.parts))
            if (was[node] & ~node.bits) >> keeper.shift + part & 1
        ]
        if lost:
            removed.append(BlockRemoved(lost, medium, group))
        for node in come:
            new = (node.bits & ~was[node] & keeper.mask) >> keeper.shift
            while new:
                first = (new & -new).bit_length() - 1
                count = (~(new >> first) & (new >> first) + 1).bit_length() - 1
                stored.append(self._stored_parts(keeper, medium, node, first, count))
                new &= ~(((1 << count) - 1) << first)

    def _stored_parts(self, keeper: KeptPart, medium: str, node: PageNode, first: int, count: int) -> BlockStored:
        """Tell ``count`` pages of a component inside of one page of the tree."""
        assert node.parent is not None
        size = self._sizes[keeper.place]
        parent: int | None = None
        if first:
            parent = block_hash(node.digest, first - 1)
        elif node.parent.parent is not None:
            parent = block_hash(node.parent.digest, keeper.parts - 1)
        kind, window = self._kinds[keeper.place]
        return BlockStored(
            [block_hash(node.digest, part) for part in range(first, first + count)],
            parent,
            token_list(node.key[first * size * TOKEN_BYTES : (first + count) * size * TOKEN_BYTES]),
            size,
            None,
            medium,
            node.label.lora_name,
            group_idx=_group_of(keeper),
            kv_cache_spec_kind=kind,
            kv_cache_spec_sliding_window=window,
            cache_salt=node.label.salt,
            component=keeper.component,
        )


def _group_of(keeper: KeptPart) -> int:
    return PAGES + 1 + keeper.place


def _kind_of(reach: Reach) -> tuple[str | None, int | None]:
    """What decoders of other projects call the group of a component, and its window.

    A component that needs everything has no name here: they would take its pages for such that can be resumed from.
    """
    if reach.unit == "boundary":
        return "mamba", None
    window = getattr(reach, "w", None)
    if isinstance(window, int):
        return "sliding_window", window
    return None, None


def _extra_keys(node: PageNode) -> list[Any] | None:
    """The extra keys of a block, each with the position in it from which on it holds."""
    if not node.extra:
        return None
    return [[key if isinstance(key, str | bytes | int) else repr(key), lo] for lo, _, _, key in node.extra]
