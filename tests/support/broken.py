"""The kill table of the conformance kit: broken components with the law that must kill each, and sound ones.

The truth of the layers is the original's; only the component errs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

from prefixloom import (
    Buffer,
    Claim,
    Codec,
    Component,
    Manifest,
    Op,
    Path,
    Point,
    Reach,
    Receipt,
    Sinks,
    Touch,
    Window,
    hookimpl,
)
from prefixloom.testing import ComponentCase, Truth
from tests.support.broken_hooks import (
    NOTHING,
    AboveInAnImage,
    AcceptsNothing,
    BeforeImages,
    BeforeTheFirstImage,
    ByACoresConstant,
    ByAFileOfTheMachine,
    ByAHelpersClock,
    ByTheCores,
    ByTheDevices,
    ByTheHashOfATenant,
    ByTheMachine,
    ByTheOrderOfASet,
    ByTheProcess,
    ByTheRank,
    ByTheYear,
    ClampsLate,
    CopiesTheWrongWay,
    DropsAtEachSplit,
    KeepsLongPromptsOnly,
    KeepsSome,
    LocksAll,
    LocksTheOtherWayRound,
    LosesAPage,
    Metered,
    RaisesAtTheThousandth,
    RaisesFarOut,
    ReadOnce,
    RejectsAll,
    RemembersEvictions,
    RemembersPrompts,
    SharesOfNothing,
    TakesExtraKeysForPairs,
    TrustsCopies,
    WidensLate,
    ZeroesWhatWasCopied,
)
from tests.support.broken_parts import (
    KV,
    PATH,
    RAISING,
    SHARED,
    SINKS,
    STATE,
    WINDOW,
    AnswersTrue,
    ByAddress,
    ByChance,
    ByTheClock,
    ByValue,
    Clamps,
    ClearsAll,
    ClearsAnothersSlot,
    ClearsWhatIsComputed,
    ClearsWhatIsPublished,
    ClosedUpward,
    ConvexAndLate,
    ConvexAndNot,
    ConvexOptional,
    DropsOnSplit,
    EarlyByAPage,
    EarlyByOne,
    Fickle,
    ForEver,
    FreesTwice,
    Growing,
    K,
    KeepsNothing,
    Misspelt,
    MutatesTheSplit,
    MutatesTheWalk,
    NoNumber,
    OffTheGrid,
    OnAGrid,
    OpBefore,
    OpWritesAFreeSlot,
    OpWritesElsewhere,
    OwnPool,
    PastTheBoundary,
    Plain,
    Renamed,
    SeesOneRun,
    StateWithPositions,
    StrangeArgument,
    Swelling,
    TakesASlot,
    Tiring,
    Unmarked,
    V,
    W,
    Widening,
    WritesInAHook,
    decaying,
    raising,
)

WIDE = Buffer("k", (2, 8), "float32")
FEW = Buffer("k", (2,), "bfloat16", range(2))
SHARES, OWNS = (attrs.evolve(K, shared={5: owner}) for owner in (0, 1))
NO_OWNERS = Truth(layers=decaying, grid=1)
IMAGES = attrs.evolve(WINDOW, ends=lambda n, extra: not any(start < n < end for start, end, _ in extra))
RESTS = attrs.evolve(STATE, at_rest=0.01)


@attrs.frozen
class Broken:
    """A mistake, the component that makes it, what is true of its layers, and the law that must kill it."""

    mistake: str
    make: Callable[[], Any]
    truth: Truth
    law: str
    seed: int = 0
    effort: int = 1

    def case(self) -> ComponentCase:
        return ComponentCase(self.make, self.truth, self.mistake, seed=self.seed, effort=self.effort)


def of(kind: Any = Component, reach: Callable[[], Reach] = lambda: Window(W), **facts: Any) -> Callable[[], Any]:
    """What makes such a component."""
    buffers = facts.pop("buffers", (K, V))
    return lambda: kind("subject", Manifest(buffers, **facts), reach())


def rows() -> list[Broken]:
    covers, content = "law_the_reach_covers_what_the_layers_read", "law_what_is_restored_is_what_was_live"
    writes, early = "law_the_manifest_has_all_that_the_layers_write", "law_until_is_the_last_boundary"
    itself, same = "law_each_component_is_an_instance_of_its_own", "law_the_same_calls_get_the_same_answers"
    again, ends = "law_what_is_asked_of_a_match_is_pure", "law_a_hit_ends_where_it_may"
    idle = "law_the_reach_names_nothing_that_no_layer_reads"
    unneeded = "law_memory_that_nothing_needs_lowers_no_hit"
    on = "law_layers_go_on_from_what_is_stored"
    says = "law_the_manifest_says_what_content_depends_on"
    ahead, grid = "law_content_depends_on_no_later_token", "law_content_is_exact_on_the_grid"
    validator, process = "law_a_validator_answers_no_more_than_it_is_asked", "law_another_process_answers_the_same"
    tier = "law_what_comes_back_from_a_tier_is_what_was_live"
    hits, says_all = "law_what_was_served_is_found_again", "law_somebody_says_what_the_layers_do"
    touch, keeps = "law_hooks_change_nothing_that_they_are_shown", "law_a_running_sequence_keeps_what_it_still_needs"
    found: list[Any] = [
        ("the reach is one short", of(reach=lambda: Window(W - 1)), WINDOW, covers),
        ("the reach is a page short", of(reach=lambda: Window(W - 4)), WINDOW, covers),
        ("a window where the layers read all", of(), PATH, covers),
        ("sinks are forgotten", of(), SINKS, covers),
        ("the reach is one long", of(reach=lambda: Window(W + 1)), WINDOW, idle),
        ("the reach is a page long", of(reach=lambda: Window(W + 4)), WINDOW, idle),
        ("needs beyond the boundary", of(reach=PastTheBoundary), Truth(), "law_needs_lie_before_the_boundary"),
        ("needs that tire", of(reach=Tiring), Truth(), "law_needs_and_until_are_pure"),
        ("a reach that grows in use", of(reach=Swelling), WINDOW, "law_a_running_sequence_keeps_what_it_still_needs"),
        ("until is one too early", of(reach=EarlyByOne), WINDOW, early),
        ("until is a page too early", of(reach=EarlyByAPage), WINDOW, early),
        ("until is a page too early, served", of(reach=EarlyByAPage), WINDOW, keeps),
        ("until never comes", of(reach=ForEver), WINDOW, "law_nothing_is_kept_for_ever"),
        ("closed upward, and is not", of(reach=ClosedUpward), WINDOW, "law_closed_upward_is_true"),
        ("convex, and is not", of(reach=ConvexAndNot), Truth(), "law_convex_is_true"),
        ("convex, and until is too late", of(reach=ConvexAndLate), Truth(), "law_until_is_the_last_boundary"),
        ("never needed, and says convex", of(reach=ConvexOptional), Truth(), unneeded),
        ("a state that needs positions", of(reach=StateWithPositions), STATE, "law_a_state_needs_no_positions"),
        ("a forgotten buffer", of(buffers=(K,)), WINDOW, writes),
        ("a forgotten layer", of(buffers=(attrs.evolve(K, layers=(0,)), V)), WINDOW, writes),
        ("two tokens in an entry of one", of(tokens_per_slot=2), WINDOW, writes),
        ("a lookahead is forgotten", of(reach=Path), attrs.evolve(PATH, ahead=1), says),
        ("a grid is forgotten", of(reach=Point), attrs.evolve(STATE, grid=8), says),
        ("a grid that is no multiple", of(grid=24), attrs.evolve(WINDOW, grid=16), says),
        ("another dtype than is written", of(buffers=(attrs.evolve(K, dtype="bfloat16"), V)), WINDOW, writes),
        ("another shape than is written", of(buffers=(attrs.evolve(K, shape=(1,)), V)), WINDOW, writes),
        ("a layer too many", of(buffers=(attrs.evolve(K, layers=(0, 1, 2)), V)), WINDOW, writes),
        ("the wrong owner is read", of(buffers=(SHARES, V)), attrs.evolve(WINDOW, buffers=(OWNS, V)), writes),
        ("it rests in too few bits", of(Component, Point, stored_as=Codec("int8", 0.5)), RESTS, writes),
        ("a state of too few bits", of(reach=Point, buffers=(FEW,)), Truth(layers=decaying, grid=1), on),
        ("nobody says what its layers do", of(), Truth(ahead=0), says_all),
        ("lookahead is understated", of(reach=Path), attrs.evolve(PATH, ahead=1), ahead),
        ("lookahead is one too small", of(lookahead=1), attrs.evolve(WINDOW, ahead=2), ahead),
        ("the grid of a state is understated", of(reach=Point), attrs.evolve(STATE, grid=8), grid),
        ("the grid of pages is understated", of(grid=4), attrs.evolve(WINDOW, grid=16), grid),
        ("the same instance for all", lambda: SHARED, WINDOW, itself),
        ("another name each time", lambda: Renamed(KV, Window(W)), WINDOW, itself),
        ("compares by value", of(ByValue), WINDOW, itself),
        ("a manifest that grows", lambda: Growing("subject", Window(W)), Truth(), itself),
        ("a match decided by the clock", of(ByTheClock), WINDOW, same),
        ("a publication decided by chance", of(ByChance), WINDOW, same),
        ("answers that count over all instances", of(ByAddress), WINDOW, same),
        ("a match that answers by turns", of(Fickle), WINDOW, again),
        ("a validator that goes beyond", of(Widening), WINDOW, validator),
        ("a validator that answers True", of(NoNumber), WINDOW, validator),
        ("a hook changes the walk", of(MutatesTheWalk), WINDOW, touch),
        ("a hook changes a split's halves", of(MutatesTheSplit), WINDOW, touch),
        ("a hook writes content", of(WritesInAHook), WINDOW, touch),
        ("a hook clamps content", of(Clamps), WINDOW, touch),
        ("a validator is inverted", of(OffTheGrid, Point), attrs.evolve(STATE, grid=8), grid),
        ("a hook takes a slot", of(TakesASlot), WINDOW, touch),
        ("an op writes what it does not name", of(OpWritesElsewhere), WINDOW, touch),
        ("an op takes pages for one run", of(SeesOneRun), WINDOW, "law_no_hook_raises"),
        ("an op clears another's slot", of(ClearsAnothersSlot), WINDOW, "law_no_hook_raises"),
        ("an op clears what the tree has", of(ClearsWhatIsPublished, Path), PATH, "law_no_hook_raises"),
        ("an op clears what is computed", of(ClearsWhatIsComputed), WINDOW, content),
        ("an op clears all states", of(ClearsAll, Point), STATE, content),
        ("an op writes a slot of nobody", of(OpWritesAFreeSlot), WINDOW, touch),
        ("a state is kept on the wrong half", of(DropsOnSplit, Point), STATE, "law_no_hook_raises"),
        ("states that are never published", of(KeepsNothing, Point), STATE, hits),
        ("a pool of its own", of(OwnPool), WINDOW, "law_the_pool_has_the_shape_of_the_manifest"),
        ("a slot is freed twice", of(FreesTwice), WINDOW, touch),
        ("a hook with an argument of no such name", of(StrangeArgument), WINDOW, "law_hooks_fit_their_specifications"),
        ("a hook whose name is misspelt", of(Misspelt), WINDOW, "law_a_cache_can_be_composed_of_it"),
        ("a hook that nobody marked", of(Unmarked), WINDOW, "law_hooks_fit_their_specifications"),
        ("an op that looks up late", of(OpBefore), WINDOW, "law_no_schedule_of_steps_goes_wrong"),
        ("an answer of another type", of(AnswersTrue), WINDOW, "law_no_hook_raises"),
        ("the reach is a page short, restored", of(reach=lambda: Window(W - 4)), WINDOW, tier),
        ("what was copied to the host is zeroed", of(ZeroesWhatWasCopied), WINDOW, touch),
        ("copies that lead nowhere", of(CopiesTheWrongWay), WINDOW, "law_no_hook_raises"),
        ("content of long prompts is clamped", of(ClampsLate), WINDOW, touch),
        ("the thousandth call raises", of(RaisesAtTheThousandth), WINDOW, "law_no_hook_raises"),
        ("a validator that goes beyond in long prompts", of(WidensLate), WINDOW, validator),
        ("answers by the hash of a text", of(ByTheHashOfATenant), WINDOW, process),
        ("answers by the order of a set", of(ByTheOrderOfASet), WINDOW, process),
        ("answers by the number of the process", of(ByTheProcess), WINDOW, same),
        ("a clock in a helper", of(ByAHelpersClock), WINDOW, process),
        ("a validator that accepts nothing", of(AcceptsNothing), WINDOW, hits),
        ("every boundary is rejected", of(RejectsAll, Path), PATH, hits),
        ("no state is admitted", of(reach=Point, admission=NOTHING), STATE, hits),
        ("what is read goes first", of(ReadOnce), WINDOW, hits),
        ("a lock on everything", of(LocksAll), WINDOW, "law_a_lease_keeps_little_more_than_resuming_needs"),
        ("layers are given, and not whose entries they read", of(buffers=(SHARES, V)), NO_OWNERS, says_all),
        ("extra keys are taken for pairs", of(TakesExtraKeysForPairs), WINDOW, "law_no_hook_raises"),
        ("a prompt of no tokens is divided by", of(SharesOfNothing), WINDOW, "law_no_hook_raises"),
        ("a copy that fails is not borne", of(TrustsCopies), WINDOW, "law_no_hook_raises"),
        ("a position is packed into two bytes", of(RaisesFarOut), WINDOW, "law_no_hook_raises"),
        ("answers by the name of the machine", of(ByTheMachine), WINDOW, same),
        ("answers by the rank", of(ByTheRank), WINDOW, process),
        ("states are dropped at each split", of(DropsAtEachSplit, Point), STATE, hits),
        ("states of long prompts only", of(KeepsLongPromptsOnly, Point), STATE, hits),
        ("the last page is left out of each hit", of(LosesAPage), WINDOW, hits),
        ("a lock the other way round", of(LocksTheOtherWayRound), WINDOW,
         "law_a_lease_keeps_little_more_than_resuming_needs"),
        ("answers by the year", of(ByTheYear), WINDOW, process),
        ("answers by the cores, looked at once", of(ByTheCores), WINDOW, same),
        ("answers by the cores, looked at by the module", of(ByACoresConstant), WINDOW, process),
        ("answers by a file of the machine", of(ByAFileOfTheMachine), WINDOW, same),
        ("answers by the devices", of(ByTheDevices), WINDOW, same),
        ("a validator that remembers prompts", of(RemembersPrompts), WINDOW, again),
        ("a match that remembers evictions", of(RemembersEvictions), WINDOW, again),
        ("a validator that answers the end of an image", of(AboveInAnImage), WINDOW, validator),
        ("a validator that looks at the first image only", of(BeforeTheFirstImage), IMAGES, ends),
    ]  # fmt: skip
    found += [(f"{hook} raises", of(raising(hook)), WINDOW, "law_no_hook_raises") for hook in RAISING]
    return [Broken(*row) for row in found]


BROKEN = rows()
COSTS = {
    "the reach is one long",
    "the reach is a page long",
    "what is read goes first",
    "a lock on everything",
    "a lock the other way round",
    "states are dropped at each split",
    "states of long prompts only",
    "the last page is left out of each hit",
}
"""Mistakes that cost more than they must, and break nothing."""


class Widens(Component):
    """A sound component with every hook: none of them may be taken for a mistake."""

    pool: Any = None

    @hookimpl
    def create_match_validator(self) -> Callable[[Any], int]:
        return lambda walk: int(walk.boundary) // 8 * 8

    @hookimpl
    def finalize_match_result(self, walk: Any) -> Claim:
        return Claim(branch=walk.walked)

    @hookimpl
    def commit_insert(self, walk: Any) -> Claim:
        return Claim(keep=((walk.start, walk.boundary),))

    @hookimpl
    def redistribute_on_node_split(self, parent: Any, child: Any) -> None:
        return None

    @hookimpl
    def acquire_component_lock(self, anchor: Any) -> Receipt:
        return Receipt(positions=((0, 4),))

    @hookimpl
    def release_component_lock(self, receipt: Any) -> Touch:
        return Touch(positions=())

    @hookimpl
    def evict_component(self, node: Any) -> Claim:
        return Claim(keep=(0,))

    @hookimpl
    def deferred_forward_ops(self, batch: Any) -> tuple[Op, ...]:
        return tuple(Op("count", self.name, data=walk.walked) for walk in batch)

    @hookimpl
    def run_forward_op(self, op: Any) -> None:
        pass


ORIGINALS = {
    "window": (of(), WINDOW),
    "window in plain Python": (of(reach=Plain), WINDOW),
    "path": (of(reach=Path), PATH),
    "path that looks ahead": (of(reach=Path, lookahead=1), attrs.evolve(PATH, ahead=1)),
    "window that looks two ahead": (of(lookahead=2), attrs.evolve(WINDOW, ahead=2)),
    "window on a grid": (of(grid=16), attrs.evolve(WINDOW, grid=16)),
    "state": (of(reach=Point), STATE),
    "state on a grid": (of(reach=Point, grid=8), attrs.evolve(STATE, grid=8)),
    "sinks and a window": (
        of(reach=lambda: Sinks(2) | Window(W)),
        SINKS,
    ),
    "entries of two tokens": (of(tokens_per_slot=2), attrs.evolve(WINDOW, tokens_per_entry=2)),
    "state on a grid, by a hook": (of(OnAGrid, Point), attrs.evolve(STATE, grid=8)),
    "states that rest as int8": (
        of(reach=Point, stored_as=Codec("int8", 0.008), buffers=(WIDE, V)),
        attrs.evolve(STATE, buffers=(WIDE, V), at_rest=0.008),
    ),
    "checkpoints of a state": (of(reach=Point, checkpoint_every=8, max_rewind=3), STATE),
    "no hits inside of images": (of(BeforeImages), IMAGES),
    "hooks that are timed": (of(Metered), WINDOW),
    "a path of which some is kept": (of(KeepsSome, Path), PATH),
    "states of which some are kept": (of(KeepsSome, Point), STATE),
    "every hook": (of(Widens), WINDOW),
    "every hook on a path": (of(Widens, Path), PATH),
    "every hook on a state": (of(Widens, Point), STATE),
}
"""What the mistakes were made in, right: it must break no law."""
