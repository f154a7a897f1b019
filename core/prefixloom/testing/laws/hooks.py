"""Laws of hooks: what hooks may look at, touch and answer, and what follows when a hook raises."""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ...contract.hookspecs import HOT_HOOKS
from ...errors import PluginError
from ...script import Op, require, text_of
from ..kit.answers import Call, CannotBeMade, elsewhere, facts_of, has_code, request_of
from ..kit.bench import Bench
from ..kit.case import ComponentCase, LawBroken, NotApplicable, made
from ..kit.machines import Machine, on_machine
from ..kit.outcomes import everything, judge
from ..kit.scripts import ContentWriter, Player, images
from ..kit.spy import Spy

FAIL = (
    "the validator", "finalize_match_result", "acquire_component_lock", "deferred_forward_ops", "run_forward_op",
)  # fmt: skip
"""Hooks that fail the operation with a PluginError when they raise (H9)."""
COUNTED = ("commit_insert", "redistribute_on_node_split", "release_component_lock", "evict_component")
"""Hooks whose errors are only counted; the derived default is used instead (H10)."""
BETWEEN_TIERS = ("build_hicache_transfers", "commit_hicache_transfer")
"""Hooks that are asked only with a tier below the device; their errors are counted as well (T4, D4)."""
OTHERS = 2
"""How many other processes are asked."""
MACHINES = 7
"""How many machines are asked in this process: as many as there are days in a week."""


def _overridden(case: ComponentCase) -> tuple[str, ...]:
    hooks = Bench(case).spy.overridden
    if not hooks:
        raise NotApplicable("it overrides no hook")
    return hooks


def law_hooks_fit_their_specifications(case: ComponentCase) -> None:
    """Every overridden hook exists, is marked, takes its arguments by their names, and is found by the cache.

    Clauses: H1, H2, H3, O3.
    """
    component = Bench(case)
    for name in component.spy.overridden:
        if getattr(component.parts[0].hooks, name) is None:
            raise LawBroken(f"{name} is defined and was not bound")


def law_hooks_are_called_when_the_contract_says(case: ComponentCase) -> None:
    """Each hook is called once per operation that it belongs to, with the values of that moment.

    Clauses: H4, H5, F1, I1, I2, L1, U1, U2, S1, W1, W2, T1, T2, D1, D2.
    """
    _asked_about_copies(case)
    bench = Bench(case, units=40, listening=True)
    unit, spy, cache = bench.unit, bench.spy, bench.cache
    tokens = text_of(0)[: 4 * unit + 1 + cache.composition.lookahead]

    def heard(hook: str) -> list[tuple[Any, ...]]:
        return [args for name, args in spy.calls if name == hook]

    run = bench.open(tokens)
    _called("open", spy, finalize_match_result=1, acquire_component_lock=1)
    bench.run(run, 3 * unit)
    batches = heard("deferred_forward_ops")
    require(len(batches) == 1, "calls", "one step asks deferred_forward_ops %s times", len(batches))
    (view,) = batches[0][0]
    figures = (view.boundary, view.walked, view.key_tokens, view.start)
    told = "a step of %s tokens shows %s as what is committed, reserved, named and published"
    require(figures == (0, 3 * unit, len(tokens), 0), "calls", told, 3 * unit, figures)
    spy.calls.clear()
    run.sequence.publish()
    if not case.manifest.checkpoint_every:
        _called("publish", spy, commit_insert=1, acquire_component_lock=1)
        for (walk,) in heard("commit_insert"):
            span = (walk.start, walk.boundary, walk.last)
            require(span == (0, 3 * unit, False), "calls", "a publication of [0, %s) is shown as %s", 3 * unit, span)
    run.sequence.close()
    spy.calls.clear()
    with cache.lease(cache.match(tokens[: 2 * unit + cache.composition.lookahead])) as lease:
        held = cache.stats().components[case.name].leased
        _called("lease", spy, acquire_component_lock=1, release_component_lock=0)
        require(len(heard("redistribute_on_node_split")) <= 1, "calls", "one lease splits one node at most")
        require(lease.boundary % unit == 0, "calls", "a lease stands at %s, which is no boundary", lease.boundary)
    if lease.boundary:
        _called("release", spy, release_component_lock=int(held > 0))


def _asked_about_copies(case: ComponentCase) -> None:
    """Check that each plan of copies to and from a tier is shown once before, and once after, with how it ended."""
    bench = Bench(case, units=40, listening=True, below="through")
    tokens = text_of(0)[: 4 * bench.unit + 1 + bench.cache.composition.lookahead]
    for _ in range(2):
        run = bench.open(tokens)
        for end in (4 * bench.unit, run.sequence.named):  # a state is kept where a step ends at a boundary
            if end > run.sequence.reserved:
                bench.run(run, end - run.sequence.reserved)
                run.sequence.publish()
        run.sequence.close()
        bench.cache.evict({part.name: part.capacity for part in bench.parts})
        bench.cache.poll()
    asked = [args for name, args in bench.spy.calls if name == BETWEEN_TIERS[0]]
    told = [args for name, args in bench.spy.calls if name == BETWEEN_TIERS[1]]
    tier = bench.cache.stats().tier
    copied = 0 if tier is None else tier.backed_up
    said = "%s pages were copied to a tier, and the hooks were shown %s plans before and %s after"
    require((asked and told) or not copied, "calls", said, copied, len(asked), len(told))
    for plan, phase in asked:
        require(phase == plan.phase, "calls", "a plan to %s is shown with the phase %s", plan.phase, phase)
        beyond = [each for each in plan.transfers if not 0 <= each.start <= each.end <= plan.boundary]
        require(not beyond, "calls", "a plan up to %s has the transfers %s", plan.boundary, beyond)
    for plan, phase, outcome in told:
        shows = asked.count((plan, phase))
        ended = told.count((plan, phase, outcome))  # a copy that is left out ends without a word
        require(ended <= shows, "calls", "%s was shown %s times before, and %s times after", plan, shows, ended)
        require(outcome.ok, "calls", "the copies of %s failed: %s", plan, outcome.error)


def _called(what: str, spy: Spy, **wanted: int) -> None:
    names = [name for name, _ in spy.calls]
    for hook, count in wanted.items():
        got = names.count(hook)
        require(got == count, "calls", "%s calls %s %s times, not %s", what, hook, got, count)


def law_no_hook_raises(case: ComponentCase) -> None:
    """No hook raises, whatever its arguments are, and each answers what its signature says, or None.

    Clauses: H8, H9, H10, H11, V1, V2.
    """
    _overridden(case)
    judge(case, everything(case), "raise")


def law_a_validator_answers_no_more_than_it_is_asked(case: ComponentCase) -> None:
    """A validator answers a whole number that is not above the boundary in question.

    Clauses: V2, V3.
    """
    _overridden(case)
    judge(case, everything(case), "validator")


def law_hooks_change_nothing_that_they_are_shown(case: ComponentCase) -> None:
    """A hook does not change its arguments, the pool's free list or any content; an op may change the slots in dst.

    Clauses: H5, H6, X3, F1.
    """
    _overridden(case)
    judge(case, everything(case), "mutate")


def law_what_is_asked_of_a_match_is_pure(case: ComponentCase) -> None:
    """Validators and ``finalize_match_result`` give the same answer when they are asked again, whatever came between.

    Clauses: V2, F1.
    """
    _overridden(case)
    judge(case, everything(case), "impure")


def law_the_same_calls_get_the_same_answers(case: ComponentCase) -> None:
    """Instances that see the same calls give the same answers, call by call, on any day and any machine.

    Clauses: H4, H6, C4.
    """
    _overridden(case)
    players = []
    for machine in (None, *(Machine(case.seed + number) for number in range(MACHINES))):
        with on_machine(machine):
            players.append(Player(Bench(case)))
        players[-1].bench.spy.machine = machine
    with contextlib.ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        stack.enter_context(torch.random.fork_rng(devices=()))
        stack.enter_context(contextlib.suppress(AssertionError, PluginError))  # another law reports this
        for op in ContentWriter(f"{case.seed} twice", max(4, players[0].bench.unit)).script(60):
            for number, player in enumerate(players):
                random.seed(number)
                torch.manual_seed(number)
                player.apply(op)
    one, *others = (player.bench.spy.trace for player in players)
    for mine, yours in ((mine, yours) for other in others for mine, yours in zip(one, other, strict=False)):
        if mine != yours:
            raise LawBroken(
                f"of two instances that were asked the same, on different days and machines, one did: {mine}; the "
                f"other: {yours}"
            )


def law_another_process_answers_the_same(case: ComponentCase) -> None:
    """Another process gives the same answers to the same calls: none depends on its date, host, cores or hash seed.

    Clauses: H6, C4.
    """
    if not has_code(case):
        raise NotApplicable("it has no hook and no reach of its own")
    calls = _calls(case)
    here = [*facts_of(made(case)), *(call.answer for call in calls)]
    try:
        request = request_of(case, calls)
        unasked = 0
        for number in range(OTHERS):
            there = elsewhere(request, (case.seed + number) % 1000)
            _same_answers(here, there, calls)
            unasked = there.count(None)
    except CannotBeMade as reason:
        case.memo["other processes"] = str(reason)
        raise NotApplicable(f"no other process can be asked: {reason}") from reason
    if unasked:
        case.memo["other processes"] = f"{unasked} of {len(calls)} answers look at a pool, which is only here"


def _calls(case: ComponentCase) -> list[Call]:
    """Return the calls of hooks, and their answers, while requests in many namespaces are served."""
    bench = Bench(case, below="through")
    unit = bench.unit
    ops = ContentWriter(f"{case.seed} elsewhere", max(4, unit)).script(60)
    for number in range(12):
        prompt = text_of(number % 4)[: (2 + number % 5) * unit + 1]
        spans = images(len(prompt), unit, number % 3)
        ops += [("open", prompt, f"tenant {number}", number, spans), ("run", -1, 99 * unit), ("close", -1)]
        ops += [("lease", prompt, f"tenant {number}"), ("release", -1), ("evict", 4 * unit)]
    player = Player(bench)
    with contextlib.suppress(AssertionError, PluginError):  # another law reports this
        for op in ops:
            player.apply(op)
    return bench.spy.trace


def _same_answers(here: list[str], there: list[str | None], calls: list[Call]) -> None:
    facts = len(here) - len(calls)
    for number, (mine, yours) in enumerate(zip(here, there, strict=True)):
        if yours is None or mine == yours:
            continue
        if number < facts:
            raise LawBroken(f"in this process {mine}, and in another {yours}")
        call = calls[number - facts]
        raise LawBroken(
            f"asked the same, another process answers otherwise: {call}; there {yours}. The answer depends on a "
            f"clock, the machine, the order of a set, the hash of a text, or something else that two do not share"
        )


def law_validity_only_narrows(case: ComponentCase) -> None:
    """With its hooks, a component never allows more tokens to hit than its reach alone does.

    Clauses: H7, V3, I3, I4.
    """
    _overridden(case)
    benches = Bench(case, units=80), Bench(case, units=80, without=HOT_HOOKS)
    unit = benches[0].unit
    prompts = [text_of(k)[: length * unit + 1] for k in (0, 1) for length in (2, 5, 3, 7)]
    for tokens in prompts:
        for bench in benches:
            player = Player(bench)
            for op in (("open", tokens), ("run", 0, 2 * unit), ("publish", 0), ("run", 0, 99 * unit), ("close", 0)):
                _fails(player, op)
        for asked in prompts:
            mine, plain = (bench.cache.peek((*asked, 0)) for bench in benches)
            require(mine <= plain, "narrow", "%s tokens hit, and without its hooks %s: it widens", mine, plain)


def law_a_hook_that_raises_has_the_documented_consequence(case: ComponentCase) -> None:
    """A hook that raises fails only its own operation, or is only counted; the cache stays consistent and goes on.

    Clauses: H9, H10, V4, F5, I5, S3, L4, U4, E4, W1, W5, X4, X5, T4, D4.
    """
    with quiet():
        for hook in (*FAIL, *COUNTED, *BETWEEN_TIERS):
            _raise_in(case, hook)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the log: the errors that the cache counts and logs here are made on purpose."""
    log = logging.getLogger("prefixloom")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


def _raise_in(case: ComponentCase, hook: str) -> None:
    bench = Bench(case, units=10, raising=hook, below="through" if hook in BETWEEN_TIERS else "")
    unit, failed = bench.unit, 0
    base = text_of(0)[: 4 * unit + 1]
    prompts = [base, (*base[: 2 * unit], 1 - base[2 * unit], *base[:unit]), text_of(2)[: 7 * unit], base]
    for tokens in prompts:
        player = Player(bench)
        for op in (("open", tokens), ("run", 0, 99 * unit), ("publish", 0), ("lease", tokens), ("release", 0),
                   ("evict", unit)):  # fmt: skip
            failed += _fails(player, op)
        for run in player.running:
            run.sequence.abort() if hook in FAIL else run.sequence.close()
    raised, counted = bench.spy.raised, bench.cache.stats().plugin_errors
    if hook in FAIL:
        require(failed or not raised, "raise", "%s raised, and no operation failed with it", hook)
    else:
        require(not failed, "raise", "%s raised, and an operation failed: it should be counted", hook)
        require(counted >= raised, "raise", "%s raised %s times; %s were counted", hook, raised, counted)
    bench.spy.stop_raising()
    after = Player(bench)
    for op in (("open", base), ("run", 0, 99 * unit), ("close", 0)):
        after.apply(op)
    left = bench.cache.stats().components[bench.parts[0].name].running
    require(not left, "books", "after %s raised, %s slots have no owner", hook, left)


def _fails(player: Player, op: Op) -> bool:
    """Perform an operation that may fail because a hook raises, and check no content."""
    try:
        player.perform(op)
    except PluginError:
        return True
    return False
