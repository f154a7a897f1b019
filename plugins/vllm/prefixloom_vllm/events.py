"""HostEvents: announces what the host's memory has, as KV events of vLLM. A router joins them with the device's.

vLLM publishes what a connector's ``take_events`` returns, beside the events of its own cache. The hashes are vLLM's
own: those of a request that a block was computed or fetched for. Of groups that need whole paths, a block is announced
only while a request can resume from the host at its end or below it. Of windows and states, what they keep.

vLLM's ``AllBlocksCleared`` is for all media. So after a reset, and after an error in here, each block is announced as
removed. Only if that fails too, everything is cleared: a router then knows less of the device than there is.

It knows vLLM only by ``Form``. First read ``HostEvents.take``.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import attrs

from prefixloom import Cache, Change, Tokens
from prefixloom_resumable import Announcements, Before, Differences, ResumablePages, Run, ones, stretches

from .groups import Group

log = logging.getLogger("vllm.prefixloom")
MEDIUM = "CPU"
"""What vLLM calls the host's memory."""
MOST_NAMINGS = 1024
"""Requests that wait for the next look at what they name. Of more, the pages of the first ones are named later."""


@attrs.frozen
class Form:
    """How vLLM says it.

    ``stored``, ``removed``, ``cleared``  its classes of events
    ``written``                           how a hash is written in an event
    ``extra_keys``                        what else than tokens the blocks of a request were named by, as an event says
                                          it: of those in [start, end) of so many tokens each. None: by nothing
    ``kinds``                             by group, its kind and its window
    ``hash_tokens``                       the tokens of one hash of a request
    """

    stored: Callable[..., Any]
    removed: Callable[..., Any]
    cleared: Callable[[], Any]
    written: Callable[[bytes], Any]
    extra_keys: Callable[[Any, int, int, int], Sequence[Any] | None]
    kinds: Mapping[int, tuple[str | None, int | None]]
    hash_tokens: int


@attrs.frozen
class PageName:
    """What vLLM calls one page.

    ``hashes``  of each part of ``hash_tokens`` tokens
    ``extra``   by the tokens of a block, the extra keys of each block. Empty: there are none
    """

    hashes: Sequence[bytes]
    extra: Mapping[int, Sequence[Any]]
    lora_id: int | None
    lora_name: str | None


@attrs.frozen
class Naming:
    """The pages of a path, and the request that names them. They may not be followed yet."""

    request: Any
    namespace: str
    tokens: Tokens


@attrs.define
class Chain:
    """Blocks of one group that follow each other."""

    parent: bytes | None
    name: PageName
    hashes: list[bytes] = attrs.field(factory=list)
    tokens: list[int] = attrs.field(factory=list)
    extra: list[Any] = attrs.field(factory=list)


@attrs.frozen
class Look:
    """A run of pages at one look.

    ``before``, ``now``  by group, one bit for each block that subscribers were to have, and are to have
    """

    run: Run
    before: Mapping[int, int]
    now: Mapping[int, int]


class HostEvents:
    """The events of one host's memory. An error in here does not end vLLM's scheduler."""

    def __init__(self, groups: Sequence[Group], cache: Cache, form: Form) -> None:
        self._groups = groups
        self._cache = cache
        self._form = form
        self._pages = ResumablePages(cache.composition, lambda namespace: None, ("device",))
        self._holders = {holder.component: holder for holder in self._pages.holders}
        self._namings: deque[Naming] = deque(maxlen=MOST_NAMINGS)
        self._announced: dict[int, Counter[bytes]] = {group.index: Counter() for group in groups}
        """By group, the hashes that subscribers have, and of how many blocks. A block that is smaller than a page may
        have the hash of another one, whose page goes on in another way."""
        self._announcements = Announcements(cache, self._announce, self._withdraw, log)

    @property
    def failures(self) -> int:
        """Errors of the code for events so far."""
        return self._announcements.failures

    def guard(self) -> AbstractContextManager[None]:
        """Guard what the scheduler does for events alone: errors of the block do not leave it."""
        return self._announcements.guard()

    def name(self, request: Any, namespace: str, tokens: Tokens) -> None:
        """Call the pages of ``tokens`` what this request calls them, from the next ``take`` on."""
        with self.guard():
            identity = self._cache.identity
            whole = namespace if identity is None else identity.namespace(namespace)
            self._namings.append(Naming(request, whole, tokens))

    def take(self) -> list[Any]:
        """Return the events since the last call: blocks removed, from the leaves up, and then blocks stored."""
        return self._announcements.take()

    def _announce(self, changes: list[Change]) -> list[Any]:
        if not changes and not self._namings:
            return []
        found = self._pages.apply(changes)
        looks = self._looks(found, self._give_names())
        removed: list[Any] = []
        stored: list[Any] = []
        changed = {group.index: self._compare(group, looks, found.cleared, removed, stored) for group in self._groups}
        for index, by_block in changed.items():  # from here on nothing fails: subscribers get these events
            counts = self._announced[index]
            if found.cleared:
                counts.clear()
            for block, by in by_block.items():
                counts[block] += by
                if not counts[block]:
                    del counts[block]
        return removed + stored

    def _withdraw(self) -> list[Any]:
        """Return events that remove all blocks that were announced."""
        self._pages.begin_again()
        try:
            events = [self._removed(index, [*counts][::-1]) for index, counts in self._announced.items() if counts]
        except Exception:
            log.debug("what was announced cannot be removed block by block", exc_info=True)
            events = [self._form.cleared()]
        self._announced = {index: Counter() for index in self._announced}
        return events

    # ------------------------------------------------------------ names
    def _give_names(self) -> dict[Run, int]:
        """Name the pages that wait for names. Return how many names their runs had before."""
        had: dict[Run, int] = {}
        while self._namings:
            naming = self._namings.popleft()
            with self._announcements.guard(harms=False):  # what one request cannot name, others are announced without
                self._give(naming, had)
        return had

    def _give(self, naming: Naming, had: dict[Run, int]) -> None:
        hashes = naming.request.block_hashes
        known = len(hashes) * self._form.hash_tokens // self._pages.page
        for run, used in self._pages.path(naming.namespace, naming.tokens):
            first, end = len(run.names), min(used, known - run.first)
            if first < end:
                names = self._names(naming.request, hashes, run.first + first, run.first + end)
                had.setdefault(run, first)
                run.names += names
            if len(run.names) < run.count:
                break

    def _names(self, request: Any, hashes: Sequence[bytes], first: int, end: int) -> list[PageName]:
        """Return the names of the pages [first, end) of a path."""
        page, each = self._pages.page, self._form.hash_tokens
        extras: dict[int, Sequence[Any]] = {}
        for tokens in {group.tokens for group in self._groups}:
            keys = self._form.extra_keys(request, first * page, end * page, tokens)
            if keys is not None and any(keys):
                extras[tokens] = keys
        lora = request.lora_request
        adapter = (None, None) if lora is None else (lora.adapter_id, lora.name)
        names = []
        for at in range(end - first):
            own = {}
            for tokens, keys in extras.items():
                blocks = page // tokens
                own[tokens] = keys[at * blocks : (at + 1) * blocks]
            start = (first + at) * page // each
            names.append(PageName(hashes[start : start + page // each], own, *adapter))
        return names

    # ------------------------------------------------------------ what subscribers are to have
    def _looks(self, found: Differences, had: Mapping[Run, int]) -> list[Look]:
        """Return the runs that differ, or have names now, from the root down.

        ``Differences`` says what is different of pages. Here a page also counts as different when it gets its name.
        """
        runs = {run: before for run, before in found.runs if run.names}
        unchanged = [run for run in had if run not in runs]
        looks = []
        for run in sorted([*runs, *unchanged], key=lambda run: run.first):
            before = runs.get(run)
            named_before = 0 if found.cleared else had.get(run, len(run.names))
            was = {group.index: self._blocks(group, before or run, named_before) for group in self._groups}
            now = {group.index: self._blocks(group, run, len(run.names)) for group in self._groups}
            looks.append(Look(run, was, now))
        return looks

    def _blocks(self, group: Group, pages: Run | Before, named: int) -> int:
        """Return the blocks of a run, now or before, that are announced if its first ``named`` pages have names."""
        holder = self._holders[group.name]
        blocks = ones(pages.leads[0] * holder.parts) if group.reach.closed_upward else pages.kept[holder.index]
        return blocks & ones(named * holder.parts)

    # ------------------------------------------------------------ events
    def _compare(
        self, group: Group, looks: Sequence[Look], anew: bool, removed: list[Any], stored: list[Any]
    ) -> Counter[bytes]:
        """Make the events of one group's differences. Return by how many blocks more each hash has now.

        ``anew``: these are all the pages that there are, and the result counts from 0.
        """
        changed: Counter[bytes] = Counter()
        come: dict[bytes, tuple[Run, int]] = {}
        for look in looks:
            before, now = look.before[group.index], look.now[group.index]
            for first, end in stretches(before & ~now):
                for at in range(first, end):
                    changed[self._hash(group, look.run, at)] -= 1
            for first, end in stretches(now & ~before):
                for at in range(first, end):
                    block = self._hash(group, look.run, at)
                    changed[block] += 1
                    come.setdefault(block, (look.run, at))
        announced = self._announced[group.index]
        after = changed if anew else {block: announced[block] + by for block, by in changed.items()}
        gone = [block for block in (announced if anew else changed) if announced[block] and not after.get(block)]
        if gone:
            removed.append(self._removed(group.index, gone[::-1]))
        chains: list[Chain] = []
        following: dict[bytes, Chain] = {}
        for block, (run, at) in come.items():
            if after[block] and not announced[block]:
                self._chain(group, run, at, block, chains, following)
        stored += [self._stored(group, chain) for chain in chains]
        return changed

    def _hash(self, group: Group, run: Run, block: int) -> bytes:
        """Return the hash of one block of a run. A state belongs to the block that ends with its page."""
        page, part = divmod(block, self._holders[group.name].parts)
        end = self._pages.page if group.is_state else (part + 1) * group.tokens
        name: PageName = run.names[page]
        return name.hashes[end // self._form.hash_tokens - 1]

    def _removed(self, index: int, blocks: Sequence[bytes]) -> Any:
        hashes = [self._form.written(each) for each in blocks]
        return self._form.removed(block_hashes=hashes, medium=MEDIUM, group_idx=index)

    def _stored(self, group: Group, chain: Chain) -> Any:
        written = self._form.written
        kind, window = self._form.kinds[group.index]
        return self._form.stored(
            block_hashes=[written(each) for each in chain.hashes],
            parent_block_hash=None if chain.parent is None else written(chain.parent),
            token_ids=chain.tokens, block_size=group.tokens, lora_id=chain.name.lora_id, medium=MEDIUM,
            lora_name=chain.name.lora_name, extra_keys=chain.extra if any(chain.extra) else None,
            group_idx=group.index, kv_cache_spec_kind=kind, kv_cache_spec_sliding_window=window,
        )  # fmt: skip

    def _chain(
        self, group: Group, run: Run, at: int, block: bytes, chains: list[Chain], following: dict[bytes, Chain]
    ) -> None:
        """Add a block to the chain that it follows."""
        size, each = self._pages.page, self._form.hash_tokens
        page, part = divmod(at, self._holders[group.name].parts)
        start = size - group.tokens if group.is_state else part * group.tokens
        name: PageName = run.names[page]
        parent: bytes | None = None
        if start:
            parent = name.hashes[start // each - 1]
        elif (above := run.name_above(page)) is not None:
            parent = above.hashes[-1]
        chain = following.pop(parent, None) if parent is not None else None
        if chain is None:
            chain = Chain(parent, name)
            chains.append(chain)
        following[block] = chain
        chain.hashes.append(block)
        first = page * size + start
        chain.tokens += run.tokens.part(first, first + group.tokens).tolist()
        extra = name.extra.get(group.tokens)
        chain.extra.append(extra[start // group.tokens] if extra else None)
