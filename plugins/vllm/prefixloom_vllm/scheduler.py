"""The scheduler's side: which request loads what, which stores what, and when.

vLLM asks here for each request that it admits how much of it the host has, tells which blocks it gave it, and before
each step lets this side send copies along with it. A copy is over when all workers have said so in the region's table.
Nothing here touches a tensor.

vLLM may give a block to another request while it is still being copied to the host. The next step then tells the
workers to finish that copy first (``wait_for``), before anything of the step writes.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from prefixloom import InvariantError, MatchPlan, PrefixloomError, ProtocolError, Tokens, encode

from .books import Books, Claimed, Fetching
from .events import HostEvents
from .figures import Figures
from .groups import Group
from .region import RING, Region

log = logging.getLogger("vllm.prefixloom")

Pairs = dict[int, tuple[list[int], list[int]]]
"""Of each group, the device's blocks and the host's slots that belong together."""


@attrs.frozen
class Copy:
    """One copy that the workers make. ``request`` waits for it, if it is a load."""

    number: int
    request: str
    pairs: Pairs


@attrs.frozen
class Plan:
    """What the workers do in one step: finish these copies first, then load, and store behind the layers."""

    wait_for: tuple[int, ...] = ()
    loads: tuple[Copy, ...] = ()
    stores: tuple[Copy, ...] = ()


@attrs.define(eq=False)
class Tracked:
    """What this side knows of one request.

    ``found``: the boundary up to which the host had it when vLLM asked last. ``stored``: the boundary up to which its
    pages were sent to the host. ``epoch``: when its content was computed; what is older than a reset is not stored.
    """

    request: Any
    namespace: str
    spans: tuple[tuple[int, int, str], ...]
    found: int = 0
    stored: int = 0
    epoch: int = -1
    known: bool = False
    plan: MatchPlan | None = None
    asked: tuple[int, int] = (-1, 0)
    claimed: Claimed | None = None
    promised: int = 0
    fetching: Fetching | None = None
    fetched: bool = False
    failed: bool = False
    finished: bool = False
    copies: int = 0
    logged: str = ""
    encoded: Tokens = attrs.field(factory=lambda: encode(()))

    def tokens(self, upto: int) -> Tokens:
        """Return the first ``upto`` tokens. Each is encoded once."""
        count, request = self.encoded.count, self.request
        if count < upto:
            more = encode(request.all_token_ids[count : request.num_tokens])
            self.encoded = self.encoded.extended(more) if count else more
        return self.encoded if self.encoded.count == upto else self.encoded.part(0, upto)

    def extra(self, upto: int) -> list[tuple[int, int, str]]:
        return [(start, min(end, upto), key) for start, end, key in self.spans if start < upto]


@attrs.define(eq=False)
class Store:
    """A copy to the host under way: at which boundaries it ends, and which slots it fills up to each.

    ``sure``: tokens whose names are for good, though the request be preempted.
    """

    copy: Copy
    tracked: Tracked
    start: int
    slots: dict[str, dict[int, int]]  # by position of the block
    boundaries: list[int]
    epoch: int
    sure: int
    preemptions: int

    @property
    def unnamed(self) -> bool:
        """Whether vLLM has computed tokens of it without knowing them yet (it schedules one step ahead)."""
        request = self.tracked.request
        return (
            self.boundaries[-1] > request.num_tokens
            and not self.tracked.finished
            and request.num_preemptions == self.preemptions
        )


class SchedulerSide:
    """The connector in the scheduler's process."""

    def __init__(
        self,
        groups: Sequence[Group],
        books: Books,
        region: Region,
        figures: Figures,
        speculates: bool = False,
        events: HostEvents | None = None,
    ) -> None:
        """``speculates``: steps may compute guessed tokens, of which those that are refused are computed again.

        ``events``: announces what the host has, if somebody wants to know.
        """
        self.events = events
        self.speculates = speculates
        self.groups = groups
        self.books = books
        self.region = region
        self.figures = figures
        self.tracked: dict[str, Tracked] = {}
        self._number = 0
        self._places: set[int] = set()  # of the region's table, that copies under way have
        self._loads: list[Copy] = []  # to be sent with the next step
        self._loading: dict[int, tuple[Tracked, Claimed]] = {}
        self._storing: dict[int, Store] = {}
        self._copied_blocks: dict[int, set[int]] = {}  # the blocks that stores under way read, and which stores
        self._new_blocks: set[int] = set()  # that loads were given since the last step

    # ------------------------------------------------------------ requests
    def add(self, request: Any) -> Tracked | None:
        """Begin to follow a request. None: nothing of it can be kept, since its tokens do not name its content."""
        tracked = self.tracked.get(request.request_id)
        if tracked is not None and tracked.request is not request:  # an id may come again while copies go on
            del self.tracked[request.request_id]
            tracked = None
        if request.prompt_embeds is not None or request.resumable:
            return None
        if request.lora_request is not None and self.books.options.store is not None:
            return None  # a store would find it by the adapter's name and path, which say nothing of its content
        if tracked is None:
            tracked = Tracked(request, namespace_of(request), spans_of(request))
            self.tracked[request.request_id] = tracked
        return tracked

    def hit(self, request: Any, computed: int) -> int | None:
        """Return how many tokens behind the ``computed`` ones to load from the host; None: ask again later."""
        tracked = self.add(request)
        if tracked is None:
            return 0
        self.settle()
        plan = tracked.plan
        if plan is None or tracked.asked != self._question(tracked) or (tracked.claimed is None and plan.stale):
            self._let_go(tracked)
            plan = self._match(tracked)
        lacking = request.num_tokens - max(plan.ready, computed)
        may_fetch = self.books.has_store and not tracked.fetched and not tracked.failed
        if tracked.fetching is not None or (may_fetch and lacking > self.books.page):
            if self._fetches(tracked, plan):
                return None
            self._let_go(tracked)
            plan = self._match(tracked)
        if not tracked.known:
            tracked.known = True
            self.figures.add(asked_tokens=plan.key_tokens, hit_tokens=plan.ready)
            for each in self.books.cache.account(plan).findings:
                self.figures.add_missed(each.component, each.loss.tier if each.loss else "", each.reason, each.tokens)
        tracked.found = tracked.stored = plan.ready
        tracked.epoch = self.books.epoch
        more = plan.ready - computed
        if log.isEnabledFor(logging.DEBUG) and plan.why != tracked.logged:
            tracked.logged = plan.why
            log.debug("request %s: %d tokens are on the host: %s", request.request_id, plan.ready, plan.why)
        if tracked.failed or more < self.books.options.load_at_least or request.skip_reading_prefix_cache:
            self._let_go(tracked)
            return 0
        if tracked.claimed is None:
            tracked.claimed = self.books.claim(plan)
        tracked.promised = more
        return more

    def _match(self, tracked: Tracked) -> MatchPlan:
        count = tracked.request.num_tokens
        tracked.asked = self._question(tracked)
        tracked.plan = self.books.match(tracked.tokens(count), tracked.namespace, tracked.extra(count))
        return tracked.plan

    def _question(self, tracked: Tracked) -> tuple[int, int]:
        """Return what the answer to vLLM depends on, which asks at each step for which it has no blocks."""
        return self.books.gains, tracked.request.num_tokens

    def _fetches(self, tracked: Tracked, plan: MatchPlan) -> bool:
        """Ask a store, once, for more of a prompt. Return whether it is still being asked."""
        if tracked.fetching is None:
            tracked.fetched = True
            try:
                tracked.fetching = self.books.fetch(plan)
            except PrefixloomError as error:
                log.debug("request %s is not looked up in the store: %s", tracked.request.request_id, error)
                return False
        self.books.poll()
        if not tracked.fetching.over:
            return True
        self._name_fetched(tracked)
        fetching, tracked.fetching = tracked.fetching, None
        restored = fetching.restored
        log.debug(
            "request %s: the store brought %d tokens %s", tracked.request.request_id, restored.ready, restored.why
        )
        self.figures.add(fetched_tokens=max(0, restored.ready - plan.ready))
        self.books.fetched(fetching)
        return False

    def _name_fetched(self, tracked: Tracked) -> None:
        """Name the pages that a store brings for a prompt as the prompt's request names them."""
        if self.events is not None:
            with self.events.guard():
                count = tracked.request.num_tokens
                tokens = tracked.tokens(count).keyed(tracked.extra(count))
                self.events.name(tracked.request, tracked.namespace, tokens)

    def take_events(self) -> list[Any]:
        """Return the events since the last call."""
        if self.events is None:
            return []
        for tracked in self.tracked.values():
            if tracked.fetching is not None:
                self._name_fetched(tracked)
        return self.events.take()

    def allocated(self, request: Any, blocks: Sequence[Sequence[Any]], external: int) -> None:
        """Load ``external`` tokens into the last of the blocks that vLLM has given a request."""
        tracked = self.tracked.get(request.request_id)
        if tracked is None:
            return
        if not external:
            self._let_go(tracked)
            return
        claimed, tracked.claimed = tracked.claimed, None
        if claimed is None:
            raise ProtocolError(
                f"vLLM loads {external} tokens for {request.request_id}, and nothing was promised to it"
            )
        computed = claimed.ready - external
        if external != tracked.promised:
            raise ProtocolError(
                f"vLLM loads {external} tokens for {request.request_id}, and {tracked.promised} were promised to it"
            )
        pairs: Pairs = {}
        for group in self.groups:
            table, slots = blocks[group.index], claimed.slots[group.name]
            last = claimed.ready // group.tokens
            pages = range(last - 1, last) if group.is_state else range(computed // group.tokens, last)
            chosen = [(table[p], slots[0] if group.is_state else slots[p]) for p in pages if not table[p].is_null]
            if any(slot < 0 for _, slot in chosen) or (group.is_state and not chosen):
                raise InvariantError(
                    f"{group.name}: the blocks that vLLM gave {request.request_id} are not those that its reach needs"
                )
            pairs[group.index] = [block.block_id for block, _ in chosen], [slot for _, slot in chosen]
            self._new_blocks.update(pairs[group.index][0])
        copy = Copy(self._next(), request.request_id, pairs)
        self._loads.append(copy)
        self._loading[copy.number] = tracked, claimed
        tracked.copies += 1
        self.figures.add(loads=1, loaded_tokens=external)

    def finished(self, request: Any) -> None:
        """Release what a request that has ended holds. Its copies under way continue."""
        tracked = self.tracked.get(request.request_id)
        if tracked is not None:
            tracked.finished = True
            self._let_go(tracked)
            if tracked.fetching is not None:
                self._name_fetched(tracked)
                fetching, tracked.fetching = tracked.fetching, None
                self.books.fetched(fetching)
            self._forget_finished(tracked)
        self.settle()

    def _forget_finished(self, tracked: Tracked) -> None:
        if tracked.finished and not tracked.copies and self.tracked.get(tracked.request.request_id) is tracked:
            del self.tracked[tracked.request.request_id]

    def _let_go(self, tracked: Tracked) -> None:
        claimed, tracked.claimed = tracked.claimed, None
        if claimed is not None:
            self.books.release(claimed)

    # ------------------------------------------------------------ steps
    def plan(self, scheduled: Mapping[str, int], block_state: Any, new_blocks: Iterable[int]) -> Plan:
        """Plan what the workers copy along with a step.

        ``scheduled``: tokens by request. ``block_state`` tells the blocks of a request, and the states on offer.
        ``new_blocks``: the blocks that this step was given to write to.
        """
        self.settle()
        self.books.poll()
        self.region.unlink_when_mapped()
        wait_for = self._overwritten(new_blocks)
        stores = []
        offered = block_state.boundary_state_offloads if block_state is not None else {}
        for name, count in scheduled.items():
            tracked = self.tracked.get(name)
            if tracked is None or len(self._storing) >= RING // 2:
                continue
            request = tracked.request
            computed = request.num_computed_tokens + count
            if self.speculates:  # tokens that were guessed, by this step or one before it, may be computed again
                computed = min(computed, request.num_tokens)
            if computed - tracked.stored >= self.books.page or name in offered:
                copy = self._store(tracked, computed, block_state.resolve_block_ids(name), offered.get(name, ()))
                if copy is not None:
                    stores.append(copy)
        loads, self._loads = self._loads, []
        return Plan(wait_for, tuple(loads), tuple(stores))

    def _overwritten(self, new_blocks: Iterable[int]) -> tuple[int, ...]:
        """Return the stores under way that read blocks to which this step writes."""
        if not self._copied_blocks:
            self._new_blocks.clear()
            return ()
        found: set[int] = set()
        for block in (*new_blocks, *self._new_blocks):
            if block in self._copied_blocks:
                found |= self._copied_blocks[block]
        self._new_blocks.clear()
        return tuple(sorted(found))

    def _store(self, tracked: Tracked, computed: int, tables: Sequence[Sequence[int]], offered: Any) -> Copy | None:
        """Plan the copy of what a step completes of a request, as far as there is room for it."""
        page = self.books.page
        start, end = tracked.stored, max(tracked.stored, computed // page * page)
        if tracked.epoch != self.books.epoch:
            return None
        wanted = {}
        for group in self.groups:
            if group.exact_blocks:
                found = _offered(group, tracked.found, end, offered)
            else:
                found = _positions(group, tables[group.index], start, end)
            if group.is_state:  # between two boundaries nobody resumes
                found = [(at, block) for at, block in found if not (at + 1) * group.tokens % page]
            wanted[group.name] = found
        if not any(wanted.values()):
            return None
        taken = self.books.take({name: len(found) for name, found in wanted.items()})
        end, all_of_it = self._room(start, end, wanted, taken), end
        if end < all_of_it:
            self.figures.add(refused_tokens=all_of_it - end)
        pairs: Pairs = {}
        slots: dict[str, dict[int, int]] = {}
        for group in self.groups:
            mine = taken[group.name]
            found = [(at, block) for at, block in wanted[group.name] if (at + 1) * group.tokens <= end]
            found = found[max(0, len(found) - len(mine)) :]  # of windows and states, the last are worth most
            slots[group.name] = {at: slot for (at, _), slot in zip(found, mine, strict=False)}
            if len(found) < len(mine):
                self.books.give({group.name: mine[len(found) :]})
            pairs[group.index] = [block for _, block in found], mine[: len(found)]
        if not any(slots.values()):
            return None
        boundaries = {(at + 1) * g.tokens for g in self.groups if g.is_state for at in slots[g.name]}
        if end > start:
            boundaries.add(end)
        copy = Copy(self._next(), tracked.request.request_id, pairs)
        self._storing[copy.number] = Store(
            copy, tracked, start, slots, sorted(boundaries), tracked.epoch,
            min(end, tracked.request.num_tokens), tracked.request.num_preemptions,
        )  # fmt: skip
        for blocks, _ in pairs.values():
            for block in blocks:
                self._copied_blocks.setdefault(block, set()).add(copy.number)
        tracked.stored = end
        tracked.copies += 1
        return copy

    def _room(self, start: int, end: int, wanted: Any, taken: Any) -> int:
        """Return the last boundary up to which all components that need whole paths have slots for their blocks."""
        for group in self.groups:
            if group.reach.closed_upward and len(taken[group.name]) < len(wanted[group.name]):
                end = min(end, start + len(taken[group.name]) * group.tokens)
        return end // self.books.page * self.books.page

    def _next(self) -> int:
        """Return the number of a new copy. No copy under way has its place in the region's table."""
        self._number += 1
        while self._number % RING in self._places:
            self._number += 1
        self._places.add(self._number % RING)
        return self._number

    # ------------------------------------------------------------ copies that are over
    def settle(self) -> None:
        """Enter what the workers have finished."""
        for number in [number for number in self._loading if self.region.finished(number) is not None]:
            tracked, claimed = self._loading.pop(number)
            self._places.discard(number % RING)
            if not self.region.finished(number):
                tracked.failed = True
                self.figures.add(failed_loads=1)
            self.books.release(claimed)
            tracked.copies -= 1
            self._forget_finished(tracked)
        for number in [*self._storing]:
            ok = self.region.finished(number)
            if ok is None or self._storing[number].unnamed:
                break  # they end in order, and are entered in order
            store = self._storing.pop(number)
            self._places.discard(number % RING)
            for blocks, _ in store.copy.pairs.values():
                for block in blocks:
                    others = self._copied_blocks[block]
                    others.discard(number)
                    if not others:
                        del self._copied_blocks[block]
            self._enter(store, ok)
            store.tracked.copies -= 1
            self._forget_finished(store.tracked)

    def _enter(self, store: Store, ok: bool) -> None:
        """Give the books the content of a store that is over, boundary by boundary, unless the store failed."""
        tracked, request = store.tracked, store.tracked.request
        left = store.slots
        if not ok:
            self.figures.add(failed_stores=1)
        if ok and store.epoch == self.books.epoch:
            sure = request.num_tokens if request.num_preemptions == store.preemptions else store.sure
            start = store.start
            for boundary in store.boundaries:
                if boundary > sure:
                    break
                slots = {}
                for group in self.groups:
                    mine = left[group.name]
                    if group.is_state:
                        at = boundary // group.tokens - 1
                        slots[group.name] = [mine.pop(at)] if at in mine else []
                    else:
                        pages = range(start // group.tokens, boundary // group.tokens)
                        slots[group.name] = [mine.pop(at, -1) for at in pages]
                tokens, extra = tracked.tokens(boundary), tracked.extra(boundary)
                done = self.books.insert(tokens, slots, min(start, boundary), tracked.namespace, extra)
                if self.events is not None:
                    self.events.name(request, tracked.namespace, tokens.keyed(extra))
                self.figures.add(stores=1, stored_tokens=max(0, done.length - start))
                if done.length < boundary:
                    tracked.stored = min(tracked.stored, done.length)  # its beginning was evicted: it goes again
                    break
                start = max(start, boundary)
        elif not ok:
            tracked.stored = min(tracked.stored, store.start)
        self.books.give({name: [*mine.values()] for name, mine in left.items()})

    @property
    def busy(self) -> bool:
        """Whether copies are under way, or the store has something to do."""
        return bool(self._storing or self._loading or self._loads) or self.books.writing

    # ------------------------------------------------------------ the whole
    def reset(self) -> None:
        """Forget everything: the weights are others now, say."""
        for tracked in self.tracked.values():
            self._let_go(tracked)
            if tracked.fetching is not None:
                self._name_fetched(tracked)
                fetching, tracked.fetching = tracked.fetching, None
                self.books.fetched(fetching)
        self.settle()
        self.books.forget()

    def check(self) -> None:
        """Check both sides' books: of the host's slots, and of vLLM's blocks that are being copied."""
        self.books.check()
        reading = {
            block for store in self._storing.values() for blocks, _ in store.copy.pairs.values() for block in blocks
        }
        if reading != self._copied_blocks.keys():
            raise InvariantError(
                f"stores read the blocks {sorted(reading)}, and {sorted(self._copied_blocks)} are fenced"
            )
        for name, tracked in self.tracked.items():
            if tracked.stored % self.books.page or tracked.copies < 0:
                raise InvariantError(
                    f"request {name}: stored up to {tracked.stored}, {tracked.copies} copies under way"
                )


def _offered(group: Group, found: int, end: int, offered: Iterable[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """Return the (position, block) of the states that vLLM offers and the host does not have, up to ``end``.

    vLLM offers a state when it knows the tokens up to there, which may be a step after the pages were sent.
    """
    at_boundaries = {
        at // group.tokens - 1: block for index, block, at in offered if index == group.index and not at % group.tokens
    }
    return [(at, block) for at, block in sorted(at_boundaries.items()) if found < (at + 1) * group.tokens <= end]


def _positions(group: Group, table: Sequence[int], start: int, end: int) -> list[tuple[int, int]]:
    """Return the (position, block) of a group's blocks that hold tokens or boundaries from ``start`` to ``end``."""
    pages = range(start // group.tokens, min(end // group.tokens, len(table)))
    return [(at, table[at]) for at in pages if table[at]]


def namespace_of(request: Any) -> str:
    """Return the text that separates requests of equal tokens: the adapter, and the salt."""
    lora = request.lora_request
    if lora is None and not request.cache_salt:
        return ""
    adapter = None if lora is None else [lora.lora_name, lora.lora_path]
    return json.dumps({"adapter": adapter, "salt": request.cache_salt})


def spans_of(request: Any) -> tuple[tuple[int, int, str], ...]:
    """Return the positions of images and the like, with the hash of each.

    The sound of a video lies inside of the video's positions. What overlaps is one span, with both hashes.
    """
    found: list[tuple[int, int, str]] = []
    places = ((each.mm_position, each.identifier) for each in request.mm_features)
    for start, length, name in sorted((place.offset, place.length, name) for place, name in places):
        if found and start < found[-1][1]:
            first, end, names = found.pop()
            found.append((first, max(end, start + length), f"{names}, {name} at {start - first}:{length}"))
        else:
            found.append((start, start + length, name))
    return tuple(found)
