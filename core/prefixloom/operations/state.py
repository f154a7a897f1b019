"""State: what all operations of one cache share, with one owner for each part of it.

``Shape`` is what is known when the cache is composed and never changes. ``Index`` is the tree and its truth. ``Match``
is what a prompt's match asked and found. ``Hold`` is what one lease covers, and ``Running`` what a running request has
besides. ``Core`` holds these together with what is in flight, the plugin calls, the page tables and the counters; there
is one per cache, and operations take it as their first argument.

Nothing here does an operation, and nothing here knows the faces that an engine holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Many
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import attrs

from ..contract.identity import Identity
from ..contract.tier_answers import Restored, TierStats
from ..device.flight import Flight, Work
from ..device.handles import Dropped, Handle, caller
from ..device.pool import Pool
from ..device.streams import Stream, stream_for
from ..device.tables import Tables
from ..device.timeline import Timekeeper, Timeline
from ..errors import BrokenError, InputError, PrefixloomError, ProtocolError
from ..keys.elements import KeyMaker, NamedTokens
from ..keys.lookahead import Lookahead
from ..keys.tokens import Span, Tokens
from ..tree.cells import Cells
from ..tree.expiries import Expiries
from ..tree.holdings import StateHolding
from ..tree.journal import Journal, Recorder
from ..tree.lane import Lane, PageLane
from ..tree.partial_lane import PartialLane
from ..tree.passing import PassingLane
from ..tree.path_lane import PathLane
from ..tree.radix import FOREVER, Counted, Node, Root, Tree, unlink
from ..tree.state_lane import StateLane
from .plugin_calls import PluginCalls
from .unwritten import Unwritten

if TYPE_CHECKING:
    from ..contract.composition import Composition
    from ..contract.values import Claim, Op, Receipt, WalkView
    from ..tree.residency import Residency

    Pairs = Many[tuple[Lane, Any]]
    Validators = Many[tuple[str, Callable[[WalkView], int]]]

Fill = tuple[StateLane, StateHolding, str, int]
"""(lane, holding, kind, source): a running state whose slot must get its content, by an op of this kind.

It is a copy of ``source`` (a ``decode`` of what the tree has in another form), or a ``clear``: zeros, of ``CLEAR``. A
holding has one at most.
"""
CLEAR = -1


class Shape:
    """What is known of a cache when it is composed and never changes. What it never has, operations do not look for.

    ``page`` is the tokens of a page of the tree. Lanes are listed by kind; ``path_lanes`` are of reaches that are
    closed upward, and of ``partial_lanes`` a running sequence may give some pages back early. ``in_order`` has the
    lanes of pages first, and ``all_lanes`` those of the tier below as well. ``hooks`` are the names of those that any
    component overrides, or the tier.
    """

    def __init__(
        self, composition: Composition, lanes: tuple[Lane, ...], host_lanes: tuple[Cells, ...], validators: Validators,
        tier_validators: Validators,
    ) -> None:  # fmt: skip
        self.composition = composition
        self.lanes = lanes
        self.all_lanes: tuple[Cells, ...] = (*lanes, *host_lanes)
        self.page_lanes = tuple(lane for lane in lanes if isinstance(lane, PageLane))
        self.path_lanes = tuple(lane for lane in lanes if isinstance(lane, PathLane))
        self.partial_lanes = tuple(lane for lane in lanes if isinstance(lane, PartialLane))
        self.state_lanes = tuple(lane for lane in lanes if isinstance(lane, StateLane))
        self.in_order: tuple[Lane, ...] = (*self.page_lanes, *self.state_lanes)
        self.passing_lanes: tuple[PassingLane, ...] = (*self.partial_lanes, *self.state_lanes)
        self.page = composition.page
        self.lookahead = composition.lookahead
        self.max_rewind = composition.max_rewind
        self.validators = validators
        self.tier_validators = tier_validators
        kept_whole = [lane.pool.capacity * lane.page for lane in self.page_lanes if not lane.retains]
        self.longest = min(kept_whole, default=1 << 62)
        """Tokens that the smallest pool of pages that are kept whole can hold."""
        self.rewind_limit = min(self._rewind_limits(), key=lambda limit: limit[1], default=None)
        """Which component limits how many committed tokens can be taken back, and to how many; None: none does."""
        tier = () if composition.tier is None else (composition.tier,)
        self.hooks = frozenset(name for each in (*lanes, *tier) for name in each.hooks.overridden)
        self.has_lock_hooks = not self.hooks.isdisjoint(("acquire_component_lock", "release_component_lock"))
        self.has_transfer_hooks = not self.hooks.isdisjoint(("build_hicache_transfers", "commit_hicache_transfer"))
        self.no_records: list[Any] = [None] * len(lanes)
        self.tracks_checkpoints = any(lane.track_every for lane in self.state_lanes)
        self.has_admission = any(lane.admit is not None for lane in self.state_lanes)

    def _rewind_limits(self) -> Iterator[tuple[str, int]]:
        for lane in self.lanes:
            own = lane.part.manifest.max_rewind
            if lane.unit == "boundary" or lane.retains:
                yield lane.name, self.max_rewind
            elif own is not None:
                yield lane.name, own

    def lane(self, component: str) -> Lane:
        for lane in self.lanes:
            if lane.name == component:
                return lane
        raise InputError(f"no component {component!r} here; there are {', '.join(lane.name for lane in self.lanes)}")


class Index:
    """The tree and its truth. The epoch counts losses, so that a plan made before one is known to be stale."""

    __slots__ = (
        "_make_tree", "_paths", "dropped_roots", "empty_root", "epoch", "expiries", "flushed_at", "flushes", "tree",
    )  # fmt: skip

    def __init__(self, shape: Shape, element_bytes: int) -> None:
        kind = Node if shape.composition.tier is None else Counted
        self._make_tree = partial(Tree, shape.page, element_bytes, len(shape.all_lanes), kind)
        self._paths = shape.path_lanes
        self.epoch = self.flushed_at = self.flushes = 0
        self._begin()

    def _begin(self) -> None:
        self.tree = self._make_tree()
        self.empty_root = self._new_root("")
        self.dropped_roots: list[Root] = []
        self.expiries: Expiries | None = None
        """None while everything is wanted for ever."""

    def _new_root(self, namespace: str) -> Root:
        root = self.tree.root(namespace)
        for lane in self._paths:
            lane.root_cell(root)
        return root

    def root(self, namespace: str) -> Root:
        """Return the root of ``namespace``, made if there is none."""
        root = self.tree.roots.get(namespace)
        if root is None:
            root = self.tree.roots[namespace] = self._new_root(namespace)
        return root

    def want(self, node: Node, until: float) -> None:
        """Note that ``node`` and all nodes above it are wanted until ``until``."""
        if self.expiries is None:
            if until == FOREVER:
                return
            self.expiries = Expiries(self.tree)
        self.expiries.want(node, until)

    def lose(self) -> None:
        """Count a loss of what plans may lead to, so that plans made before are stale."""
        self.epoch += 1

    def is_over(self, node: Node) -> bool:
        """Return whether the time has passed until which somebody wanted ``node``."""
        return self.expiries is not None and self.expiries.is_over(node)

    def unprotect(self, node: Node) -> None:
        """Undo ``Node.protect``, and ``prune`` the node."""
        if node.unprotect() and self.tree.prune(node):
            self.epoch += 1

    def prune(self, node: Node) -> None:
        """Unlink ``node`` if it is bare, and its ancestors as far as they are."""
        if self.tree.prune(node):  # not so of a root, to which no plan leads
            self.epoch += 1

    def prune_all(self, nodes: Iterable[Node]) -> None:
        """Prune each of ``nodes``, which have lost cells or pages, and count one loss."""
        self.epoch += 1
        self.tree.prune_all(nodes)

    def is_found(self, root: Root) -> bool:
        """Return whether matches may find the nodes below ``root``."""
        return self.tree.roots.get(root.namespace) is root

    def drop_root(self, namespace: str) -> None:
        """Let no match find nodes of ``namespace``. The root stays in ``dropped_roots`` while leases cover any."""
        self.dropped_roots.append(self.tree.roots.pop(namespace))

    def forget_everything(self) -> None:
        """Begin with an empty tree. Plans and handles that were made before are of an earlier flush."""
        self.flushes += 1
        self.epoch += 1
        self.flushed_at = self.epoch
        for root in (*self.tree.roots.values(), *self.dropped_roots, self.empty_root):
            unlink(root)
        self._begin()


@attrs.define(eq=False, repr=False)
class Match:
    """What was asked of a match, and what was found. ``MatchPlan`` is its public face.

    ``tokens`` are the prompt's, with their extra keys, and ``key`` what the tree compares. ``most``: so many tokens at
    most were to be resumed; less than 0 if not even 0 leaves as many to compute as wanted.

    Found (``operations.match.search``): ``ready`` is the deepest boundary that every component accepts, in ``node``.
    ``reached`` is the deepest node whose whole path the keys agree with. They agree with ``walked`` tokens, and
    ``walked_to`` is where that is, or where ``most`` is. ``limited_by`` is the component that lowered the boundary, and
    ``branch`` a boundary where page components could resume and a boundary component has nothing. Where there is a tier
    below, ``restorable`` in ``below`` is the deepest boundary that could be restored, or ``ready``.
    """

    tokens: Tokens
    key: bytes
    namespace: str
    most: int
    claims: Many[Claim | None] = ()
    node: Node = attrs.field(init=False)
    ready: int = attrs.field(init=False)
    reached: Node = attrs.field(init=False)
    walked: int = attrs.field(init=False)
    walked_to: Node = attrs.field(init=False)
    limited_by: str | None = attrs.field(init=False)
    branch: int | None = attrs.field(init=False)
    epoch: int = attrs.field(init=False)
    below: Node = attrs.field(init=False)
    restorable: int = attrs.field(init=False)

    def of(self, key: bytes, most: int) -> Match:
        """Return the same question of ``key``, with ``most`` tokens at most."""
        return Match(self.tokens, key, self.namespace, most)

    @property
    def extra(self) -> tuple[Span, ...]:
        """The spans of tokens that have an extra key."""
        return self.tokens.extra

    @property
    def count(self) -> int:
        """Tokens of the prompt."""
        return self.tokens.count


class Hold(Handle):
    """What one lease covers, anchored at ``node``. ``Lease`` is its public face, and ``Running`` a kind of it.

    ``covers`` are by lane what is covered of each component; ``receipts`` are what plugins wanted covered besides.
    ``core`` is None once it has ended. ``fence``: whatever uses what it covers comes after the steps up to this one.
    """

    __slots__ = (
        "__weakref__", "core", "covers", "failed", "fence", "flushes", "label", "made_at", "node", "receipts", "work",
    )  # fmt: skip

    failed: BaseException | None
    work: Work[Hold] | None
    made_at: str

    def __init__(
        self, core: Core, node: Node, covers: list[Any], receipts: list[Receipt | None], label: str = ""
    ) -> None:
        self.core: Core | None = core
        self.node = node
        self.covers = covers
        self.receipts = receipts
        self.flushes = core.index.flushes
        self.label = label
        self.fence = 0
        self.work = self.failed = None

    def take_fence(self, flight: Flight[Hold]) -> None:
        """Order this lease behind the steps that may still touch the slots that its sequence has just taken."""
        if flight.taken_early:
            self.fence = max(self.fence, flight.taken_early)
            flight.taken_early = 0

    @property
    def boundary(self) -> int:
        """The boundary that it is anchored at, in tokens."""
        return self.node.end

    @property
    def active(self) -> bool:
        return self.core is not None and self.flushes == self.core.index.flushes


class Running(Hold):
    """A running request: its names, lengths, lease, holdings and fills. ``Sequence`` is its public face.

    Four lengths, each at most the next where both are known: ``published`` (handed to the tree) <= ``committed``
    (computed) <= ``reserved`` (slots taken); ``names.count`` (tokens known) runs apart. ``ready`` is where it resumed.
    """

    __slots__ = (
        "_core", "branch", "claimed_ops", "committed", "fills", "held", "high", "looks", "lost", "match",
        "names", "namespace", "priority", "published", "reached", "ready", "reserved", "row", "spares", "steps",
        "until",
    )  # fmt: skip

    held: list[Any]
    """By lane what it holds; empty once all has been handed over or given back."""
    fills: list[Fill]
    claimed_ops: Many[Op]
    """Ops that plugins claimed when it was opened and that have not run."""
    reached: Node | None
    """Below where it resumes, the deepest node that its key is known to lead to; it may have gone by now."""
    high: int
    """The highest length that was committed before a rewind: what is too far below it was given back."""
    looks: Lookahead | None
    """How far its content is complete; None where no component looks ahead: then all that is committed is."""
    lost: bool
    """A step that failed may have written half of its running states."""
    row: int
    """Its row in the page tables that kernels read; -1: none yet."""
    spares: bool | None
    """Whether its prompt's end could be resumed at when it published more; None: it has not."""
    steps: list[Row]
    """Its rows of the target steps whose blocks are open. Each begins where the one before ends."""
    until: float
    """When nobody wants any more what it used and left."""

    def __init__(
        self, core: Core, match: Match, node: Node, covers: list[Any], receipts: list[Receipt | None],
        held: list[Any], fills: list[Fill], label: str, priority: int, until: float,
    ) -> None:  # fmt: skip
        super().__init__(core, node, covers, receipts, label)
        self._core = core
        self.held = held
        self.row = -1
        self.names = NamedTokens(core.keys, match.tokens, match.key)
        self.steps = []
        self.lost = False
        self.reached = match.reached
        self.fills = fills
        self.claimed_ops = ()
        self.priority = priority
        self.until = until
        self.namespace = match.namespace
        self.branch = match.branch
        self.match = match
        self.spares = None
        self.ready = self.reserved = self.committed = self.published = self.high = match.ready
        lookahead = core.shape.lookahead
        self.looks = Lookahead(lookahead, match.ready, self.names.count) if lookahead else None

    @property
    def prompt_end(self) -> int:
        """The deepest boundary of its prompt."""
        shape = self._core.shape
        return (self.match.count - shape.lookahead) // shape.page * shape.page

    # ------------------------------------------------------------ what it holds
    @property
    def pairs(self) -> Pairs:
        """(lane, holding) of every component, those of pages first."""
        held = self.held
        return [(lane, held[lane.index]) for lane in self._core.shape.in_order] if held else ()

    @property
    def paged(self) -> Many[tuple[PageLane, Any]]:
        """(lane, holding) of the components of pages; none once all has been handed over."""
        held = self.held
        return [(lane, held[lane.index]) for lane in self._core.shape.page_lanes] if held else ()

    @property
    def states(self) -> Many[tuple[StateLane, StateHolding]]:
        """(lane, holding) of the boundary components; none once all has been handed over, which a step may see."""
        held = self.held
        return [(lane, held[lane.index]) for lane in self._core.shape.state_lanes] if held else ()

    def holding(self, component: str) -> tuple[Lane, Any]:
        if self.core is None:
            raise ProtocolError(f"{self!r} holds nothing any more")
        self._core.check_whole()
        lane = self._core.shape.lane(component)
        return lane, self.held[lane.index]

    def hold_states_back(self) -> None:
        """Keep running states from being published while layers may write them."""
        for _, holding in self.states:
            holding.ready = False

    @property
    def complete(self) -> int:
        """The number of tokens whose content is complete."""
        return self.committed if self.looks is None else self.looks.complete

    @property
    def publishable(self) -> int:
        """The deepest boundary that could be published now."""
        shape = self._core.shape
        upto = min(self.names.count - shape.lookahead, self.complete)
        return max(self.published, upto - upto % shape.page)

    # ------------------------------------------------------------ what becomes of it
    def resume_at(self, boundary: int, fills: list[Fill]) -> None:
        """Continue from ``boundary``, to which a load restored data, as if the request had been opened there."""
        self.fills = fills
        self.ready = self.reserved = self.committed = self.published = self.high = boundary
        if self.looks is not None:
            self.looks.resume_at(boundary, self.names.count)
        if self.branch is not None and self.branch <= boundary:
            self.branch = None

    # ------------------------------------------------------------ what it is refused
    def why_ended(self) -> ProtocolError:
        """Return the error of a sequence that may not be used any more."""
        if self.failed is not None:
            return ProtocolError(
                f"{self!r} ended when a step or copy failed that it was in or had read from, or its publication did: "
                f"open it again"
            )
        if self.flushes != self._core.index.flushes:
            return ProtocolError(f"{self!r} was made before the cache was flushed: open it again")
        return ProtocolError(f"{self!r} is closed")

    def check_states(self) -> None:
        """Refuse to build on a running state that is not there."""
        if self.lost:
            raise ProtocolError(
                f"{self!r}: a step that failed may have written half a state of component "
                f"{self.states[0][0].name!r}. Abort the sequence and open it again; what it published is still there"
            )
        if self.fills:
            raise ProtocolError(
                f"{self!r} has ops that have not run: commit through cache.step(...), or call sequence.fill() first"
            )

    def __repr__(self) -> str:
        name = self.label or "sequence"
        state = "" if self.core is not None else " closed"
        return (
            f"<{name}{state}: {self.names.count} named, {self.reserved} reserved, {self.committed} committed, "
            f"{self.published} published>"
        )


class Row:
    """What the layers of one open step compute of a sequence: [start, end). A ``draft`` step only catches up.

    A rewind lowers the ``end``. ``seen``: which tokens the layers have; None where no component looks ahead.
    """

    __slots__ = ("draft", "end", "running", "seen", "start")

    def __init__(self, core: Core, running: Running, draft: bool, ahead: int) -> None:
        self.running = running
        self.draft = draft
        self.start, self.end = running.committed, running.reserved
        if not draft:
            if running.steps:
                self.start = max(self.start, running.steps[-1].end)
            running.steps.append(self)
            if core.shape.max_rewind:  # what a device chose in an earlier step is past
                for _, holding in running.states:
                    holding.accepted = False
        looks = running.looks
        self.seen = None if looks is None else looks.begin(running.names.count, self.start, ahead)

    def close(self) -> None:
        """Note that the block of the step has ended."""
        if not self.draft:
            self.running.steps.remove(self)
        looks = self.running.looks
        if looks is not None and self.seen is not None:
            looks.end(self.seen)

    def check(self) -> None:
        """Refuse to commit what was computed from behind what is committed, unless the sequence is closed."""
        running = self.running
        if running.core is None:
            return
        if running.committed < self.start:
            raise ProtocolError(
                f"{running!r}: this step computed from {self.start} on, and the step before it failed or has not ended"
            )
        running.check_states()


class Below(Protocol):
    """A tier below the device: what it is told, and what it is asked."""

    def published(self, run: Many[Node]) -> None:
        """Note that the nodes of ``run`` have new content on the device."""

    def used(self, node: Node) -> None:
        """Count one hit more of what a sequence reads that was opened at ``node``."""

    def demotes(self, lane: Lane) -> bool:
        """Return whether cells of ``lane`` that are not below yet are copied down before the device frees them."""

    def losing(self, lane: Lane, cells: Iterable[Any]) -> None:
        """Note that the device is about to free ``cells``."""

    def gone(self, lane: Lane, nodes: list[Node]) -> list[Node]:
        """Return those of ``nodes`` at whose end no request can resume with what of ``lane`` is below either."""

    def divided(self, upper: Node, lower: Node) -> None:
        """Note that ``upper`` was split off ``lower``."""

    def namespace_dropped(self, namespace: str) -> None:
        """Forget the loads of ``namespace`` that are on their way up."""

    def flushed(self) -> None:
        """Note that nothing is cached any more."""

    def poll(self) -> None:
        """Find out which copies are over, and continue what waited for them."""

    def restorable(self, match: Match, node: Node, boundary: int) -> None:
        """Say in ``match`` which boundary, not below ``boundary`` in ``node``, could be restored."""

    def residency(self, lane: Lane) -> Residency:
        """Return what the device and the tier have together of the component of ``lane``."""

    def restore(self, running: Running) -> Restored:
        """Bring back what lies below of a sequence that was just opened."""

    def stats(self) -> TierStats: ...


class Watcher(Protocol):
    """Debug mode: the second set of books, which is told of everything and changes nothing."""

    def enter(self) -> None:
        """Note that an operation begins."""

    def take_over(self) -> None:
        """Note that the calling thread drives the cache from now on."""

    def check(self, operation: str) -> None:
        """Check all invariants, because ``operation`` has ended."""

    def leased(self, hold: Hold) -> None: ...

    def released(self, hold: Hold) -> None: ...

    def follow(self, stream: Stream) -> None:
        """Follow a stream that was not known before, because it may order the work of others."""

    def accessed(
        self, stream: Stream, what: str, pool: Pool, reads: Many[int], writes: Many[int], source: Pool
    ) -> None:
        """Note that work was enqueued that reads slots of ``source`` and writes slots of ``pool``."""

    def writing(self, what: str, pool: Pool, slots: Many[int]) -> None:
        """Check that ``slots``, which an op is about to write, belong to a running sequence."""

    def step_begun(self, rows: Many[Row]) -> Any:
        """Note that a step begins whose layers compute these rows. Return what stands for the step in later calls."""

    def table_read(self, begun: Any, lane: Lane) -> None:
        """Note that the layers of a step have just been given the page table of ``lane``."""

    def step_ended(self, begun: Any, name: str, stream: Stream, well: bool, ordered: bool) -> None:
        """Note that the layers of a step have been enqueued. ``ordered``: they run after what wrote what they read."""

    def arrived(self, running: Running, start: int, upto: int) -> None:
        """Note that content of [start, upto) arrived without a step."""

    def published(self, run: Many[Node]) -> None:
        """Note that the tree owns the cells at the nodes of ``run``."""

    def flushed(self) -> None: ...


class CacheCounts:
    """What a cache counts for its statistics, since it was made."""

    __slots__ = ("asked_tokens", "hit_tokens", "missed", "new_tokens", "opened", "skipped_checkpoints")

    def __init__(self) -> None:
        self.opened = self.asked_tokens = self.hit_tokens = self.new_tokens = 0
        self.missed: dict[str, int] = {}
        """Tokens that the keys agree with and that did not hit, by the component (or plugin) that stopped the match."""
        self.skipped_checkpoints = 0


class Core:
    """What the operations of one cache share. Made by ``compose.build``, which wires its parts together once.

    ``below`` is the tier below the device and ``watcher`` debug mode, or None. ``live`` are the running sequences.
    ``identity`` is what plain namespaces stand under.

    The body of an operation is ``with core:``. ``changing`` marks that it is amid its changes, which it takes back
    before an error of ours leaves it. Any other exception, at whatever line, leaves the mark there, and words for it:
    the cache is broken, and refuses all but a flush (0075). After the operation, debug mode checks the books.
    """

    __slots__ = (
        "__weakref__", "below", "changing", "counts", "dropped", "flight", "identity", "index", "inline",
        "keys", "live", "misses_states", "plugins", "recorder", "shape", "streams", "tables", "unwritten", "watcher",
    )  # fmt: skip

    below: Below | None
    watcher: Watcher | None
    flight: Flight[Hold]
    plugins: PluginCalls
    tables: Tables
    unwritten: Unwritten[Hold]

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.keys = KeyMaker(shape.lookahead)
        self.index = Index(shape, self.keys.element_bytes)
        self.counts = CacheCounts()
        self.live: dict[Running, None] = {}
        self.streams: dict[object, Stream] = {}
        self.inline: Stream | None = None
        """The stream that None stands for, where that is the caller."""
        self.changing: bool | str = False
        self.dropped = Dropped()
        self.identity: Identity | None = None
        self.misses_states = bool(shape.state_lanes)
        """Whether a prompt that is published without a state is worth a warning: once, and if none was left out."""
        self.below = None
        self.watcher = None
        self.recorder = Recorder(self.keys, self.index.is_found, self.index.is_over)
        self._listen()

    def follow(self, most: int) -> Journal:
        """Return a journal that records from now on every change of what is cached."""
        journal = Journal(most, self._unfollow)
        self.recorder.journals.append(journal)
        self._listen()
        return journal

    def _unfollow(self, journal: Journal) -> None:
        if journal in self.recorder.journals:
            self.recorder.journals.remove(journal)
            self._listen()

    def _listen(self) -> None:
        """Have the lanes tell the recorder what they change while a journal follows, or if owners have shares."""
        needed = self.recorder.journals or self.shape.composition.policy.shares is not None
        for lane in self.shape.all_lanes:
            lane.recorder = self.recorder if needed else None

    def time(self, most: int) -> Timeline:
        """Return a timeline that times copies, waits and calls of a store from now on."""
        timeline = Timeline(most, self._stop_timing)
        if self.flight.times is None:
            self.flight.times = Timekeeper()
        self.flight.times.timelines += (timeline,)
        return timeline

    def _stop_timing(self, timeline: Timeline) -> None:
        times = self.flight.times
        if times is not None:
            times.timelines = tuple(each for each in times.timelines if each is not timeline)
            if not times.timelines:
                self.flight.times = None

    def because(self, cause: str, by: str = "") -> AbstractContextManager[None]:
        """Tell journals, if any, this reason for all that is removed in this block."""
        return self.recorder.because(cause, by) if self.recorder.journals else nullcontext()

    def left_out(self, lane: Lane, running: Running, boundary: int, cause: str) -> None:
        """Note that the state of ``running`` at ``boundary`` is not kept. ``cause``: as of a "refused" ``Change``."""
        self.misses_states = False
        if cause == "room":
            self.counts.skipped_checkpoints += 1
        if self.recorder.journals:
            tokens = running.names.tokens.part(0, boundary + self.shape.lookahead)
            self.recorder.refused(lane.name, "device", running.namespace, tokens, cause, boundary)

    def __enter__(self) -> None:
        if self.changing or self.dropped.items or self.watcher is not None:
            self.enter()
        self.changing = True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if error is not None:
            self.raised(error)
            return
        self.changing = False
        if self.watcher is not None:
            self.watcher.check(caller())

    def enter(self) -> None:
        """Refuse to read a broken cache, or from another thread (debug mode). Take back what was dropped."""
        if self.watcher is not None:
            self.watcher.enter()
        if self.changing:
            raise self._why_broken()
        if self.dropped.items:
            self.changing = True
            try:
                self.dropped.recover()
            except BaseException as error:
                self.raised(error)
                raise
            self.changing = False

    def raised(self, error: BaseException) -> None:
        """Unmark an operation that raised an error of ours; else find words for what it was amid."""
        if isinstance(error, PrefixloomError):
            self.changing = False
        elif error.__traceback__ is not None:
            code = error.__traceback__.tb_frame.f_code
            self.changing = f"{type(error).__name__} in {getattr(code, 'co_qualname', code.co_name)}"

    def check_whole(self) -> None:
        """Refuse to read from a cache that is known to be broken. Any thread may ask, also during an operation."""
        if self.changing.__class__ is str:
            raise self._why_broken()

    def _why_broken(self) -> BrokenError:
        what = self.changing if isinstance(self.changing, str) else "an operation is at work, or was interrupted"
        return BrokenError(
            f"the cache is broken: {what}, amid changes that were not taken back. Call cache.flush(), which forgets "
            f"all that is cached, or compose a new one"
        )

    def stream(self, given: object) -> Stream:
        """Return the stream that a caller means: one of ours, one of torch, or the current one for None."""
        if given is None and self.inline is not None:
            return self.inline
        stream = stream_for(given, self.shape.composition.device, self.streams)
        self.inline = self.streams.get(None)
        if self.watcher is not None:
            self.watcher.follow(stream)
        return stream
