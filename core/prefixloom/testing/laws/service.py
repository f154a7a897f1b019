"""Laws of a component's memory while requests are served, proved with random and with systematic scripts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import inf
from typing import Any

from ...contract.hookspecs import HOT_HOOKS
from ...contract.reach import Reach
from ...script import require, text_of
from ..inside import backdoor
from ..kit.bench import Bench, BenchSequence
from ..kit.case import ComponentCase, NotApplicable
from ..kit.outcomes import SERVING, below, beside, branches, judge, late, off_the_grid, random_scripts, with_late_steps


def law_what_is_restored_is_what_was_live(case: ComponentCase) -> None:
    """A sequence reads exactly what was computed from its own tokens: bitwise, or within the codec's tolerance.

    Clauses: M1, M2, M6, M9, M11, P2, P4, P5, R14.
    """
    judge(case, [*random_scripts(case), *late(case)], "content")


def law_a_hit_ends_where_it_may(case: ComponentCase) -> None:
    """A request resumes only where the layers can go on, for example not inside of an image.

    Clauses: V2, V3.
    """
    if case.truth.ends is None:
        raise NotApplicable("nobody said at which boundaries a hit may end (Truth.ends): at every one")
    judge(case, [*random_scripts(case), *branches(case), *late(case)], "ends")


def law_content_depends_on_no_later_token(case: ComponentCase) -> None:
    """Content cached up to b depends only on the tokens up to b + lookahead, so prompts that differ later may share it.

    Clauses: M5, M11.
    """
    judge(case, branches(case), "content")


def law_content_is_exact_on_the_grid(case: ComponentCase) -> None:
    """Content cached at a boundary does not depend on how the tokens before it were cut into steps.

    Clauses: M4, M11.
    """
    judge(case, off_the_grid(case), "content")


def law_content_is_that_of_a_namespace_and_its_extra_keys(case: ComponentCase) -> None:
    """Content is not found by the same tokens in another namespace or with other extra keys.

    Clauses: M11.
    """
    bench = Bench(case, units=60)
    unit, tokens = bench.unit, text_of(0)[: 5 * bench.unit + 1]
    image = [(2 * unit, 2 * unit + 1, "one image")]
    for namespace, extra in (("a", []), ("b", image)):
        run = served(bench, tokens, namespace=namespace, extra=extra)
        require(run.restored == 0 or _needs_nothing(case), "content", "namespace %r finds what another has", namespace)
    others: list[list[tuple[int, int, str]]] = [[], [(2 * unit, 2 * unit + 1, "another")], image]
    for extra in others:  # what has no extra key is published first, so that the next could find it
        run = served(bench, tokens, leave=1, namespace="b", extra=extra)
        said = "with the extra key %s, a prompt finds %s tokens, and the key stands at %s"
        require(extra == image or run.restored <= 2 * unit, "content", said, extra, run.restored, 2 * unit)


def _needs_nothing(case: ComponentCase) -> bool:
    return not case.has_states and not any(low < high for low, high in case.reach.needs(64))


def served(
    bench: Bench, tokens: Sequence[int], chunk: int = 1 << 30, publish: bool = False, **options: Any
) -> BenchSequence:
    """Serve a request from its beginning to its end, and return it. ``publish``: after each chunk, not only at the end.

    ``options`` are those of ``Bench.open``.
    """
    run = bench.open(tokens, **options)
    _finish(bench, run, chunk, publish)
    run.sequence.close()
    return run


def _finish(bench: Bench, run: BenchSequence, chunk: int = 1 << 30, publish: bool = False) -> None:
    """Compute all named tokens."""
    s = run.sequence
    while s.reserved < s.named:
        bench.run(run, min(chunk, s.named - s.reserved))
        bench.raise_late_failures()
        if publish:
            s.publish()
    bench.verify(run)


def law_a_running_sequence_keeps_what_it_still_needs(case: ComponentCase) -> None:
    """A running sequence never gives back what a boundary needs that it can still publish or rewind to.

    Clauses: P3, I3, M6, M7, C4.
    """
    judge(case, [*random_scripts(case), *off_the_grid(case), *late(case)], "absent")
    for length in (1, 2, 3, 5, 8):
        kept, left = (_hits(case, length, reclaims=reclaims) for reclaims in (False, True))
        said = "a sequence of %s pages gave back early what it could, was computed and closed: %s tokens hit, not %s"
        require(left >= kept, "absent", said, length, left, kept)


def _hits(case: ComponentCase, length: int, *, reclaims: bool) -> int:
    """Return how many tokens of a prompt of so many pages hit, once it was computed page by page and closed."""
    bench = Bench(case, units=40)
    unit = bench.unit
    tokens = text_of(0)[: length * unit + bench.cache.composition.lookahead]
    run = bench.open(tokens)
    while run.sequence.reserved < length * unit:
        bench.run(run, unit)
        if reclaims:  # releases everything that the sequence need not keep
            bench.cache.reclaim()
    _finish(bench, run)
    run.sequence.close()
    return bench.cache.peek((*tokens, 0))


def law_a_lease_covers_exactly_what_resuming_needs(case: ComponentCase) -> None:
    """A lease covers exactly what its boundary needs, in whole pages, and what it covers is not evicted.

    Clauses: L2, L3, R1, R2, R3, R14, E1.
    """
    for pages in (1, 2, 4, 6):
        bench = Bench(case, units=40)
        part, unit = bench.parts[0], bench.unit
        tokens = text_of(0)[: 6 * unit + bench.cache.composition.lookahead]
        served(bench, tokens, unit, publish=True)  # an edge for every page of the tree
        plan = bench.cache.match(tokens[: pages * unit + bench.cache.composition.lookahead])
        lease = bench.cache.lease(plan)
        leased, wanted = bench.cache.stats().components[part.name].leased, needed_slots(part, lease.boundary, unit)
        said = "a lease at %s covers %s slots; resuming there needs %s, rounded outward to pages"
        widened, kept = "acquire_component_lock" in bench.spy.overridden, "commit_insert" in bench.spy.overridden
        if not widened and not (kept and leased < wanted):
            require(leased == wanted, "lock", said, lease.boundary, leased, wanted)
        bench.cache.evict({part.name: part.capacity})
        bench.poison()
        again = bench.open(tokens[: lease.boundary + bench.cache.composition.lookahead])
        require(
            again.restored == lease.boundary, "lock", "of the leased %s, %s were left", lease.boundary, again.restored
        )
        bench.verify(again)
        again.sequence.abort()
        lease.release()
        left = bench.cache.stats().components[part.name].leased
        require(not left, "lock", "after its release, %s slots are covered still", left)


def law_memory_that_nothing_needs_lowers_no_hit(case: ComponentCase) -> None:
    """Memory that no boundary needs is protected by a lease, lowers no hit once it is gone, and comes back from a tier.

    Clauses: R17.
    """
    if case.has_states or case.reach.until(0) != inf:
        raise NotApplicable("no later boundary may use it for good")
    if any(low < high for n in range(1, 257) for low, high in case.reach.needs(n)):
        raise NotApplicable("boundaries need it")
    bench = Bench(case, ("path",), below="through", without=HOT_HOOKS)
    name, end = bench.parts[0].name, 6 * bench.unit
    tokens = text_of(0)[: end + bench.cache.composition.lookahead]
    served(bench, tokens)
    cached = bench.cache.stats().components[name].cached
    with bench.cache.lease(bench.cache.match(tokens)):
        bench.cache.evict({name: bench.parts[0].capacity})
        left = bench.cache.stats().components[name].cached
        require(left == cached, "lock", "of %s pages that a lease protects, an eviction left %s", cached, left)
    bench.cache.evict({name: bench.parts[0].capacity})
    bench.poison()
    ready = bench.cache.peek(tokens)
    require(ready == end, "lock", "without it, %s of %s tokens hit", ready, end)
    again = bench.open(tokens)
    absent = again.sequence.pages(name).count(-1)
    require(not absent, "lock", "a restore with room left out %s pages that the tier below has", absent)
    bench.verify(again)
    again.sequence.close()


def needed_slots(part: Any, boundary: int, unit: int) -> int:
    """Return how many slots a lease at ``boundary`` covers by its reach, if every edge is one tree page long."""
    if not part.page_tokens:
        return 1 if boundary else 0
    reach: Reach = part.reach
    touched = {p // unit for low, high in reach.needs(boundary) for p in range(low, high)}
    if not reach.convex:
        if type(reach).until is Reach.until:
            touched = set(range(boundary // unit))
        else:
            touched |= {p // unit for p in range(boundary) if reach.until(p) >= boundary}
    pages: int = unit // part.page_tokens
    return len(touched) * pages


def law_a_release_undoes_its_own_acquire(case: ComponentCase) -> None:
    """After leases of many boundaries are released in any order, every lock count is as it was before.

    Clauses: L3, U1, U3.
    """
    bench = Bench(case, units=40)
    unit, tokens = bench.unit, text_of(0)[: 6 * bench.unit + 1]
    for stop in (3 * unit, 6 * unit + 1):
        served(bench, tokens[:stop])
    before = backdoor.locks(bench.cache)
    lengths = [6 * unit + 1, unit, 3 * unit, 5 * unit, 2 * unit, 3 * unit]  # later ones split what the first covers
    leases = [bench.cache.lease(bench.cache.match(tokens[:length])) for length in lengths]
    random.Random(case.seed).shuffle(leases)
    for lease in leases:
        lease.release()
    wrong = {place: count for place, count in backdoor.locks(bench.cache).items() if count != before.get(place, 0)}
    require(not wrong, "lock", "leases were taken and released, and these cells are still locked: %s", wrong)


def law_what_is_leased_is_not_evicted(case: ComponentCase) -> None:
    """While a lease lives, requests can resume at its boundary, whatever else is evicted, split or published.

    Clauses: L2, L4, E1, E3, F1.
    """
    judge(case, [*random_scripts(case), *late(case)], "lock")


def law_a_split_changes_nothing_that_a_reader_sees(case: ComponentCase) -> None:
    """When an edge is split, both halves keep their content, and leases still cover what they covered.

    Clauses: S1, S2, L3.
    """
    for cut in (1, 2, 4, 5):
        bench = Bench(case, units=40)
        unit, ahead = bench.unit, bench.cache.composition.lookahead
        base = text_of(0)[: 6 * unit + ahead]
        served(bench, base)
        reader = bench.open((*base, 1))
        lease = bench.cache.lease(bench.cache.match(base))
        served(bench, (*base[: cut * unit], 1 - base[cut * unit], *text_of(2)[: 2 * unit]))
        bench.verify(reader)
        said = "after a split at %s, a lease at %s finds only %s"
        got = bench.cache.peek(base)
        require(got >= lease.boundary or _narrows(bench), "split", said, cut * unit, lease.boundary, got)
        _finish(bench, reader)
        reader.sequence.abort()
        lease.release()
        for part in bench.parts:
            left = bench.cache.stats().components[part.name].leased
            require(not left, "split", "after a split at %s and all releases, %s slots are covered", cut * unit, left)


def _narrows(bench: Bench) -> bool:
    return "create_match_validator" in bench.spy.overridden


def law_no_slot_is_lost_or_owned_twice(case: ComponentCase) -> None:
    """After every operation each slot has one owner; when everything is closed and evicted, every slot is free.

    Clauses: P6, E2, E3, H10.
    """
    judge(case, [*random_scripts(case), *late(case)], "books")


def law_it_serves_beside_every_other_kind(case: ComponentCase) -> None:
    """Composed with a path, a window and a state, in pairs and triples, the component serves without any failure.

    Clauses: C6, C7, M4, V3.
    """
    judge(case, beside(case), *SERVING)


def law_a_step_on_another_thread_races_with_nothing(case: ComponentCase) -> None:
    """A step that runs as late as it may uses no slot before it is written or after it has a new owner.

    Clauses: X1, X2, H4.
    """
    judge(case, with_late_steps(case), *SERVING)


def law_page_tables_say_where_a_sequence_lies(case: ComponentCase) -> None:
    """A step's table equals ``sequence.pages``: page numbers by position, and -1 where a page is absent.

    Clauses: P2, P3.
    """
    bench = Bench(case, units=40)
    run = bench.open(text_of(0)[: 5 * bench.unit])
    name, s = bench.parts[0].name, run.sequence
    while s.reserved < s.named:
        bench.run(run, min(bench.unit, s.named - s.reserved))
        bench.raise_late_failures()
        bench.cache.reclaim()
        with bench.cache.step([s]) as step:
            step.run_ops()
            table, pages = step.table(name)[0].tolist(), s.pages(name)
        require(table == pages, "absent", "a step's table says %s, and the sequence's pages are %s", table, pages)
    s.abort()


def law_what_comes_back_from_a_tier_is_what_was_live(case: ComponentCase) -> None:
    """What the device lost, and a tier below it brings back, is what was computed from the sequence's own tokens.

    Clauses: T3, D3, P4, P5, M9.
    """
    judge(case, below(case), *SERVING)
