"""Laws of what a component costs: whether prompts hit, and how much a lease keeps from being evicted."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from typing import Any

from ...errors import CapacityError, PluginError
from ..kit.bench import Bench, that_fit
from ..kit.case import ComponentCase, LawBroken, NotApplicable, Wasteful
from .service import needed_slots, served

LENGTHS = (8, 13, 24, 80, 320)
"""The lengths of prompts, in pages of the tree: what hits at none of them hits never."""
ROUNDS = 24
"""How often a prompt comes again among others."""
LONG = (64, 256, 1024)
"""The lengths of prompts that may be leased, in pages of the tree: the first of which little is needed is taken."""


def law_what_was_served_is_found_again(case: ComponentCase) -> None:
    """A prompt that was computed and closed hits when it comes again, also among others where there is little room.

    Clauses: V3, I3, I4, U3, E2, E3.
    """
    length = next((length for length in that_fit(case, LENGTHS) if _hits(case, length)), None)
    hooks = Bench(case).spy.overridden
    if length is None:
        _never_hits(case, hooks)
    elif hooks:
        _prompts_hit_as_far(case, hooks)
        _hot_prompts_hit(case, length, hooks)


def _alone(hooks: Sequence[str]) -> list[str]:
    """Return the hooks of which each can be left out: others answer the ops that ``run_forward_op`` runs."""
    return [hook for hook in hooks if hook != "run_forward_op"]


def _hits(case: ComponentCase, length: int, without: Collection[str] = (), branched: bool = False) -> int:
    """Return how many tokens of a prompt of so many pages hit, once it was served in two steps with nothing else there.

    ``branched``: a prompt that begins like it, and then differs, was served after it.
    """
    bench = Bench(case, units=2 * length + 8, without=without, blank=True)
    unit, ahead = bench.unit, bench.cache.composition.lookahead
    half, end = length // 2 * unit, length * unit + ahead
    prompt = list(range(1000, 1000 + end))
    for tokens in (prompt, [*prompt[:half], *range(100_000 + half, 100_000 + end)])[: 1 + branched]:
        run = bench.open(tokens)
        for count in (half - run.sequence.reserved, length * unit - half):
            bench.run(run, max(0, count))
        run.sequence.close()
    return bench.cache.peek((*prompt, 0))


def _never_hits(case: ComponentCase, hooks: Sequence[str]) -> None:
    guilty = [hook for hook in _alone(hooks) if any(_hits(case, length, {hook}) for length in that_fit(case, LENGTHS))]
    served = f"prompts of {', '.join(str(length * Bench(case).unit) for length in that_fit(case, LENGTHS))} tokens"
    if guilty:
        raise LawBroken(f"{served} were served, and none of their tokens hits again. Without {guilty[0]} they hit")
    suspect = ". Look at its admission policy" if case.manifest.admission is not None else ""
    raise LawBroken(f"{served} were served, and none of their tokens hits again{suspect}")


def _prompts_hit_as_far(case: ComponentCase, hooks: Sequence[str]) -> None:
    """Compare how much of prompts hits with what would hit without the component's hooks."""
    lost = []
    for length in that_fit(case, LENGTHS):
        for branched in (False, True)[: 1 + (length < LENGTHS[-1])]:
            mine, plain = (_hits(case, length, without, branched) for without in ((), hooks))
            lost.append(plain - mine)
            if 4 * mine < 3 * plain:
                _loses(case, hooks, length, branched)
    if min(lost) > 0:
        _loses(case, hooks, LENGTHS[0], False, f". Each prompt that was tried loses {min(lost)} tokens or more")


def _blame(hits: Callable[[Collection[str]], int], hooks: Sequence[str]) -> tuple[int, str]:
    """Return how many tokens hit, and how many without the hook that costs most, or else without all hooks."""
    mine, alone = hits(()), {hook: hits({hook}) for hook in _alone(hooks)}
    guilty = max(alone, key=lambda hook: alone[hook])
    return mine, f"without {guilty} {alone[guilty]}" if alone[guilty] > mine else f"without its hooks {hits(hooks)}"


def _loses(case: ComponentCase, hooks: Sequence[str], length: int, branched: bool, more: str = "") -> None:
    mine, told = _blame(lambda without: _hits(case, length, without, branched), hooks)
    after = ", after another that differs from its half on" if branched else ""
    raise Wasteful(
        f"of a prompt of {length * Bench(case).unit} tokens {mine} hit when it comes again{after}, and {told}{more}"
    )


def _hot(case: ComponentCase, length: int, without: Collection[str] = ()) -> int:
    """Serve one prompt again and again, and new ones between. Return how many of its tokens hit."""
    bench = Bench(case, units=4 * length, without=without, blank=True)
    unit, ahead, hit = bench.unit, bench.cache.composition.lookahead, 0
    hot = list(range(1000, 1000 + length * unit))
    for number in range(ROUNDS):
        for prompt in (hot, [100_000 + number * 10_000 + at for at in range(length * unit)]):
            with contextlib.suppress(CapacityError, PluginError):
                run = bench.open([*prompt, *range(7, 8 + ahead)], leave=1)
                hit += run.sequence.ready
                for count in (length * unit - run.sequence.reserved, 1):
                    bench.run(run, max(0, count))
                run.sequence.close()
    return hit


def _hot_prompts_hit(case: ComponentCase, length: int, hooks: Sequence[str]) -> None:
    """Compare with what hits while there is room, and with the component without its hooks."""
    could = (ROUNDS - 1) * _hits(case, length)
    if 4 * _hot(case, length) >= 3 * min(could, _hot(case, length, hooks)):
        return
    mine, told = _blame(lambda without: _hot(case, length, without), hooks)
    raise Wasteful(
        f"a prompt of {length * Bench(case).unit} tokens came {ROUNDS} times, with others between: {mine} tokens hit, "
        f"and {told}"
    )


def _slots(part: Any, tokens: int) -> int:
    return tokens // part.page_tokens if part.page_tokens else 1


def law_a_lease_keeps_little_more_than_resuming_needs(case: ComponentCase) -> None:
    """A lock that a component widens covers less than twice of what resuming at a long prompt's end needs.

    Clauses: L2, L3.
    """
    if "acquire_component_lock" not in Bench(case).spy.overridden:
        raise NotApplicable("it widens no lock")
    part, unit = Bench(case, blank=True).parts[0], Bench(case, blank=True).unit
    length = next(
        (
            size
            for size in that_fit(case, LONG)
            if 3 * needed_slots(part, size * unit, unit) < _slots(part, size * unit)
        ),
        LONG[0],
    )
    bench = Bench(case, units=length + 8, blank=True)
    tokens = list(range(length * unit + bench.cache.composition.lookahead))
    served(bench, tokens, unit, publish=True)
    with bench.cache.lease(bench.cache.match(tokens)) as lease:
        figures = bench.cache.stats().components[part.name]
        wanted = needed_slots(part, lease.boundary, unit)
        if figures.leased > 2 * wanted + 4:
            raise Wasteful(
                f"a lease at {lease.boundary} covers {figures.leased} of the {figures.cached} slots that are cached of "
                f"the prompt, and resuming there needs {wanted}: acquire_component_lock keeps the others from being "
                f"evicted while a request runs"
            )
