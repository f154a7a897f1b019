"""ResumablePages: a copy of what a cache has cached, page by page, that knows where requests can resume.

It follows the changes of a cache's journal, and says after each lot of them what is different. Where a request can
resume it derives as the core does, from the reaches of the composition. Hooks that refuse matches are not asked.

A page *leads* if a request can resume at its end or at one below it on its path. These are the pages that a router may
count which knows full attention alone.

It knows no event, no engine and no cache. First read ``ResumablePages.apply``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import attrs

from prefixloom import Change, PageChain, Tokens

from .boundaries import Boundaries, Holder
from .runs import Before, Run, halved, ones, stretches

Namer = Callable[[Run, int, int], "list[Any]"]
"""Makes the names of the pages [first, end) of a run, of which those before ``first`` have names."""


@attrs.frozen
class PageRange:
    """The pages [first, end) of a run; of a component whose pages are smaller, so many of these."""

    run: Run
    first: int
    end: int


@attrs.frozen
class Differences:
    """What is not as it was, until the next changes are followed. What has gone and what has come is in the order of
    paths: what is above before what is below.

    ``cleared``  what was there before is forgotten: the rest is all there is
    ``runs``     those that are different, each with what it was
    """

    cleared: bool
    runs: tuple[tuple[Run, Before], ...]

    def leading(self, level: int) -> tuple[list[PageRange], list[PageRange]]:
        """Return the pages that lead to no boundary any more, and the pages that lead to one now."""
        gone, come = [], []
        for run, before in self.runs:
            was, leads = before.leads[level], run.leads[level]
            if was > leads:
                gone.append(PageRange(run, leads, was))
            elif was < leads:
                come.append(PageRange(run, was, leads))
        return gone, come

    def resumable(self, level: int) -> tuple[list[PageRange], list[PageRange]]:
        """Return the pages at whose end nobody can resume any more, and the pages at whose end somebody can now."""
        return _different((run, before.resumable[level], run.resumable[level]) for run, before in self.runs)

    def kept(self, holder: Holder) -> tuple[list[PageRange], list[PageRange]]:
        """Return the pages of a component that one tier has lost, and the pages that it has gained."""
        return _different((run, before.kept[holder.index], run.kept[holder.index]) for run, before in self.runs)


def _different(bits: Iterable[tuple[Run, int, int]]) -> tuple[list[PageRange], list[PageRange]]:
    gone: list[PageRange] = []
    come: list[PageRange] = []
    for run, before, now in bits:
        if before != now:
            gone += [PageRange(run, *each) for each in stretches(before & ~now)]
            come += [PageRange(run, *each) for each in stretches(now & ~before)]
    return gone, come


class ResumablePages:
    """The pages of one cache, as runs in a tree for each namespace.

    There are up to two levels: what is on the device, and what is on the device or on a tier below.

    ``tiers``    those that are followed: the levels have the first, and all of them
    ``holders``  each component on each tier
    """

    def __init__(
        self,
        composition: Any,
        root_of: Callable[[str], Any],
        tiers: Sequence[str] | None = None,
        namer: Namer | None = None,
    ) -> None:
        """
        ``root_of``  says of a namespace what the label of its runs is
        ``tiers``    all, if None
        ``namer``    makes names when they are asked for (``names``). Without one, whoever follows the pages appends
                     them to those of a run
        """
        self.page: int = composition.page
        self.lookahead: int = composition.lookahead
        self.chain = PageChain(self.page, self.lookahead)
        self._root_of = root_of
        self._namer = namer
        if tiers is None:
            tiers = ("device", "host") if composition.tier is not None else ("device",)
        self.tiers = tuple(tiers)
        self._boundaries = Boundaries(composition, self.tiers)
        self.holders = self._boundaries.holders
        self._holder_of = {(holder.component, holder.tier): holder for holder in self.holders}
        self._roots: dict[str, Run] = {}
        self._former: dict[str, Run] = {}
        """Roots of what was forgotten, for the names of pages that come again."""
        self._touched: list[Run] = []
        self._changed: dict[Run, int] = {}
        """Runs of which bits have changed, and the first page of each of which some have."""
        self._untidy: dict[Run, None] = {}
        self._began = False
        self._found: Any = None, None, 0
        """The path of the last change, with its run and how many of the run's pages are on it."""

    # ------------------------------------------------------------ following
    def apply(self, changes: Iterable[Change]) -> Differences:
        """Follow some changes, and return the differences. The first time, everything before is forgotten."""
        self._tidy()
        cleared = not self._began
        self._began = True
        for change in changes:
            if change.kind == "cleared":
                self._forget()
                cleared = True
            elif change.kind != "refused" and change.tier in self.tiers:
                self._change(change)
        self._former, self._found = {}, (None, None, 0)
        self._settle()
        runs = sorted(self._touched, key=_first_of)
        found = []
        for run in runs:
            assert run.before is not None
            found.append((run, run.before))
            run.before = None
        self._touched = []
        return Differences(cleared, tuple(found))

    def begin_again(self) -> None:
        """Forget everything; the next ``apply`` begins anew. Pages that return have the names they had."""
        self._forget()
        self._began = False

    def everything(self) -> Differences:
        """Return all pages as differences from an empty cache."""
        nothing, levels = (0,) * len(self.holders), (0,) * len(self.tiers)
        runs = sorted(self._all(), key=_first_of)
        return Differences(True, tuple((run, Before(nothing, levels, levels)) for run in runs))

    def _forget(self) -> None:
        if self._roots:
            self._former = self._roots
        self._roots = {}
        self._touched, self._changed, self._untidy = [], {}, {}
        self._found = None, None, 0

    def _all(self) -> Iterator[Run]:
        stack = [*self._roots.values()]
        while stack:
            children = stack.pop().children.values()
            yield from children
            stack += children

    # ------------------------------------------------------------ looking at pages
    @property
    def pages(self) -> int:
        """How many pages it knows."""
        return sum(run.live for run in self._all())

    def path(self, namespace: str, tokens: Tokens) -> list[tuple[Run, int]]:
        """Return the pages of a path that are known: runs, and how many of the first pages of each."""
        root = self._roots.get(namespace)
        if root is None:
            return []
        run, used = self._find(root, tokens, self.chain.whole(tokens.count))
        return _path_to(run, min(used, run.live))

    def names(self, pages: PageRange) -> list[Any]:
        """Return the names of some pages; make the missing ones from the root down."""
        run, end = pages.run, pages.end
        if len(run.names) < end:
            lacking = [run]
            while (above := lacking[-1].parent) is not None and len(above.names) < above.count:
                lacking.append(above)
            assert self._namer is not None
            for each in reversed(lacking):
                upto = end if each is run else each.count
                each.names += self._namer(each, len(each.names), upto)
        return run.names[pages.first : end]

    def tokens(self, pages: PageRange, parts: int = 1) -> Tokens:
        """Return the tokens of some pages.

        ``parts``: how many of these pages a page of the tree has, because a component's may be smaller.
        """
        size = self.page // parts
        return pages.run.tokens.piece(pages.first * size, pages.end * size)

    def looked_at(self, pages: PageRange) -> list[list[int]]:
        """Return the tokens behind each of some pages on which the page's content depends."""
        ends = range((pages.first + 1) * self.page, (pages.end + 1) * self.page, self.page)
        return [pages.run.tokens.part(end, end + self.lookahead).tolist() for end in ends]

    def extras(self, pages: PageRange) -> list[tuple[tuple[int, int, bool, Any], ...]] | None:
        """Return the extra keys of each of some pages, as ``Tokens.extra_in`` does; None if no page has any."""
        tokens, width = pages.run.tokens, self.page + self.lookahead
        if not tokens.extra:
            return None
        starts = range(pages.first * self.page, pages.end * self.page, self.page)
        found = [tokens.extra_in(start, start + width) for start in starts]
        return found if any(found) else None

    # ------------------------------------------------------------ changes
    def _change(self, change: Change) -> None:
        """Note what one change says is cached, or is not any more."""
        holder = self._holder_of[change.component, change.tier]
        stored = change.kind == "stored"
        path = change.namespace, change.tokens, change.boundary or max(hi for _, hi in change.spans)
        before, run, used = self._found
        if before is None or path[1] is not before[1] or path != before:  # components that change together share a path
            run, used = self._place(*path, stored)
            self._found = path, run, used
        size, parts = self.page // holder.parts, holder.parts
        if change.boundary is not None:
            self._note(run, holder, used - 1, used, stored)
            return
        for lo, hi in reversed(change.spans):
            lo, hi = lo // size, hi // size
            while lo < hi:
                while run.first * parts >= hi:
                    assert run.parent is not None
                    run = run.parent
                first = max(lo, run.first * parts)
                self._note(run, holder, first - run.first * parts, hi - run.first * parts, stored)
                hi = first

    def _place(self, namespace: str, tokens: Tokens, end: int, makes: bool) -> tuple[Run, int]:
        """Return the run of the page in which ``end`` lies, and how many of its pages lie up to there.

        ``makes``  whether pages that are not known are added
        """
        count = -(-end // self.page)
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = self._new(None, self._root_of(namespace), namespace)
        run, used = self._find(root, tokens, count)
        if run.first + used < count:
            if not makes:
                raise LookupError("a change removes what was not stored")
            run, used = self._extend(run, used, tokens, count)
            if self._former:
                self._name_again(namespace, run, tokens, count)
        return run, used

    def _note(self, run: Run, holder: Holder, first: int, end: int, stored: bool) -> None:
        """Set or clear the bits of pages of a component."""
        bits = run.kept[holder.index]
        mask = ones(end - first) << first
        now = bits | mask if stored else bits & ~mask
        if now != bits:
            self._touch(run)
            run.kept[holder.index] = now
            first //= holder.parts
            self._changed[run] = min(self._changed.get(run, first), first)

    def _touch(self, run: Run, resumable: tuple[int, ...] | None = None) -> None:
        """Remember what ``run`` was, before anything of it changes.

        ``resumable``  what ``run.resumable`` was, where that alone is new already; None: it is as it was
        """
        if run.before is None:
            run.before = Before(tuple(run.kept), resumable or tuple(run.resumable), tuple(run.leads))
            self._touched.append(run)

    # ------------------------------------------------------------ paths
    def _find(self, root: Run, tokens: Tokens, count: int) -> tuple[Run, int]:
        """Find the deepest run on the first ``count`` pages of a path, and how many of its pages are on the path."""
        run, used, at = root, 0, 0
        while at < count and used == run.count:
            child = run.children.get(self._identity(tokens, at))
            if child is None:
                break
            run, used = child, self._common(child, tokens, count - at)
            at += used
        return run, used

    def _identity(self, tokens: Tokens, page: int) -> bytes:
        """Return the identity of a page of ``tokens`` among the pages below the same page."""
        start = page * self.page
        return tokens.identity(start, start + self.page + self.lookahead)

    def _common(self, run: Run, tokens: Tokens, most: int) -> int:
        """Return how many of the first pages of ``run`` are on a path, which has ``most`` pages from there on."""
        start = run.first * self.page
        most = min(run.count, most)
        piece = tokens.piece(start, start + most * self.page + self.lookahead)
        return min(most, self.chain.whole(piece.common(run.tokens)))

    def _new(self, parent: Run | None, label: Any, identity: Any) -> Run:
        run = Run(parent, label, identity, self.page, len(self.holders), len(self.tiers))
        if parent is not None:
            parent.children[identity] = run
        return run

    def _extend(self, run: Run, used: int, tokens: Tokens, count: int) -> tuple[Run, int]:
        """Add the pages of a path behind the first ``used`` ones of ``run``."""
        at = run.first + used
        if used < run.count:
            self._split(run, used)
        if run.parent is None or run.children:
            run = self._new(run, run.label, self._identity(tokens, at))
        self._touch(run)
        run.tokens = tokens.piece(run.first * self.page, count * self.page + self.lookahead)
        run.count = run.live = count - run.first
        at -= run.first
        self._changed[run] = min(self._changed.get(run, at), at)
        return run, run.count

    def _split(self, run: Run, page: int) -> None:
        """Split ``run`` after ``page`` of its pages. A new run below it has the others."""
        parts = self._boundaries.parts
        first, identity = run.first + page, self._identity(run.tokens, page)
        lower = Run(run, run.label, identity, self.page, len(parts), len(self.tiers))
        lower.first, lower.count = first, run.count - page
        lower.live = lower.count
        lower.children, run.children = run.children, {identity: lower}
        for child in lower.children.values():
            child.parent = lower
        at = page * self.page
        lower.tokens, run.tokens = run.tokens.piece(at), run.tokens.piece(0, at + self.lookahead)
        lower.names, run.names = run.names[page:], run.names[:page]
        for index, each in enumerate(parts):
            run.kept[index], lower.kept[index] = halved(run.kept[index], page * each)
        for level, bits in enumerate(run.resumable):
            run.resumable[level], lower.resumable[level] = halved(bits, page)
            leads = run.leads[level]
            run.leads[level], lower.leads[level] = min(leads, page), max(0, leads - page)
            lower.branches[level], run.branches[level] = run.branches[level], int(leads > page)
        run.count = run.live = page
        if run.before is not None:
            run.before, lower.before = run.before.halves(page, parts)
            self._touched.append(lower)
        since = self._changed.get(run)
        if since is not None:
            self._changed[lower] = max(0, since - page)
            self._changed[run] = min(since, page)

    def _tidy(self) -> None:
        """Cut off pages of which nothing is left, and join runs between which no other path begins any more.

        Runs with extra keys are not joined: it would have to be found out which spans of both are one.
        """
        for run in sorted(self._untidy, key=_first_of, reverse=True):
            if not run.live or run.parent is None:
                continue
            if run.live < run.count:
                self._shorten(run)
            elif len(run.children) == 1:
                (child,) = run.children.values()
                if not run.tokens.extra and not child.tokens.extra:
                    self._join(run, child)
        self._untidy = {}

    def _shorten(self, run: Run) -> None:
        run.count = run.live
        run.tokens = run.tokens.piece(0, run.count * self.page + self.lookahead)
        run.names = run.names[: run.count]

    def _join(self, run: Run, child: Run) -> None:
        """Give ``run`` the pages of its only child, too."""
        run.tokens = run.tokens.piece(0, run.count * self.page).extended(child.tokens)
        if len(run.names) == run.count:
            run.names = run.names + child.names
        for index, each in enumerate(self._boundaries.parts):
            run.kept[index] |= child.kept[index] << run.count * each
        for level, bits in enumerate(child.resumable):
            run.resumable[level] |= bits << run.count
            if child.leads[level]:
                run.leads[level] = run.count + child.leads[level]
        run.branches, run.children = child.branches, child.children
        for below in run.children.values():
            below.parent = run
        run.live = run.count + child.live
        run.count += child.count

    # ------------------------------------------------------------ names
    def _name_again(self, namespace: str, run: Run, tokens: Tokens, count: int) -> None:
        """Give the pages of a path the names that they had before everything was forgotten."""
        former = self._former.get(namespace)
        if former is None or former.label != run.label:  # what a namespace is called is a part of its pages' names
            return
        names: list[Any] = []
        for each, used in _path_to(*self._find(former, tokens, count)):
            names += each.names[:used]
            if len(each.names) < used:
                break
        for each, _ in _path_to(run, run.count):
            each.names += names[each.first + len(each.names) : each.first + each.count]
            if len(each.names) < each.count:
                break

    # ------------------------------------------------------------ where requests can resume
    def _settle(self) -> None:
        """Find after changes which boundaries can be resumed at now, and which pages lead to one."""
        judged: dict[Run, int] = {}  # from which of its pages on
        for changed in sorted(self._changed, key=_first_of):
            stack = [(changed, self._changed[changed], self._boundaries.nothing)]
            while stack:
                run, since, above = stack.pop()
                if judged.get(run, run.count + 1) <= since:  # what lies above it had been judged before
                    continue
                before = tuple(run.resumable)
                judged[run] = since
                self._boundaries.judge(run, since)
                if before != tuple(run.resumable):
                    self._touch(run, before)
                if run.children and (hulls := self._boundaries.changed(run, above)) is not None:
                    stack += [(child, 0, hulls) for child in run.children.values()]
        self._changed = {}
        for run in sorted(judged, key=_first_of, reverse=True):
            self._lead(run)

    def _lead(self, run: Run) -> None:
        """Find after ``run`` was judged which of its pages lead to a boundary, and what follows for the runs above."""
        while run.parent is not None and run.live:
            parent, goes_on = run.parent, False
            if not run.children:
                run.live = max(-(-run.kept[each.index].bit_length() // each.parts) for each in self.holders)
                if run.live < run.count:
                    self._untidy[run] = None
                    self._touch(run)
                    run.resumable = [bits & ones(run.live) for bits in run.resumable]
                    if not run.live:
                        del parent.children[run.identity]
                        self._untidy[parent] = None
                        goes_on = True
            for level, bits in enumerate(run.resumable):
                was, leads = run.leads[level], run.count if run.branches[level] else bits.bit_length()
                if leads != was:
                    self._touch(run)
                    run.leads[level] = leads
                    if not (leads and was):
                        parent.branches[level] += 1 if leads else -1
                        goes_on = True
            if not goes_on:
                return
            run = parent
        if run.parent is None and not run.children:
            del self._roots[run.identity]


def _path_to(run: Run, used: int) -> list[tuple[Run, int]]:
    """Return the runs from below the root to ``run``, and how many of the first pages of each are on the path."""
    found = []
    while run.parent is not None:
        found.append((run, used))
        run = run.parent
        used = run.count
    return found[::-1]


def _first_of(run: Run) -> int:
    return run.first
