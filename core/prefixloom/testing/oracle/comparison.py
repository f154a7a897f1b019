"""One cache and the oracle's model beside it: each operation is done to both, and afterwards everything is compared.

The cache decides what it evicts. The model decides what the cache may evict, what it must keep, and every answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import attrs

from ...errors import CapacityError
from ...script import World
from ..inside import backdoor
from ..inside.backdoor import anchor, state_slots
from ..inside.memory import Memory, memory_of
from .sets import Facts, ModelLease, ModelSequence, Piece, SetModel, with_extra
from .view import Cached, Reader, View, contents, free_slots, require

CHECKED = frozenset({
    "open", "grow", "arrive", "append", "fill", "commit", "step", "publish", "rewind", "close", "abort", "evict",
    "drop_namespace", "flush", "poll", "insert", "lend", "want", "expire",
})  # fmt: skip
"""After these operations debug mode looks at everything."""
Lost = dict[str, int]
"""The components that an operation may evict from, and how many free pages it wanted of each."""


@attrs.frozen
class Allowances:
    """What the hooks and policies of a composition leave open: the model can say only what may happen, not what does.

    Everything here follows from which hooks are overridden; their answers are never looked at. A composition without
    hooks leaves nothing open. The sets hold names of components.

    ``narrows``  a match may refuse a boundary that can be resumed at, and more room may be asked for than is derived
    ``keeps``    a publication may add less to the tree than it could
    ``drops``    a split may lose a state
    ``widens``   a lease may cover more than resuming needs
    """

    narrows: bool = False
    keeps: frozenset[str] = frozenset()
    drops: frozenset[str] = frozenset()
    widens: frozenset[str] = frozenset()

    @classmethod
    def of(cls, parts: Iterable[Any], admitting: bool = False) -> Allowances:
        """Derive them from a composition's parts. ``admitting``: the composition has an admission policy of its own."""
        overridden = {part.name: frozenset(part.hooks.overridden) for part in parts}

        def having(*hooks: str) -> frozenset[str]:
            return frozenset(name for name, found in overridden.items() if found & set(hooks))

        selective = {part.name for part in parts if part.manifest.admission is not None or admitting}
        return cls(
            bool(having("create_match_validator", "finalize_match_result")),
            having("commit_insert") | selective,
            having("redistribute_on_node_split"),
            having("acquire_component_lock"),
        )


GONE = ("evicted", "expired", "flushed", "failed")
"""The reasons of a miss that say that something was cached once."""


class ComparedCache(World):
    """A cache compared with the model: the state that all operations share, and the checks after each."""

    def __init__(self, cache: Any, allowances: Allowances | None = None) -> None:
        super().__init__()
        self.cache = cache
        composition = cache.composition
        facts = [
            Facts(
                part.name,
                part.reach,
                part.page_tokens,
                part.manifest.tokens_per_slot,
                part.manifest.lookahead,
                part.capacity,
                part.manifest.max_rewind,
                -(-part.manifest.checkpoint_every // composition.page) * composition.page,
                composition.max_rewind + 1 if part.reach.unit == "boundary" and composition.max_rewind else 0,
            )
            for part in composition.parts
        ]
        self.facts = {f.name: f for f in facts}
        self.model = SetModel(facts, composition.page, composition.lookahead, composition.max_rewind)
        self.allowances = allowances or Allowances.of(composition.parts, backdoor.has_admission(cache))
        self.slots: dict[str, Memory] = {
            part.name: memory_of(cache.pool(part.name), part.manifest, f.page // f.group if f.page else 1)
            for part, f in zip(composition.parts, facts, strict=True)
        }
        self.minted: dict[str, Any] = {}
        """The slots that the script has taken out of the pools, by component."""
        self.outside: dict[str, list[int]] = {}
        """The slots that an engine has which lends them. Between two operations it has lent all."""
        if composition.lent:
            cache.lend({f.name: range(f.capacity) for f in facts})
        self.reader = Reader(cache, self.model, self.slots)
        self.journal = cache.journal()
        self.history = cache.history()
        self.once: dict[str, set[Piece]] = {f.name: set() for f in facts}
        """What the journal has ever said to be cached, by component."""
        self.followed: dict[str, set[Piece]] = {f.name: set() for f in facts}
        """What the journal says is cached, by component."""
        self.figures = dict.fromkeys(("opened", "asked_tokens", "hit_tokens", "recovered"), 0)
        """What the cache must have counted."""
        self.evicted = {f.name: 0 for f in facts}
        """By component, what it says that it evicted."""
        self.running: list[ModelSequence] = []
        self.leases: list[ModelLease] = []
        self.plans: list[tuple[Any, str, list[int]]] = []
        self.asked: list[tuple[str, tuple[int, ...], tuple[Any, ...], int]] = []
        self.told: list[tuple[Any, ...]] = []
        """What the race detector was told of slots since this was last cleared; nothing without debug mode."""
        self.debug = backdoor.checks(cache) is not None
        if self.debug:
            backdoor.watch_accesses(cache, lambda *told: self.told.append(told))
        self.operations = 0
        self.checks = 0
        for f in facts:
            self.slots[f.name].poison(free_slots(cache, f))
        self.view = self.reader.read(())

    # ------------------------------------------------------------ what is held
    def tables(self, run: ModelSequence) -> dict[str, list[int]]:
        return {name: run.sequence.pages(name) for name in self.facts}

    def held(self, run: ModelSequence) -> dict[str, set[int]]:
        """Return the page indices that a sequence lists, by component."""
        return {
            f.name: set() if f.boundary else {i for i, slot in enumerate(run.sequence.pages(f.name)) if slot >= 0}
            for f in self.model.facts
        }

    def ids(self, namespace: str, tokens: Iterable[int], extra: Iterable[Any] = ()) -> list[int]:
        return self.model.names.prefixes(namespace, with_extra(tokens, extra))

    def anchors(self) -> list[tuple[str, Any]]:
        found = [(run.namespace, anchor(run.sequence)) for run in self.running if not run.gone]
        return found + [(leased.namespace, anchor(leased.lease)) for leased in self.leases if not leased.gone]

    # ------------------------------------------------------------ what may be evicted
    def extent(self, f: Facts, cached: Cached | None) -> list[tuple[int, int]]:
        """Return the edges from ``cached`` upwards that resuming at its end needs something of, for one component."""
        found = []
        boundary = cached.end if cached is not None else 0
        needed = f.outlook(boundary)
        while cached is not None and cached.end:
            inside = any(cached.start < (i + 1) * f.page and i * f.page < cached.end for i in needed)
            if inside or (f.boundary and cached.end == boundary):
                found.append((cached.start, cached.end))
            cached = cached.up
        return found

    def record_cover(self, thing: ModelSequence | ModelLease, node: Any) -> None:
        """Record what a lease now anchored at ``node`` covers: whole edges as they are now, before any split."""
        thing.cover = {f.name: self.extent(f, self.view.nodes.get(id(node))) for f in self.model.facts}

    def covered(self, f: Facts, view: View, besides: Any = None, tight: bool = False) -> set[int]:
        """Return the nodes of which a live lease covers something of one component.

        ``tight``: assume that sequences have released what they keep only while there is room.
        """
        found: set[int] = set()

        def cover(node: Any, spans: list[tuple[int, int]]) -> None:
            cached = view.nodes.get(id(node))
            while cached is not None and cached.end:
                if any(lo <= cached.start and cached.end <= hi for lo, hi in spans):
                    found.add(id(cached))
                cached = cached.up

        for leased in self.leases:
            if not leased.gone:
                cover(anchor(leased.lease), leased.cover[f.name])
        for run in self.running:
            if run.gone:
                continue
            if f.boundary:
                if f.name in run.sourced:
                    cover(anchor(run.sequence), run.cover[f.name])
            elif (
                run.absent.get(f.name)
                or any(  # content arrived with gaps: take its whole lease
                    slot >= 0 and (not tight or f.ever_needed_from(index, run.keep))
                    for index, slot in enumerate(run.sequence.pages(f.name)[: run.published // f.page])
                )
            ):
                cover(anchor(run.sequence), run.cover[f.name])
        if besides is not None:
            cover(besides, self.extent(f, view.nodes.get(id(besides))))
        return found

    def evictable(self, f: Facts, view: View, besides: Any = None, tight: bool = False) -> int:
        """Count the pages that may be evicted: those of uncovered nodes, and those that nothing there needs."""
        covered = self.covered(f, view, besides, tight)
        count = 0
        for cached in view.nodes.values():
            pages = cached.pages.get(f.name, {})
            if id(cached) not in covered:
                count += len(pages)
            elif not f.boundary and f.reach.shape is not None:
                count += sum(1 for i in pages if not f.ever_needed_from(i, cached.end))
        return count

    def releasable_pages(self, f: Facts, run: ModelSequence) -> list[int]:
        """Return a sequence's own pages that nothing needs any more, which it keeps only while there is room."""
        if f.boundary or f.path or run.gone:
            return []
        first = run.published // f.page
        table = run.sequence.pages(f.name)
        return [
            index
            for index in range(first, min(run.keep // f.page, len(table)))
            if table[index] >= 0 and not f.ever_needed_from(index, run.keep)
        ]

    def room(self, wanted: dict[str, int], besides: Any = None) -> bool:
        """Return whether each pool has, or could get, the wanted number of free pages."""
        for name, count in wanted.items():
            f, free = self.facts[name], len(self.slots[name].free)
            if count > free:
                spare = sum(len(self.releasable_pages(f, run)) for run in self.running)
                if count > free + spare + self.evictable(f, self.view, besides, tight=True):
                    return False
        return True

    def held_where_there_is_room(self, runs: Iterable[ModelSequence]) -> list[tuple[ModelSequence, Facts, set[int]]]:
        """Return what sequences hold of components of which an eighth is free: they need not let go of it."""
        free = {f.name: self.cache.pool(f.name).free for f in self.model.facts}
        roomy = [f for f in self.model.facts if not f.boundary and free[f.name] * 8 >= f.capacity]
        return [(run, f, self.held(run)[f.name]) for run in runs for f in roomy]

    def check_kept(self, roomy: list[tuple[ModelSequence, Facts, set[int]]]) -> None:
        """Check that what a commit found room for is held still: it serves boundaries inside of a long prompt."""
        for run, f, before in roomy:
            lost = before - self.held(run)[f.name]
            require(not lost, "%s: pages %s were given back, and there is room", f.name, lost)

    def check_refusal(self, error: CapacityError, wanted: dict[str, int]) -> None:
        """Check what a refusal says of the components that lack room, and of the sequences that hold it."""
        require(error.shortages, "a refusal for want of room that names no component: %s", error)
        for short in error.shortages:
            f, figures = self.facts[short.component], self.cache.stats().components[short.component]
            told = (short.wanted, short.free, short.leased, short.running, short.capacity)
            right = (wanted[f.name], figures.free, figures.leased, figures.running, figures.capacity)
            require(told == right, "%s: a refusal says %s, not %s", f.name, told, right)
            lacking = short.wanted - short.free - short.evictable
            require(error.lacking[f.name] == lacking, "%s: %s lack, not %s", f.name, lacking, error.lacking)
            require(short.wanted > short.free, "%s: it is not what lacks room: %s", f.name, short)
            owned = sorted((len(self.owned(f, run)) for run in self.running if not run.gone), reverse=True)
            held = [count for _, count in short.holders]
            require(held == [count for count in owned[:3] if count], "%s: %s hold it, not %s", f.name, owned, held)

    def owned(self, f: Facts, run: ModelSequence) -> list[int]:
        """Return the slots that a sequence owns of one component."""
        if f.boundary:
            return list(state_slots(run.sequence, f.name))
        table = run.sequence.pages(f.name)
        return [slot for slot in table[run.published // f.page :] if slot >= 0]

    def everything(self) -> Lost:
        """Return the value of ``may_lose`` for an operation that may evict anything."""
        return {f.name: f.capacity + 1 for f in self.model.facts}

    @property
    def room_is_exact(self) -> bool:
        """Whether the model says exactly when something does not fit."""
        return not (self.allowances.narrows or self.allowances.widens)

    # ------------------------------------------------------------ after every operation
    def compare(
        self,
        what: str,
        may_lose: Lost | None = None,
        added: dict[str, set[Piece]] | None = None,
        wipe: str | None = None,
        optional: dict[str, set[Piece]] | None = None,
    ) -> None:
        """Read the cache again and compare it with the model.

        The pieces in ``added`` must be in the tree now, and those in ``optional`` may be. ``wipe``: a namespace whose
        pieces must all be gone ("*": every namespace).
        """
        self.operations += 1
        self.count(what)
        checks = backdoor.checks(self.cache)
        require(checks is None or checks > self.checks or what not in CHECKED, "debug mode did not look after %s", what)
        self.checks = checks or 0
        view = self.reader.read(self.anchors())
        fell: dict[str, set[Piece]] = {}
        stats = self.cache.stats()
        for f in self.model.facts:
            name = f.name
            before = self.model.resident[name]
            now = set(view.slots[name])
            expected = before | (added or {}).get(name, set())
            if wipe == "*":
                expected = set()
            elif wipe is not None:
                expected = {piece for piece in before if self.model.names.namespaces[piece[0]] != wipe}
            strange = now - expected - (optional or {}).get(name, set())
            require(not strange, "%s: %s holds %s, which nobody published", what, name, strange)
            lost = expected - now
            unasked = (may_lose or {}).get(name, 0) <= len(self.slots[name].free)
            if lost and unasked and wipe is None and name not in self.allowances.drops:
                fell[name] = lost
            if lost:
                self.count("lost")
            went, self.evicted[name] = (
                stats.components[name].evicted - self.evicted[name],
                stats.components[name].evicted,
            )
            passing = len((optional or {}).get(name, set()) - lost)  # evicted, and published before or after that
            counted = len(lost) <= went <= len(lost) + passing
            counted = counted or wipe is not None or name in self.allowances.drops or self.has_dropped
            require(counted, "%s: %s lost %s and counts %s more evictions", what, name, len(lost), went)
            self.model.resident[name] = now
        if fell:
            self.check_fell(what, fell, may_lose)
        if len(view.nodes) > len(self.view.nodes) and not added and what in ("open", "lease"):
            self.count("split")
        self.view = view
        self.model.keys = view.keys
        self.check_figures(stats)
        self.check_journal(what)
        self.check_owners(view)
        for run in self.running:
            if not run.gone:
                self.check_running(run, view)
        for leased in self.leases:
            if not leased.gone and not leased.detached:
                for f in self.model.facts:
                    missing = self.model.pieces(f, leased.ids, leased.boundary) - self.model.resident[f.name]
                    require(not missing, "a live lease at %s lost %s of %s", leased.boundary, missing, f.name)
        for f in self.model.facts:
            if f.path:
                self.check_closed_upward(f, view)
        self.check_match()

    def check(self) -> None:
        """Check that no less may be evicted than what nothing covers. An operation that covers something has said so.

        It may be more: sequences that went on let go of what they covered where they began.
        """
        figures = self.cache.stats().components
        for f in self.model.facts if self.room_is_exact else ():
            told, least = figures[f.name].evictable, self.evictable(f, self.view)
            require(least <= told, "%s: %s pages may be evicted, and the books say %s", f.name, least, told)

    @property
    def has_dropped(self) -> bool:
        """Whether anything is left of a namespace that was dropped, which goes without being evicted."""
        runs = any(run.detached and not run.gone for run in self.running)
        return runs or any(leased.detached and not leased.gone for leased in self.leases)

    def check_figures(self, stats: Any) -> None:
        """Check what the cache counts."""
        figures = {
            **self.figures,
            "sequences": sum(not run.gone for run in self.running),
            "nodes": sum(cached.up is not None for cached in self.view.nodes.values()),
        }
        for name, figure in figures.items():
            require(getattr(stats, name) == figure, "stats: %s is %s, not %s", name, getattr(stats, name), figure)
        for plan, _, ids in self.plans:
            right = plan.stale or self.model.usable(ids, plan.ready)
            require(right, "a plan at %s is not stale and cannot be resumed", plan.ready)

    def check_journal(self, what: str) -> None:
        """Follow the journal, and check that it leads to what is cached. Now and then, compare the contents as well."""
        changes = self.journal.take()
        self.follow(changes, self.followed)
        for name, pieces in self.model.resident.items():
            found = self.followed[name]
            require(found == pieces, "%s: after %s the journal has %s", name, what, found ^ pieces)
        if self.operations % 16 == 0:
            anew: dict[str, set[Piece]] = {name: set() for name in self.facts}
            self.follow(self.cache.contents(), anew)
            require(anew == self.followed, "after %s the contents are %s", what, anew)

    def follow(self, changes: Iterable[Any], known: dict[str, set[Piece]]) -> None:
        for change in changes:
            if change.kind == "cleared":
                for pieces in known.values():
                    pieces.clear()
            elif change.tier == "device" and change.kind != "refused":
                f, tokens = self.facts[change.component], change.tokens
                ids = self.ids(change.namespace, tokens.tolist(), tokens.extra)
                indices = [change.boundary] if f.boundary else []
                indices += [i for lo, hi in change.spans for i in range(lo // f.page, hi // f.page)]
                pieces = {self.model.piece(f, ids, index) for index in indices}
                if change.kind == "stored":
                    require(not pieces & known[f.name], "%s is stored twice", change)
                    known[f.name] |= pieces
                    self.once[f.name] |= pieces
                else:
                    require(pieces <= known[f.name], "%s was not stored", change)
                    known[f.name] -= pieces

    def check_fell(self, what: str, fell: dict[str, set[Piece]], may_lose: Lost | None) -> None:
        """Check pieces that a component lost without needing room: given what others lost, they served no boundary."""
        short = [name for name, wanted in (may_lose or {}).items() if wanted > len(self.slots[name].free)]
        require(short, "%s: %s was lost, and nothing is short", what, fell)
        self.count("fell")
        now = self.model.resident
        whole = {name: pieces | fell.get(name, set()) for name, pieces in now.items()}
        for node in self.view.nodes.values():
            ids = node.path()
            for boundary in range(node.start + self.model.page, node.end + 1, self.model.page):
                if not self.model.usable(ids, boundary):
                    self.model.resident = whole
                    served = self.model.usable(ids, boundary)
                    self.model.resident = now
                    require(not served, "%s: %s fell, which served boundary %s", what, fell, boundary)

    def check_owners(self, view: View) -> None:
        """Check that every slot has exactly one owner and none is lost."""
        for f in self.model.facts:
            name = f.name
            free = free_slots(self.cache, f)
            cached = list(view.slots[name].values())
            owned = [*free, *cached, *view.detached[name], *(self.minted[name].ids if name in self.minted else ())]
            owned += self.outside.get(name, ())
            for run in self.running:
                if not run.gone:
                    mine = self.owned(f, run)
                    told = run.sequence.owned(name)
                    require(told == len(mine), "%s: a sequence owns %s, and says %s", name, mine, told)
                    owned += mine
            require(len(set(owned)) == len(owned), "%s: a slot has two owners: %s", name, sorted(owned))
            require(len(owned) == f.capacity, "%s: %s of %s slots have an owner", name, len(owned), f.capacity)
            waiting = 0 if backdoor.works_in_flight(self.cache) else self.cache.pool(name).retiring
            require(not waiting, "%s: no step runs, and %s slots wait for one", name, waiting)
            stats = self.cache.stats().components[name]
            require(stats.free == len(free), "%s: stats say %s free, there are %s", name, stats.free, len(free))
            require(
                stats.cached == len(cached) + len(view.detached[name]), "%s: stats say %s cached", name, stats.cached
            )
            locked = sum(len(node.pages[name]) for node in view.nodes.values() if node.locked.get(name))
            require(stats.leased == locked, "%s: stats say %s leased, not %s", name, stats.leased, locked)
            apart = len(self.outside.get(name, ()))
            require(stats.outside == apart, "%s: stats say %s with the engine, not %s", name, stats.outside, apart)
            mine = len(owned) - len(free) - stats.cached - apart
            require(stats.running == mine, "%s: stats say %s are running, not %s", name, stats.running, mine)
            self.slots[name].poison(free)

    def check_running(self, run: ModelSequence, view: View) -> None:
        """Check a sequence's lengths, the pages that it must hold, and the content of all pages that it lists."""
        s = run.sequence
        lengths = (s.reserved, s.committed, s.published, s.named)
        wanted = (run.reserved, run.committed, run.published, run.named)
        require(lengths == wanted, "reserved, committed, published, named are %s, not %s", lengths, wanted)
        told = (s.ready, s.publishable, s.namespace)
        meant = (run.ready, self.model.publishable(run), run.namespace)
        require(told == meant, "ready, publishable and namespace are %s, not %s", told, meant)
        for f in self.model.facts:
            if f.boundary:
                owned, most = len(state_slots(s, f.name)), 1 + f.steps + len(run.tracks[f.name])
                require(owned <= most, "%s: a sequence has %s slots, and states for %s", f.name, owned, most)
                if f.name not in run.pending and not run.spoiled:
                    got, slots = self.slots[f.name].numbers(s.pages(f.name)[0]), self.slots[f.name]
                    right = slots.agree(got, [run.ids[run.committed]])
                    require(right, "%s: the running state at %s is wrong", f.name, run.committed)
                continue
            table = s.pages(f.name)
            require(len(table) == -(-run.reserved // f.page), "%s: %s pages for %s", f.name, len(table), run.reserved)
            listed = {index for index, slot in enumerate(table) if slot >= 0}
            missing = self.model.must_hold(f, run) - listed
            require(not missing, "%s: a sequence at %s lacks pages %s", f.name, wanted, sorted(missing))
            for index in listed:
                slot = table[index]
                if index * f.page < run.published:
                    self.check_borrowed(f, run, index, slot, view)
                done = (min(run.written[f.name], (index + 1) * f.page) - index * f.page) // f.group
                if done > 0:
                    got, expected = self.slots[f.name].numbers(slot)[:done], contents(f, run.ids, index, done)
                    right = self.slots[f.name].agree(got, expected)
                    require(right, "%s: a sequence reads %s at page %s, not %s", f.name, got, index, expected)

    def check_borrowed(self, f: Facts, run: ModelSequence, index: int, slot: int, view: View) -> None:
        if run.detached:
            require(slot in view.detached[f.name], "%s: slot %s of a dropped namespace is gone", f.name, slot)
            return
        got = view.slots[f.name].get(self.model.piece(f, run.ids, index))
        said = "%s: a sequence at %s reads slot %s for page %s, the tree has %s"
        require(got == slot, said, f.name, run.published, slot, index, got)

    def check_closed_upward(self, f: Facts, view: View) -> None:
        for cached in view.nodes.values():
            up = cached.up
            if up is not None and cached.pages[f.name]:
                whole = (cached.end - cached.start) // f.page
                require(len(cached.pages[f.name]) == whole, "%s: a path's node is partly there", f.name)
                require(not up.end or up.pages[f.name], "%s: the cell at %s hangs below nothing", f.name, cached.end)

    def check_match(self) -> None:
        """Match some of the recent prompts again and check the answers."""
        for turn in (self.operations, self.operations // 3):
            if self.asked:
                self.match_and_check(*self.asked[turn % len(self.asked)], candidates=self.operations % 8 == 0)

    def match_and_check(
        self, namespace: str, tokens: tuple[int, ...], extra: tuple[Any, ...], leave: int, candidates: bool
    ) -> Any:
        ids = self.ids(namespace, tokens, extra)
        plan = self.cache.match(list(tokens), namespace=namespace, leave=leave, extra=extra)
        limit = self.model.limit(len(tokens), leave)
        self.check_boundary("match", plan.ready, ids, limit)
        if not self.allowances.narrows:
            branch = self.model.branch(ids, limit)
            require(plan.branch == branch, "match at %s: the branch is %s, not %s", plan.ready, plan.branch, branch)
        self.check_plan(plan, ids, limit)
        if candidates:
            runs = plan.candidates()
            got = [b for lo, hi in runs for b in range(lo, hi + 1, self.model.page)]
            every = self.model.candidates(ids, limit)
            agree = set(got) <= set(every) if self.allowances.narrows else got == every
            require(agree, "candidates %s, not %s", got, every)
            apart = all(before + self.model.page < after for (_, before), (after, _) in pairwise(runs))
            require(apart, "runs of candidates that are one: %s", runs)
            self.check_explanation(plan, ids, min(plan.walked, limit), limit)
        return plan

    def check_explanation(self, plan: Any, ids: list[int], walked: int, limit: int) -> None:
        """Check that each token which did not hit has one reason, and that what is said to have gone has been there."""
        told = self.cache.explain(plan, closely=self.operations % 16 == 0)
        at = plan.ready
        for finding in told.findings:
            require(finding.start == at < finding.end, "%s explains from %s on", finding, at)
            at = finding.end
            f = self.facts.get(finding.component)
            if f is not None and at <= walked and finding.reason != "plugin":
                self.check_what_is_lacking(f, finding, ids)
            elif f is not None and finding.reason in GONE:
                pages = [i for low, high in finding.lacks for i in range(low // f.page, high // f.page)]
                pieces = {self.model.piece(f, ids, index) for index in ([at] if f.boundary else pages)}
                require(pieces, "%s: nothing of it is said to be gone", finding)
                require(pieces <= self.once[f.name], "%s: %s was never there", finding, pieces - self.once[f.name])
            elif finding.reason == "new":
                self.check_never_there(finding.start, limit, ids)
        require(at == plan.key_tokens, "tokens from %s on are not explained", at)
        for f in self.model.facts:
            has = max(b for b in range(0, walked + 1, self.model.page) if self.model.has(f, ids, b))
            require(told.alone[f.name] == has, "%s alone: %s, not %s", f.name, told.alone[f.name], has)

    def check_what_is_lacking(self, f: Facts, finding: Any, ids: list[int]) -> None:
        """Check what a component lacks at the end of a finding, and whether it has been there."""
        lacks = self.model.pieces(f, ids, finding.end) - self.model.resident[f.name]
        pages = [i for low, high in finding.lacks for i in range(low // f.page, high // f.page)]
        told = {self.model.piece(f, ids, i) for i in pages}
        require(lacks and (f.boundary or told == lacks), "%s lacks %s", finding, lacks)
        if finding.reason in GONE:
            require(lacks <= self.once[f.name], "%s: %s was never there", finding, lacks - self.once[f.name])
        elif finding.reason == "never kept":
            require(not lacks <= self.once[f.name], "%s: all of it was there", finding)
        else:
            require(finding.reason == "refused", "%s: its keys are there", finding)

    def check_never_there(self, start: int, limit: int, ids: list[int]) -> None:
        """Check that nothing from ``start`` on was ever cached, neither pages nor states."""
        for f in self.model.facts:
            boundaries = range(start + self.model.page, limit + 1, self.model.page)
            indices = boundaries if f.boundary else range(start // f.page, limit // f.page)
            there = {self.model.piece(f, ids, i) for i in indices} & self.once[f.name]
            require(not there, "%s: %s of what is new from %s on was there", f.name, there, start)

    def check_plan(self, plan: Any, ids: list[int], limit: int) -> None:
        """Check what a plan says beside its boundary: how far keys lead, who is in the way, and what opening takes."""
        ready, walked = plan.ready, self.model.walked(ids)
        require(plan.walked == walked, "match at %s: the keys lead to %s, not %s", ready, plan.walked, walked)
        if ready < min(walked, limit):
            f = self.facts.get(plan.limited_by)
            lacks = f is not None and not self.model.has(f, ids, ready + self.model.page)
            right = f is not None and (lacks or self.allowances.narrows)
            require(right, "match at %s of %s: %s is in the way", ready, min(walked, limit), plan.limited_by)
        else:
            require(plan.limited_by is None, "match at %s, as deep as can be: %s is in the way", ready, plan.limited_by)
        taken = {f.name: 1 + f.steps for f in self.model.facts if f.boundary}
        exact = not self.room_is_exact or plan.need == taken
        require(exact, "opening at %s takes %s, and the plan says %s", ready, taken, plan.need)
        for f in self.model.facts:
            self.check_listed(f, plan.pages(f.name), ids, ready)

    def check_listed(self, f: Facts, slots: Any, ids: list[int], boundary: int) -> None:
        """Check that ``slots`` are those of the tree up to ``boundary``, and that what this needs is among them."""
        count = (boundary > 0) if f.boundary else boundary // f.page
        require(len(slots) == count, "%s: %s slots are listed up to %s", f.name, len(slots), boundary)
        listed = {boundary if f.boundary else index: slot for index, slot in enumerate(slots) if slot >= 0}
        needed = {boundary} - {0} if f.boundary else f.needed(boundary)
        require(listed.keys() >= needed, "%s: %s lists %s, not all of %s", f.name, boundary, listed, needed)
        for index, slot in listed.items():
            got = self.view.slots[f.name].get(self.model.piece(f, ids, index))
            require(slot == got, "%s: slot %s is listed for %s, the tree has %s", f.name, slot, index, got)

    def check_boundary(self, what: str, got: int, ids: list[int], limit: int) -> int:
        """Check that ``got`` is the deepest boundary the model allows; where hooks narrow, any that it allows."""
        every = self.model.candidates(ids, limit)
        right = got in every if self.allowances.narrows else got == every[-1]
        require(right, "%s says %s, the sets say %s (limit %s)", what, got, every[-1], limit)
        return got
