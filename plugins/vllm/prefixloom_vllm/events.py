"""HostEvents: tells what the host's memory has, as KV events of vLLM, so that a router joins them with the device's.

vLLM publishes what a connector's ``take_events`` returns, beside the events of its own cache. The hashes are vLLM's
own: those of a request that a block was computed or fetched for. Groups that need whole paths tell a block only while
a request can resume from the host at its end or below it. Windows and states tell what they keep.

vLLM's ``AllBlocksCleared`` is for all media, so it is never told here. After a reset each block is told as removed.

It knows vLLM only by ``Form``. First read ``HostEvents.take``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import attrs

from prefixloom import Cache, Change, Tokens
from prefixloom_resumable import PageNode, ResumablePages

from .groups import Group

MEDIUM = "CPU"
"""What vLLM calls the host's memory."""


@attrs.frozen
class Form:
    """How vLLM says it.

    ``stored``, ``removed``  its classes of events
    ``written``              how a hash is written in an event
    ``extra_keys``           what else than tokens a request's block [start, end) was named by, as an event says it
    ``kinds``                by group, its kind and its window
    ``hash_tokens``          the tokens of one hash of a request
    """

    stored: Callable[..., Any]
    removed: Callable[..., Any]
    written: Callable[[bytes], Any]
    extra_keys: Callable[[Any, int, int], Any]
    kinds: Mapping[int, tuple[str | None, int | None]]
    hash_tokens: int


@attrs.define(eq=False)
class PageName:
    """What vLLM calls one page, and what of it is told.

    ``hashes``  of each part of ``hash_tokens`` tokens
    ``extra``   by the tokens of a block, the extra keys of each block. Empty: there are none
    ``told``    by group, one bit for each block that is told
    """

    hashes: tuple[bytes, ...]
    extra: Mapping[int, tuple[Any, ...]]
    lora_id: int | None
    lora_name: str | None
    told: dict[int, int] = attrs.field(factory=dict)


@attrs.frozen
class Naming:
    """The pages of a path, and the request that names them. They may not be followed yet."""

    request: Any
    namespace: str
    tokens: Tokens
    extra: Sequence[tuple[int, int, str]]


@attrs.define
class Run:
    """Blocks of one group that follow each other."""

    parent: bytes | None
    name: PageName
    hashes: list[bytes] = attrs.field(factory=list)
    tokens: list[int] = attrs.field(factory=list)
    extra: list[Any] = attrs.field(factory=list)


class HostEvents:
    """The events of one host's memory."""

    def __init__(self, groups: Sequence[Group], cache: Cache, form: Form) -> None:
        self._groups = groups
        self._cache = cache
        self._form = form
        self._journal = cache.journal()
        self._pages = ResumablePages(cache.composition, root_of, tiers=("device",))
        self._keepers = {keeper.component: keeper for keeper in self._pages.keepers}
        self._namings: list[Naming] = []
        self._told: dict[int, Counter[bytes]] = {group.index: Counter() for group in groups}
        """By group, the hashes that are told, and of how many blocks. A block that is smaller than a page may have the
        hash of another one, whose page goes on in another way."""

    def name(self, request: Any, namespace: str, tokens: Tokens, extra: Sequence[tuple[int, int, str]]) -> None:
        """The pages of ``tokens`` are called what this request calls them. It counts at the next ``take``."""
        identity = self._cache.identity
        whole = namespace if identity is None else identity.namespace(namespace)
        self._namings.append(Naming(request, whole, tokens, extra))

    def take(self) -> list[Any]:
        """What has changed since the last call: what is gone, from the leaves up, and then what has come."""
        missing, changes = self._journal.missing, self._journal.take()
        if missing:  # there were too many to keep: begin again with what there is
            changes = [Change("cleared"), *self._cache.contents()]
        anew = any(change.kind == "cleared" for change in changes)
        names = {page.digest: page.name for page, _ in self._pages.everything().kept} if anew else {}
        found = self._pages.apply(changes)
        pages = sorted(dict([*found.kept, *found.states]), key=lambda page: page.end)
        for page in pages:
            page.name = page.name or names.get(page.digest)
            if anew and page.name is not None:
                page.name.told.clear()
        self._give_names()
        removed: list[Any] = []
        stored: list[Any] = []
        for group in self._groups:
            self._tell(group, pages, anew, removed, stored)
        return removed + stored

    # ------------------------------------------------------------ names
    def _give_names(self) -> None:
        for naming in self._namings:
            for page in reversed(self._pages.path(naming.namespace, naming.tokens, naming.extra)):
                if page.name is not None:
                    break  # so are those above
                page.name = self._name(naming.request, page)
        self._namings.clear()

    def _name(self, request: Any, page: PageNode) -> PageName:
        start, each = page.end - self._pages.page, self._form.hash_tokens
        extra: dict[int, tuple[Any, ...]] = {}
        for tokens in {group.tokens for group in self._groups}:
            blocks = range(start, page.end, tokens)
            keys = tuple(self._form.extra_keys(request, at, at + tokens) for at in blocks)
            if any(keys):
                extra[tokens] = keys
        lora = request.lora_request
        return PageName(
            tuple(request.block_hashes[start // each : page.end // each]), extra,
            None if lora is None else lora.adapter_id, None if lora is None else lora.name,
        )  # fmt: skip

    def _hash(self, page: PageNode, behind: int) -> bytes:
        """The hash of the block that ends ``behind`` tokens behind the beginning of a page."""
        name: PageName = page.name
        return name.hashes[behind // self._form.hash_tokens - 1]

    # ------------------------------------------------------------ telling
    def _has(self, group: Group, page: PageNode) -> int:
        """One bit for each block of a group in a page: whether it is to be told now."""
        keeper = self._keepers[group.name]
        if group.reach.closed_upward:
            return keeper.mask >> keeper.shift if page.told & 1 else 0
        return (page.bits & keeper.mask) >> keeper.shift

    def _tell(self, group: Group, pages: Sequence[PageNode], anew: bool, removed: list[Any], stored: list[Any]) -> None:
        """Tell what is different of one group. ``anew``: these are all the pages that there are."""
        size, index = self._pages.page, group.index
        before = set(self._told[index]) if anew else set()
        if anew:
            self._told[index] = Counter()
        counts = self._told[index]
        gone: list[bytes] = []
        runs: list[Run] = []
        following: dict[bytes, Run] = {}
        for page in pages:
            if page.name is None:
                continue
            was, has = page.name.told.get(index, 0), self._has(group, page)
            page.name.told[index] = has
            first = size - group.tokens if group.is_state else 0  # of a state, the block that it ends
            for place, at in enumerate(range(first, size, group.tokens)):
                if (was ^ has) >> place & 1:
                    block = self._hash(page, at + group.tokens)
                    counts[block] += 1 if has >> place & 1 else -1
                    if not counts[block]:
                        del counts[block]
                        gone.append(block)
                    elif has >> place & 1 and counts[block] == 1 and block not in before:
                        self._store(group, page, at, block, runs, following)
        if anew:
            gone = sorted(before - counts.keys())
        written = self._form.written
        if gone:
            removed.append(
                self._form.removed(
                    block_hashes=[written(each) for each in reversed(gone)], medium=MEDIUM, group_idx=group.index
                )
            )
        kind, window = self._form.kinds[group.index]
        for run in runs:
            stored.append(
                self._form.stored(
                    block_hashes=[written(each) for each in run.hashes],
                    parent_block_hash=None if run.parent is None else written(run.parent),
                    token_ids=run.tokens, block_size=group.tokens, lora_id=run.name.lora_id, medium=MEDIUM,
                    lora_name=run.name.lora_name, extra_keys=run.extra if any(run.extra) else None,
                    group_idx=group.index, kv_cache_spec_kind=kind, kv_cache_spec_sliding_window=window,
                )
            )  # fmt: skip

    def _store(
        self, group: Group, page: PageNode, at: int, block: bytes, runs: list[Run], following: dict[bytes, Run]
    ) -> None:
        """Add a block, which begins ``at`` tokens behind the beginning of ``page``, to the run that it follows."""
        parent: bytes | None = None
        if at:
            parent = self._hash(page, at)
        elif page.parent is not None and page.parent.parent is not None:
            parent = self._hash(page.parent, self._pages.page)
        run = following.pop(parent, None) if parent is not None else None
        if run is None:
            run = Run(parent, page.name)
            runs.append(run)
        following[block] = run
        run.hashes.append(block)
        run.tokens += memoryview(page.key).cast("I")[at : at + group.tokens].tolist()
        extra = page.name.extra.get(group.tokens)
        run.extra.append(extra[at // group.tokens] if extra else None)


def root_of(namespace: str) -> tuple[bytes, None]:
    """What the digests of a namespace's pages begin with."""
    return blake2b(namespace.encode(), digest_size=16).digest(), None
