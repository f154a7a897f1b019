"""Laws of what a component states about itself: identity, manifest, reach and pool. They need no traffic."""

from __future__ import annotations

from collections.abc import Iterator
from math import isnan

from ...contract.reach import Reach
from ..kit.bench import Bench
from ..kit.case import ComponentCase, LawBroken, NotApplicable, made

HORIZON = 320
"""A reach is asked at every boundary below this one."""
FAR = (1023, 1024, 1025, 4096, 65536)
"""Further boundaries at which a reach is asked."""


def needed(reach: Reach, n: int) -> set[int]:
    """Return the positions that resuming at ``n`` needs."""
    return {p for low, high in reach.needs(n) for p in range(low, high)}


def law_each_component_is_an_instance_of_its_own(case: ComponentCase) -> None:
    """Each call of ``make`` returns a new component, which equals only itself and keeps its name and manifest.

    Clauses: C1, C2, C3, C4, O6.
    """
    one, other = made(case), made(case)
    if one is other:
        raise LawBroken(
            "make() returned the same instance twice: two caches would share it. Return a new one each time"
        )
    if getattr(type(one), "__eq__", None) is not object.__eq__:
        raise LawBroken(f"{type(one).__name__} compares by value. Make the class with eq=False, or without __eq__")
    for component in (one, other):
        if not component.name or component.name != one.name:
            raise LawBroken(f"the names differ or are empty: {one.name!r} and {other.name!r}")
        if component.manifest != one.manifest or component.manifest != component.manifest:
            raise LawBroken("asked twice, the manifest is not the same: it never changes once the component is made")
    Bench(case)  # what cannot be composed alone is refused here, with the reason


def law_needs_lie_before_the_boundary(case: ComponentCase) -> None:
    """``needs(n)`` returns intervals of whole numbers inside [0, n), and nothing for the boundary 0.

    Clauses: R10, R14.
    """
    reach = case.reach
    for n in (*range(HORIZON), *FAR):
        for span in reach.needs(n):
            low, high = span
            if type(low) is not int or type(high) is not int or not 0 <= low <= high <= n:
                raise LawBroken(f"needs({n}) names {span}, which does not lie within [0, {n})")
        if n == 0 and any(low < high for low, high in reach.needs(0)):
            raise LawBroken(f"needs(0) is {reach.needs(0)}: nothing lies before the first token")


def law_a_state_needs_no_positions(case: ComponentCase) -> None:
    """A reach whose unit is "boundary" needs no token positions.

    Clauses: R3, R11.
    """
    if not case.has_states:
        raise NotApplicable("its data belongs to positions")
    for n in (*range(HORIZON), *FAR):
        if needed(case.reach, n):
            raise LawBroken(f"its unit is 'boundary', and needs({n}) names {case.reach.needs(n)}")


def law_needs_and_until_are_pure(case: ComponentCase) -> None:
    """``needs`` and ``until`` give the same answer to the same number, in any order of calls and on every instance.

    Clauses: C4, H6.
    """
    asked = (*range(0, HORIZON, 3), *FAR)
    reach, again = case.reach, made(case).reach
    first = [(tuple(reach.needs(n)), reach.until(n)) for n in asked]
    for n, told in reversed(list(zip(asked, first, strict=True))):
        for one in (reach, again):
            now = (tuple(one.needs(n)), one.until(n))
            if now != told:
                raise LawBroken(f"needs({n}), until({n}) were {told}, and asked again {now}")


def _last_boundaries(reach: Reach) -> dict[int, int]:
    """Return, for each position, the last boundary up to the horizon that needs it."""
    last: dict[int, int] = {}
    for n in range(HORIZON + 1):
        for p in needed(reach, n):
            last[p] = n
    return last


def law_until_is_never_too_early(case: ComponentCase) -> None:
    """``until(p)`` is not before the last boundary that needs position p, so nothing is released that is still needed.

    Clauses: C4, R9, R10.
    """
    case.only_pages()
    last = _last_boundaries(case.reach)
    for p in range(HORIZON):
        until = case.reach.until(p)
        if not isinstance(until, int | float) or isnan(until):
            raise LawBroken(f"until({p}) is {until!r}, and must be a number")
        if until < last.get(p, -1):
            raise LawBroken(
                f"until({p}) is {until}, and needs({last[p]}) names position {p}: it would be given back too early, by "
                f"{last[p] - until:g} boundaries"
            )


def law_nothing_is_kept_for_ever(case: ComponentCase) -> None:
    """If a reach defines ``until``, a position that no later boundary needs is released at some time.

    Clauses: R9.
    """
    case.only_pages()
    if type(case.reach).until is Reach.until:
        if case.reach.closed_upward:
            return
        raise NotApplicable("its reach has no until: nothing is released early while a sequence runs")
    last = _last_boundaries(case.reach)
    for p in range(HORIZON // 4):
        seen = last.get(p, p)
        if seen < HORIZON // 2 and case.reach.until(p) > HORIZON:
            raise LawBroken(
                f"until({p}) is {case.reach.until(p)}, and no boundary after {seen} needs position {p} (asked up to "
                f"{HORIZON}): a running sequence would keep it for ever"
            )


def law_closed_upward_is_true(case: ComponentCase) -> None:
    """A reach that says ``closed_upward`` needs, at every boundary, all positions before it.

    Clauses: R12.
    """
    if not case.reach.closed_upward:
        raise NotApplicable("its reach is not closed upward")
    for n in range(HORIZON):
        missing = set(range(n)) - needed(case.reach, n)
        if missing:
            raise LawBroken(
                f"it says closed_upward, and needs({n}) leaves out position {min(missing)}: boundaries would be lost "
                f"that can be resumed at. Leave closed_upward out"
            )


def law_convex_is_true(case: ComponentCase) -> None:
    """A reach that says ``convex`` needs a position at every boundary from just after it to the last that needs it, and
    this is its ``until``.

    Clauses: R13.
    """
    case.only_pages()
    if not case.reach.convex:
        raise NotApplicable("its reach is not convex")
    last = _last_boundaries(case.reach)
    for n in range(HORIZON):
        now = needed(case.reach, n)
        for p in range(n):
            if last.get(p, -1) > n and p not in now:
                raise LawBroken(
                    f"it says convex, and position {p} is not needed at {n} and is again at {last[p]}: the search for "
                    f"a boundary would jump past this. Leave convex out"
                )
    for p, seen in last.items():
        until = case.reach.until(p)
        if seen < HORIZON and until > seen:
            raise LawBroken(
                f"it says convex, and until({p}) is {until}, but no boundary after {seen} needs position {p}: from "
                f"just behind it, every boundary up to until needs it. Let until({p}) be {seen}, or leave convex out"
            )


def law_the_reach_covers_what_the_layers_read(case: ComponentCase) -> None:
    """Resuming at n needs every position before n that a token at or after n reads.

    Clauses: P3, R9, R10.
    """
    case.only_pages()
    reads = case.truth.reads
    if reads is None:
        raise NotApplicable("nobody said what its layers read (Truth.reads): the reach is believed")
    last: dict[int, int] = {}
    for q in range(HORIZON // 2):
        for p in reads(q):
            last[p] = q
    for n in range(HORIZON // 2):
        now = needed(case.reach, n)
        for p in range(n):
            if last.get(p, -1) >= n and p not in now:
                raise LawBroken(
                    f"the token at {last[p]} reads position {p}, and needs({n}) is {case.reach.needs(n)}: resumed at "
                    f"{n}, it would read what is not there"
                )


def law_the_reach_names_nothing_that_no_layer_reads(case: ComponentCase) -> None:
    """Every position that resuming at n needs is read by some token at or after n, so nothing is locked in vain.

    Clauses: R9, R10, L2.
    """
    case.only_pages()
    reads = case.truth.reads
    if reads is None:
        raise NotApplicable("nobody said what its layers read (Truth.reads): the reach is believed")
    if case.reach.closed_upward:
        return
    last: dict[int, int] = {}
    for q in range(HORIZON):
        for p in reads(q):
            last[p] = q
    for n in range(HORIZON // 2):
        idle = [p for p in sorted(needed(case.reach, n)) if last.get(p, -1) < n]
        if idle:
            raise LawBroken(
                f"needs({n}) names position {idle[0]}, and no token from {n} to {HORIZON} reads it: it would be kept, "
                f"locked and moved for nothing, and boundaries without it would be lost"
            )


def law_the_manifest_has_all_that_the_layers_write(case: ComponentCase) -> None:
    """The manifest has every buffer and every layer that is written, with the right number of tokens per entry.

    Clauses: M1, M2, M5.
    """
    truth, manifest = case.truth, case.manifest
    if truth.buffers is None and truth.layers is None and truth.tokens_per_entry is None:
        raise NotApplicable("nobody said what its layers write (Truth.buffers, layers, tokens_per_entry)")
    forgotten = sorted(set(truth.buffers or ()) - {buffer.name for buffer in manifest.buffers})
    if forgotten:
        raise LawBroken(f"the layers write {', '.join(forgotten)}, and the manifest has no such buffer: it is lost")
    for buffer in manifest.buffers:
        without = sorted(set(truth.layers or ()) - set(buffer.layers))
        if without:
            raise LawBroken(f"buffer {buffer.name!r} has no entries for the layers {without}, which write their own")
    if truth.tokens_per_entry is not None and manifest.tokens_per_slot != truth.tokens_per_entry:
        raise LawBroken(
            f"an entry stands for {truth.tokens_per_entry} tokens, and tokens_per_slot says {manifest.tokens_per_slot}"
        )


def law_the_pool_has_the_shape_of_the_manifest(case: ComponentCase) -> None:
    """A pool has a tensor for every buffer: layers, slots, the entries of a page, and the shape of one.

    Clauses: P1, M1, M2, M3, C5.
    """
    bench = Bench(case)
    part, pool = bench.parts[0], bench.cache.pool(bench.parts[0].name)
    middle = (part.page_tokens // part.manifest.tokens_per_slot,) if part.page_tokens else ()
    for buffer in part.manifest.buffers:
        tensor = pool.buffers[buffer.name]
        wanted = (len(buffer.layers), pool.capacity, *middle, *buffer.shape)
        if tuple(tensor.shape) != wanted or str(tensor.dtype) != f"torch.{buffer.dtype}":
            raise LawBroken(f"buffer {buffer.name!r} is {tuple(tensor.shape)} of {tensor.dtype}, not {wanted}")
    component = bench.spy.original
    if hasattr(component, "pool") and component.pool is not pool:
        raise LawBroken("its attribute pool is not the pool that it was given: its hooks and ops would touch another")


def facts_laws() -> Iterator[str]:
    """The names of the laws of this module, in order."""
    return (name for name in globals() if name.startswith("law_"))
