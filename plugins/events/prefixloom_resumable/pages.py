"""ResumablePages: a copy of what a cache has cached, page by page, that knows where requests can resume.

It follows the changes of a cache's journal, and says after each lot of them what is different. Where a request can
resume it derives as the core does, from the reaches of the composition: a boundary can be resumed at if every component
has all that its reach needs there. Hooks that refuse matches are not asked.

It knows no event, no engine and no cache. First read ``ResumablePages.apply``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import attrs

from prefixloom import Change, Reach, Tokens

from .paths import TOKEN_BYTES, ExtraKey, Span, page_digest, pages_of

RECENT = 8
"""The paths that are remembered with their nodes, so that the next change of one costs only what is new."""


class PageNode:
    """One page of one path. ``bits``: what of it is cached, by keeper. ``gaps``: see ``ResumablePages``.

    ``label``  what its root was given: it belongs to the namespace
    ``name``   for whoever follows the pages: what an engine calls this one. None until it is set
    """

    __slots__ = (
        "bits", "children", "digest", "end", "extra", "gaps", "key", "label", "name", "parent", "resumable", "told_by",
        "unlinked",
    )  # fmt: skip

    def __init__(self, parent: PageNode | None, digest: bytes, end: int, label: Any) -> None:
        self.parent = parent
        self.digest = digest
        self.end = end
        self.label = label
        self.name: Any = None
        self.key = b""
        self.extra: tuple[ExtraKey, ...] = ()
        self.bits = 0
        self.children: dict[PageNode, None] | None = None
        self.gaps: tuple[int, ...] = ()
        self.resumable = 0
        """By level, one bit: whether a request can resume at its end."""
        self.told_by = (0, 0)
        """By level: how many of its children are told, and one if it is resumable itself. It is told unless 0."""
        self.unlinked = False

    @property
    def told(self) -> int:
        """By level, one bit: whether a request can resume at its end or at one below."""
        return (self.told_by[0] > 0) | (self.told_by[1] > 0) << 1


@attrs.frozen
class KeptPart:
    """One component on one tier: where its bits are."""

    component: str
    tier: str
    place: int
    shift: int
    parts: int
    """Pages of the component in a page of the tree; 1 for a state."""

    @property
    def mask(self) -> int:
        return ((1 << self.parts) - 1) << self.shift


@attrs.frozen
class Need:
    """What one component needs at a boundary. ``tokens``: of its page, 0 for a state.

    ``ends``: the reach is one interval that ends at the boundary, so the gap before it decides alone.
    """

    reach: Reach
    tokens: int
    ends: bool
    place: int


@attrs.frozen
class Differences:
    """What is not as it was.

    ``cleared``  what was there before is forgotten: the rest is all there is
    ``kept``     pages, by their ends, and the bits that each had
    ``states``   pages, by their ends, and whether each was resumable and told, by level
    """

    cleared: bool
    kept: tuple[tuple[PageNode, int], ...]
    states: tuple[tuple[PageNode, tuple[int, int]], ...]

    def told(self, level: int) -> tuple[list[PageNode], list[PageNode]]:
        """The pages that lead to no boundary any more, and those that lead to one now. Above is before below."""
        bit = 1 << level
        gone = [node for node, (_, told) in self.states if told & bit and not node.told & bit]
        return gone, [node for node, (_, told) in self.states if node.told & bit and not told & bit]

    def resumable(self, level: int) -> tuple[list[PageNode], list[PageNode]]:
        """The pages at whose end nobody can resume any more, and those at whose end one can now."""
        bit = 1 << level
        gone = [node for node, (was, _) in self.states if was & bit and not node.resumable & bit]
        return gone, [node for node, (was, _) in self.states if node.resumable & bit and not was & bit]

    def changed(self, keeper: KeptPart) -> tuple[list[PageNode], list[PageNode]]:
        """The pages of which one component has lost something on one tier, and those of which it has come by some."""
        mask = keeper.mask
        gone = [node for node, bits in self.kept if bits & ~node.bits & mask]
        return gone, [node for node, bits in self.kept if node.bits & ~bits & mask]


def runs(nodes: Iterable[PageNode]) -> list[list[PageNode]]:
    """Pages in which above is before below, as runs of such that follow each other."""
    found: list[list[PageNode]] = []
    at: dict[PageNode | None, list[PageNode]] = {}
    for node in nodes:
        run = at.pop(node.parent, None)
        if run is None:
            found.append(run := [])
        run.append(node)
        at[node] = run
    return found


class ResumablePages:
    """The pages of one cache.

    There are two levels: what is on the device, and what is on the device or on a tier below. For each level and
    component a node has a gap: the end of the last page of the component, up to the node's end, that is *not* there (0:
    all are). So an interval that ends at the node is there if it begins behind the gap.

    ``tiers``    those that are followed: the levels have the first, and all of them
    ``keepers``  each component on each tier
    """

    def __init__(
        self, composition: Any, root_of: Callable[[str], tuple[bytes, Any]], tiers: Sequence[str] | None = None
    ) -> None:
        """``root_of`` says of a namespace the digest and the label of its root. ``tiers``: all, if None."""
        self.page: int = composition.page
        self.lookahead: int = composition.lookahead
        self._root_of = root_of
        if tiers is None:
            tiers = ("device", "host") if composition.tier is not None else ("device",)
        self.tiers = tuple(tiers)
        self._keepers: dict[tuple[str, str], KeptPart] = {}
        self._needs: list[tuple[Need, ...]] = [() for _ in tiers]
        shift = 0
        for place, part in enumerate(composition.parts):
            parts = self.page // part.page_tokens if part.page_tokens else 1
            shape = part.reach.shape
            ends = part.reach.closed_upward or (shape is not None and shape.head == 0)
            for level, tier in enumerate(tiers):
                keeper = KeptPart(part.name, tier, place, shift, parts)
                shift += parts
                self._keepers[part.name, tier] = keeper
                self._needs[level] += (Need(part.reach, part.page_tokens, ends, place),)
        # states first: few pages have one, and who has none is asked nothing more
        self._needs = [tuple(sorted(needs, key=lambda need: need.tokens > 0)) for needs in self._needs]
        self._places = len(composition.parts)
        self._by_place = [[self._keepers[part.name, tier] for tier in tiers] for part in composition.parts]
        self._scattered = 0
        """The bits of components of which a change may matter to any boundary below it."""
        for place, part in enumerate(composition.parts):
            if part.page_tokens and not any(need.ends for need in self._needs[0] if need.place == place):
                for keeper in self._by_place[place]:
                    self._scattered |= keeper.mask
        self._reaches = [
            part.reach if not any(keeper.mask & self._scattered for keeper in keepers) else None
            for part, keepers in zip(composition.parts, self._by_place, strict=True)
        ]
        """By component, its reach, if the gap before a boundary says all; otherwise None."""
        self._forget()
        self._began = False

    def _forget(self) -> None:
        self._nodes: dict[bytes, PageNode] = {}
        self._roots: dict[str, PageNode] = {}
        self._recent: list[tuple[str, Tokens, list[PageNode]]] = []
        self._before: dict[PageNode, int] = {}
        self._fresh: list[PageNode] = []
        self._states: dict[PageNode, tuple[int, int]] = {}
        """Of nodes that may be told differently: what was resumable and told before."""

    # ------------------------------------------------------------ following
    def apply(self, changes: Iterable[Change]) -> Differences:
        """Follow some changes, and say what is different. The first time, everything before is forgotten."""
        cleared = not self._began
        self._began = True
        for change in changes:
            if change.kind == "cleared":
                self._forget()
                cleared = True
            elif change.kind != "refused" and change.tier in self.tiers:
                self._change(change)
        self._settle()
        found = self._differences(cleared)
        self._before, self._states = {}, {}
        return found

    def begin_again(self) -> None:
        """Forget everything; what is applied next tells all there is."""
        self._forget()
        self._began = False

    def everything(self) -> Differences:
        """All there is."""
        nodes = sorted(self._below(self._roots.values()), key=_end_of)
        return Differences(True, tuple((node, 0) for node in nodes), tuple((node, (0, 0)) for node in nodes))

    def _differences(self, cleared: bool) -> Differences:
        def by_end(item: tuple[PageNode, Any]) -> int:
            return item[0].end

        return Differences(
            cleared, tuple(sorted(self._before.items(), key=by_end)), tuple(sorted(self._states.items(), key=by_end))
        )

    @property
    def pages(self) -> int:
        """How many pages it knows."""
        return len(self._nodes)

    @property
    def keepers(self) -> list[KeptPart]:
        return [*self._keepers.values()]

    def _change(self, change: Change) -> None:
        """Note what one change says is cached, or is not any more."""
        keeper = self._keepers[change.component, change.tier]
        stored = change.kind == "stored"
        upto = change.boundary or max(hi for _, hi in change.spans)
        count = -(-upto // self.page)
        path = self._path(change.namespace, change.tokens, change.tokens.extra, count, stored)
        if len(path) < count:
            raise LookupError("a change removes what was not stored")
        if change.boundary is not None:
            self._note(path[change.boundary // self.page - 1], keeper.mask, stored)
        page = self.page // keeper.parts
        for lo, hi in change.spans:
            at = lo
            while at < hi:
                index = at // self.page
                upto = min(hi, (index + 1) * self.page)
                first, count = at % self.page // page, (upto - at) // page
                self._note(path[index], ((1 << count) - 1) << first + keeper.shift, stored)
                at = upto

    def _note(self, node: PageNode, mask: int, stored: bool) -> None:
        self._before.setdefault(node, node.bits)
        node.bits = node.bits | mask if stored else node.bits & ~mask

    # ------------------------------------------------------------ paths
    def path(self, namespace: str, tokens: Tokens, extra: Sequence[Span] = ()) -> list[PageNode]:
        """The pages of a path that are known, from its beginning on. ``extra`` are the spans of its extra keys."""
        whole = (tokens.count - self.lookahead) // self.page
        return self._path(namespace, tokens, (*tokens.extra, *extra), whole, False)[:whole]

    def _path(
        self, namespace: str, tokens: Tokens, spans: tuple[Span, ...], count: int, create: bool
    ) -> list[PageNode]:
        """The nodes of at least the first ``count`` pages of ``tokens``, in order; unless they are made, if known."""
        path, known = self._known(namespace, tokens, spans)
        node = path[-1] if path else self._root(namespace)
        for key, extra in islice(
            pages_of(tokens, spans, self.page, self.lookahead, len(path)), max(0, count - len(path))
        ):
            digest = page_digest(node.digest, key, extra)
            child = self._nodes.get(digest)
            if child is None:
                if not create:
                    break
                child = self._new(node, digest, key, extra)
            path.append(child)
            node = child
        if not spans:
            if known >= 0:
                del self._recent[known]
            self._recent.append((namespace, tokens, path))
            del self._recent[:-RECENT]
        return path

    def _known(self, namespace: str, tokens: Tokens, spans: tuple[Span, ...]) -> tuple[list[PageNode], int]:
        """The longest beginning of a path that is remembered from a recent one, and which one that is."""
        best, found, which = 0, [], -1
        if not spans:
            for at in range(len(self._recent) - 1, -1, -1):
                where, other, nodes = self._recent[at]
                if where != namespace:
                    continue
                while nodes and nodes[-1].unlinked:
                    nodes.pop()
                size = min(len(nodes), self._common(tokens, other))
                if size > best:
                    best, found, which = size, nodes, at
                    if size * self.page + self.page > tokens.count - self.lookahead:
                        break
        if which >= 0 and best < len(found):  # the rest of the other path stays remembered
            return found[:best], -1
        return found[:best], which

    def _common(self, one: bytes, other: bytes) -> int:
        """How many whole pages two paths have in common."""
        width, ahead = self.page * TOKEN_BYTES, self.lookahead * TOKEN_BYTES
        high = (min(len(one), len(other)) - ahead) // width
        if one[: high * width + ahead] == other[: high * width + ahead]:
            return max(0, high)
        low = 0
        while high - low > 1:
            middle = (low + high) // 2
            if one[low * width : middle * width + ahead] == other[low * width : middle * width + ahead]:
                low = middle
            else:
                high = middle
        return low

    def _root(self, namespace: str) -> PageNode:
        root = self._roots.get(namespace)
        if root is None:
            digest, label = self._root_of(namespace)
            root = self._roots[namespace] = PageNode(None, digest, 0, label)
            root.gaps = (0,) * (len(self._needs) * self._places)
        return root

    def _new(self, parent: PageNode, digest: bytes, key: bytes, extra: tuple[ExtraKey, ...]) -> PageNode:
        node = PageNode(parent, digest, parent.end + self.page, parent.label)
        node.key, node.extra = key, extra
        node.gaps = (node.end,) * len(parent.gaps)
        self._nodes[digest] = node
        self._fresh.append(node)
        if parent.children is None:
            parent.children = {}
        parent.children[node] = None
        return node

    @staticmethod
    def _below(nodes: Iterable[PageNode]) -> Iterator[PageNode]:
        """All nodes below ``nodes``, each after its parent."""
        stack = list(nodes)
        while stack:
            children = stack.pop().children
            if children:
                yield from children
                stack += children

    # ------------------------------------------------------------ where requests can resume
    def _settle(self) -> None:
        """After changes: find which boundaries can be resumed at now, and drop pages of which nothing is left."""
        changed = [node for node, bits in self._before.items() if bits != node.bits]
        nodes = sorted(dict.fromkeys([*changed, *self._fresh]), key=_end_of)
        self._fresh = []
        seen: dict[PageNode, None] = {}
        for node in nodes:
            seen[node] = None
            self._regap(node, seen)
            if (self._before.get(node, 0) ^ node.bits) & self._scattered:
                seen.update(dict.fromkeys(self._below([node])))
        for node in seen:
            self._judge(node)
        for node in reversed(nodes):
            self._prune(node)

    def _regap(self, node: PageNode, seen: dict[PageNode, None]) -> None:
        """Follow what changed at ``node`` down, as far as it matters."""
        stack = [node]
        while stack:
            node = stack.pop()
            gaps = self._gaps_of(node)
            if gaps != node.gaps:
                before, node.gaps = node.gaps, gaps
                seen[node] = None
                if node.children and self._matters_below(node.end, before, gaps):
                    stack += node.children

    def _matters_below(self, end: int, before: Sequence[int], gaps: Sequence[int]) -> bool:
        """Whether a boundary behind ``end`` may need what lies before a gap that has changed.

        Below, gaps may then be out of date; none that anything there needs.
        """
        for at, (was, gap) in enumerate(zip(before, gaps, strict=True)):
            if was != gap:
                reach = self._reaches[at % self._places]
                if reach is None or reach.until(max(was, gap) - 1) > end:
                    return True
        return False

    def _gaps_of(self, node: PageNode) -> tuple[int, ...]:
        assert node.parent is not None
        found = []
        above, bits = node.parent.gaps, node.bits
        at = 0
        for level in range(len(self._needs)):
            for keepers in self._by_place:
                have = 0
                for keeper in keepers[: level + 1]:
                    have |= bits >> keeper.shift
                parts = keepers[0].parts
                absent = ~have & ((1 << parts) - 1)
                if absent:
                    found.append(node.end - (parts - absent.bit_length()) * (self.page // parts))
                else:
                    found.append(above[at])
                at += 1
        return tuple(found)

    def _judge(self, node: PageNode) -> None:
        """See whether requests can resume at the end of ``node``."""
        resumable = 0
        if node.bits or node.children:
            for level in range(len(self._needs)):
                if all(self._has(node, need, level) for need in self._needs[level]):
                    resumable |= 1 << level
        self._mark(node, resumable)

    def _has(self, node: PageNode, need: Need, level: int) -> bool:
        """Whether a component has what resuming at the end of ``node`` needs."""
        gap = level * self._places + need.place
        if not need.tokens:
            return node.gaps[gap] < node.end
        for lo, hi in need.reach.needs(node.end):
            if lo >= hi:
                continue
            lo = lo // need.tokens * need.tokens
            hi = -(-hi // need.tokens) * need.tokens
            at = node
            while at.parent is not None and at.parent.end >= hi:
                at = at.parent
            if at.gaps[gap] <= lo:
                continue
            if not self._has_parts(at, need, level, lo, hi):
                return False
        return True

    def _has_parts(self, node: PageNode, need: Need, level: int, lo: int, hi: int) -> bool:
        """Whether the pages [lo, hi) are there, where more of the last node may be absent behind them."""
        if hi == node.end or node.parent is None:
            return False
        start = node.parent.end
        first = (max(lo, start) - start) // need.tokens
        wanted = ((1 << (hi - start) // need.tokens) - 1) >> first << first
        have = 0
        for keeper in self._by_place[need.place][: level + 1]:
            have |= node.bits >> keeper.shift
        return wanted & ~have == 0 and (lo >= start or node.parent.gaps[level * self._places + need.place] <= lo)

    def _mark(self, node: PageNode, resumable: int) -> None:
        """Note whether ``node`` is resumable, and which nodes above it are told for that."""
        flipped = node.resumable ^ resumable
        if not flipped:
            return
        self._states.setdefault(node, (node.resumable, node.told))
        node.resumable = resumable
        for level in (0, 1):
            if flipped >> level & 1:
                by = 1 if resumable >> level & 1 else -1
                at: PageNode | None = node
                while at is not None and at.parent is not None:
                    self._states.setdefault(at, (at.resumable, at.told))
                    count = at.told_by[level] + by
                    at.told_by = (count, at.told_by[1]) if level == 0 else (at.told_by[0], count)
                    at = at.parent if count == max(by, 0) else None

    def _prune(self, node: PageNode) -> None:
        """Unlink ``node`` and those above it of which nothing is left."""
        while node.parent is not None and not node.bits and not node.children and not node.unlinked:
            self._mark(node, 0)
            node.unlinked = True
            del self._nodes[node.digest]
            parent = node.parent
            assert parent.children is not None
            del parent.children[node]
            node = parent


def _end_of(node: PageNode) -> int:
    return node.end
