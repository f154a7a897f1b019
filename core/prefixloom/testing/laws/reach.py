"""Laws of a reach: what it says of itself, and whether it is what the layers read. They need no traffic.

Every law asks at all small boundaries, and at those around each number that the component or its layers name, up to
long prompts (``kit.probes``).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from math import inf, isnan

from ...contract.reach import Reach
from ..kit.case import ComponentCase, LawBroken, NotApplicable, Wasteful, made
from ..kit.machines import Machine, on_machine
from ..kit.probes import DENSE, FAR, POWERS, TIMES, Answers, Probes, contains, ends_of, first_outside, probes_of

OTHERS = 3
"""How many other instances are asked what one was asked."""


def _last_boundaries(probes: Probes) -> dict[int, int]:
    """Return, for each small position, the last small boundary that needs it."""
    last: dict[int, int] = {}
    for n in range(DENSE):
        for low, high in probes.needs(n):
            last.update(dict.fromkeys(range(low, high), n))
    return last


def law_needs_lie_before_the_boundary(case: ComponentCase) -> None:
    """``needs(n)`` returns intervals of whole numbers inside [0, n), and nothing for the boundary 0.

    Clauses: R10, R14.
    """
    for n in probes_of(case).boundaries:
        for span in case.reach.needs(n):
            low, high = span
            if type(low) is not int or type(high) is not int or not 0 <= low <= high <= n:
                raise LawBroken(f"needs({n}) names {span}, which does not lie within [0, {n})")
        if n == 0 and any(low < high for low, high in case.reach.needs(0)):
            raise LawBroken(f"needs(0) is {case.reach.needs(0)}: nothing lies before the first token")


def law_a_state_needs_no_positions(case: ComponentCase) -> None:
    """A reach whose unit is "boundary" needs no token positions.

    Clauses: R3, R11.
    """
    if not case.has_states:
        raise NotApplicable("its data belongs to positions")
    for n in probes_of(case).boundaries:
        if probes_of(case).needs(n):
            raise LawBroken(f"its unit is 'boundary', and needs({n}) names {case.reach.needs(n)}")


def law_needs_and_until_are_pure(case: ComponentCase) -> None:
    """``needs`` and ``until`` give the same answer to the same number, in any order, on every instance and machine.

    Clauses: C4, H6.
    """
    boundaries = probes_of(case).boundaries
    asked = (*boundaries[:DENSE:3], *boundaries[DENSE::5])
    reach = case.reach
    first = [(tuple(reach.needs(n)), reach.until(n)) for n in asked]
    with on_machine(Machine(case.seed)):
        others = [made(case).reach for _ in range(OTHERS)]
        for n, told in reversed(list(zip(asked, first, strict=True))):
            for one in (reach, *others):
                now = (tuple(one.needs(n)), one.until(n))
                if now != told:
                    raise LawBroken(f"needs({n}), until({n}) were {told}, and asked again {now}")


def law_the_reach_covers_what_the_layers_read(case: ComponentCase) -> None:
    """Resuming at n needs every position before n that a token at or after n reads.

    Clauses: P3, R9, R10.
    """
    probes = _told(case)
    if not probes.watched:
        _covered_where_all_is_small(case, probes)
    told = uncovered(case, probes, probes.served(40, 40), probes.later)
    if told is not None:
        raise LawBroken(told)


def uncovered(
    case: ComponentCase, answers: Answers, boundaries: Iterable[int], later: Callable[[int], Iterable[int]]
) -> str | None:
    """Say what a token of ``later(n)`` reads that is not there where n was resumed at; None if there is nothing."""
    for n in boundaries:
        if n % case.manifest.tokens_per_slot:
            continue  # no boundary lies inside of an entry
        for q in later(n):
            missed = answers.read_outside(q, n)
            if missed is not None:
                return _missed(case, q, missed, n)
    return None


def _covered_where_all_is_small(case: ComponentCase, probes: Probes) -> None:
    """Compare every small boundary with every small token."""
    last: dict[int, int] = {}
    for q in range(DENSE // 2):
        for low, high in probes.reads(q):
            last.update(dict.fromkeys(range(low, high), q))
    for n in range(0, DENSE // 2, case.manifest.tokens_per_slot):
        now = probes.needs(n)
        for p in range(n):
            if last.get(p, -1) >= n and not contains(now, p):
                first = next(q for q in range(n, last[p] + 1) if contains(probes.reads(q), p))
                raise LawBroken(_missed(case, first, p, n))


def _told(case: ComponentCase) -> Probes:
    case.only_pages()
    if case.truth.reads is None and case.truth.layers is None:
        raise NotApplicable("nobody said what its layers read (Truth.reads): the reach is believed")
    return probes_of(case)


def _missed(case: ComponentCase, q: int, p: int, n: int) -> str:
    named = str(case.reach.needs(n))
    return (
        f"the token at {q} reads position {p}, and needs({n}) is {named if len(named) < 200 else named[:200] + '...'}: "
        f"resumed at {n}, it would read what is not there"
    )


def law_until_is_the_last_boundary(case: ComponentCase) -> None:
    """``until(p)`` is the last boundary that needs position p: not before it, and not after it.

    Before it, something would be released that is still needed. After it, something is kept that is not needed.

    Clauses: C4, R9, R10.
    """
    case.only_pages()
    reach, probes = case.reach, probes_of(case)
    for n in probes.boundaries:
        for p in ends_of(probes.needs(n)):
            until = reach.until(p)
            if not isinstance(until, int | float) or isnan(until):
                raise LawBroken(f"until({p}) is {until!r}, and must be a number")
            if until < n:
                raise LawBroken(
                    f"until({p}) is {until}, and needs({n}) names position {p}: it would be given back too early, by "
                    f"at least {n - until:g} boundaries"
                )
    for p in probes.boundaries:
        until = reach.until(p)
        if p + 1 < until < inf and not contains(probes.needs(int(until)), p):
            raise LawBroken(
                f"until({p}) is {until}, and needs({int(until)}) does not name position {p}: the last boundary that "
                f"needs it comes before, and a running sequence keeps what it may give back"
            )


def law_nothing_is_kept_for_ever(case: ComponentCase) -> None:
    """If a reach defines ``until``, a position that no later boundary needs is released at some time.

    Clauses: R9.
    """
    case.only_pages()
    reach, probes = case.reach, probes_of(case)
    if type(reach).until is Reach.until:
        if reach.closed_upward:
            return
        raise NotApplicable("its reach has no until: nothing is released early while a sequence runs")
    last, far = _last_boundaries(probes), probes.boundaries[DENSE:]
    for p in (*range(DENSE // 4), *(n for n in far[:: max(1, len(far) // 40)] if n < FAR // 4)):
        if reach.until(p) <= FAR:
            continue  # another law asks whether it is needed there
        seen = max((n for n in far if contains(probes.needs(n), p)), default=last.get(p, p))
        if seen < FAR // 2:
            raise LawBroken(
                f"until({p}) is {reach.until(p)}, and no boundary after {seen} needs position {p} (asked up to "
                f"{FAR}): a running sequence would keep it for ever"
            )


def law_closed_upward_is_true(case: ComponentCase) -> None:
    """A reach that says ``closed_upward`` needs, at every boundary, all positions before it.

    Clauses: R12.
    """
    if not case.reach.closed_upward:
        raise NotApplicable("its reach is not closed upward")
    for n in probes_of(case).boundaries:
        missing = first_outside(((0, n),), probes_of(case).needs(n), n)
        if missing is not None:
            raise LawBroken(
                f"it says closed_upward, and needs({n}) leaves out position {missing}: boundaries would be lost "
                f"that can be resumed at. Leave closed_upward out"
            )


def law_convex_is_true(case: ComponentCase) -> None:
    """A reach that says ``convex`` needs a position at every boundary from just after it to the last that needs it.

    Clauses: R13.
    """
    case.only_pages()
    if not case.reach.convex:
        raise NotApplicable("its reach is not convex")
    probes = probes_of(case)
    for again, n, p in _gaps(probes):
        raise LawBroken(
            f"it says convex, and position {p} is not needed at {n} and is again at {again}: the search for a boundary "
            f"would jump past this. Leave convex out"
        )


def _gaps(probes: Probes) -> list[tuple[int, int, int]]:
    """Return one (a boundary that needs a position, an earlier one that does not, the position), if there is any."""
    last = _last_boundaries(probes)
    for n in range(DENSE):
        now = probes.needs(n)
        for p in range(n):
            if last.get(p, -1) > n and not contains(now, p):
                return [(last[p], n, p)]
    far = probes.boundaries[DENSE:]
    for at, again in enumerate(far):
        for p in ends_of(probes.needs(again)):
            for n in {p + 1, (p + again) // 2, again - 1, *far[max(0, at - 3) : at]}:
                if p < n < again and not contains(probes.needs(n), p):
                    return [(again, n, p)]
    return []


def law_the_reach_names_nothing_that_no_layer_reads(case: ComponentCase) -> None:
    """Every position that resuming at n needs is read by some token at or after n, so none is in vain.

    Clauses: R9, R10, L2.
    """
    probes = _told(case)
    for n in probes.served(8, 12):
        if n % case.manifest.tokens_per_slot:
            continue
        later = sorted({*probes.later(n), *range(n, min(n + (4 if probes.watched else 40), FAR))})
        ends = ends_of(probes.needs(n))
        for p in ends[:: max(1, len(ends) // 4)] if probes.watched else ends:
            if not any(probes.is_read(p, q) for q in later) and not _read_far_on(probes, p, n):
                raise Wasteful(_idle(probes, p, n))


def _read_far_on(probes: Probes, p: int, n: int) -> bool:
    """Return whether a token reads it that lies further on: a number away from the position, or at any other probe."""
    apart = (p + number * times for number in (*probes.numbers, *POWERS) for times in TIMES)
    every = itertools.chain(apart, range(n, min(n + DENSE, FAR)), probes.boundaries)
    return any(probes.is_read(p, q) for q in every if n <= q <= 2 * FAR)


def _idle(probes: Probes, p: int, n: int) -> str:
    """Return what such a position costs, told at a boundary that is as long as a prompt often is."""
    told = (
        f"needs({n}) names position {p}, and no token from {n} on reads it (asked up to {FAR}): it is kept, "
        f"locked and moved for nothing, and boundaries without it are lost"
    )
    if probes.watched:
        return told
    at = max((m for m in probes.boundaries if m <= max(n, 8192)), default=n)
    named = sum(high - low for low, high in probes.needs(at))
    read = {each for q in probes.later(at) for low, high in probes.reads(q) for each in range(low, min(high, at))}
    return f"{told}. At {at}, {named} positions are named, and the tokens that follow read {len(read)} of them"
