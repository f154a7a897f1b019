"""Whatever an operation raises at whatever line: what hits is right, and later calls raise errors of ours alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import attrs
import pytest

from prefixloom import (
    BrokenError,
    Cache,
    Component,
    Inserted,
    Path,
    Point,
    PrefixloomError,
    Sequence,
    Window,
    compose,
    hookimpl,
)
from prefixloom.testing.inside.backdoor import tier_lanes
from prefixloom_hicache import MemoryBackend
from tests.support.helpers import part
from tests.support.interrupting import Interrupt
from tests.support.sampling import slow
from tests.support.stores import composed, read_back
from tests.support.tiers import compute, mark, serve, simulated, tiered, wrong

STEM = list(range(40))
PROMPTS = [
    ("", STEM),
    ("", [*STEM[:20], *range(50, 70)]),
    ("a", [*STEM[:24], *range(80, 96)]),
    ("", [*STEM[:22], *[5] * 14]),
    ("", [*range(200, 232)]),
]
"""(namespace, tokens)"""


@attrs.define
class World:
    """A cache amid work: of its prompts some are on the device and some on the host only, and two sequences run."""

    cache: Cache
    running: Sequence
    """Has computed 28 tokens of the stem's variation, and published 8."""
    cold: Sequence
    """Was just opened over a prompt that only the host has."""
    lease: Any
    simulation: Any = None


WRITES = {"publish": "through", "request": "through", "open": "selective"}
"""How what a verb leaves comes to the host, if not when the device evicts it."""


def world(verb: str) -> World:
    parts = (part("path", Path()), part("window", Window(10)), part("point", Point(), checkpoint_every=8))
    host, write = {"path": 40, "window": 40, "point": 8}, WRITES.get(verb, "back")
    cache = tiered(*parts, tokens=112, slots=8, host=host, write=write, hits=1, debug=False)
    for namespace, tokens in PROMPTS[:3]:
        serve(cache, tokens, chunk=16, namespace=namespace)
    cache.evict({"path": 100, "window": 100, "point": 8})
    serve(cache, PROMPTS[4][1], chunk=16)
    running = cache.open(PROMPTS[3][1], label="running", until=5.0)
    for end in (8, 20, 28):
        compute(cache, running, PROMPTS[3][1], end)
        if end == 8:
            running.publish()
    simulation = simulated(cache) if verb == "poll" else None
    cold = cache.open([*PROMPTS[1][1], 1], leave=1)
    return World(cache, running, cold, cache.lease(cache.match(PROMPTS[4][1])), simulation)


def step(w: World) -> None:
    compute(w.cache, w.running, PROMPTS[3][1], 34)


def alone(w: World) -> None:
    w.cold.fill()
    w.cold.grow(0)
    w.cold.commit()


def request(w: World) -> None:
    with w.cache.open([*PROMPTS[3][1], 7, 8], namespace="a", leave=1) as sequence:
        sequence.restore()
        compute(w.cache, sequence, [*PROMPTS[3][1], 7, 8], 38)
        sequence.publish()


def poll(w: World) -> None:
    w.cold.restore()
    w.simulation.drain()
    w.cache.poll()


VERBS: dict[str, Callable[[World], object]] = {
    "open": lambda w: w.cache.open([*STEM[:14], 9, 9, 9], label="new"),
    "grow": lambda w: w.running.grow(64),
    "step": step,
    "publish": lambda w: w.running.publish(),
    "close": lambda w: w.running.close(),
    "abort": lambda w: w.running.abort(),
    "restore": lambda w: w.cold.restore(),
    "evict": lambda w: w.cache.evict({"path": 5, "window": 5, "point": 2}),
    "rewind": lambda w: w.running.rewind(0),
    "append": lambda w: w.running.append([1, 2, 3, 4], extra=[(1, 3, "image")]),
    "fill and commit": alone,
    "expire": lambda w: w.cache.expire(9.0),
    "until": lambda w: setattr(w.running, "until", 20.0),
    "lease": lambda w: w.cache.lease(w.cache.match(STEM[:18])).release(),
    "release": lambda w: w.lease.release(),
    "reclaim": lambda w: w.cache.reclaim(),
    "drop_namespace": lambda w: w.cache.drop_namespace("a"),
    "flush": lambda w: w.cache.flush(),
    "poll": poll,
    "request": request,
}


def others(w: World) -> list[Callable[[], object]]:
    """Calls that come after: of what is running, and of the cache as a whole."""
    calls: list[Callable[[], object]] = []
    for sequence in (w.running, w.cold):
        for name in ("path", "point"):
            calls += [lambda s=sequence, n=name: s.pages(n), lambda s=sequence, n=name: s.owned(n)]  # type: ignore[misc]
        calls += [
            lambda s=sequence: s.append([3, 4]),  # type: ignore[misc]
            lambda s=sequence: s.grow(3),  # type: ignore[misc]
            lambda s=sequence: repr(s),  # type: ignore[misc]
            lambda s=sequence: s.publish(),  # type: ignore[misc]
        ]
    calls += [w.cache.stats, w.cache.figures, w.cache.contents, w.cache.poll, w.cache.reclaim, lambda: w.cache.evict(8)]
    calls += [lambda: w.cache.explain(STEM), lambda: w.cache.expire(10.0), lambda: w.cache.match(STEM).need]
    calls += [w.lease.release, w.cold.abort, w.running.close, w.running.abort]
    return calls


def served(cache: Cache) -> None:
    """What hits is right, and what is refused is refused by an error of ours."""
    for namespace, tokens in PROMPTS:
        with contextlib.suppress(PrefixloomError):
            serve(cache, tokens, namespace=namespace)


def after(w: World, line: int) -> None:
    """What was interrupted is found by whatever comes next; a flush makes the cache serve as a new one does."""
    if line % 2:
        served(w.cache)
    for call in others(w):
        with contextlib.suppress(PrefixloomError):
            call()
    if w.simulation is not None:
        w.simulation.drain()
    served(w.cache)
    w.cache.flush()
    if w.simulation is not None:
        w.simulation.drain()
    w.cache.poll()
    for lane in (*w.cache.core.shape.lanes, *tier_lanes(w.cache)):
        for pool in lane.pools:
            assert (pool.free, pool.retiring, lane.in_tree, lane.leased) == (pool.capacity, 0, 0, 0), lane.name
    assert [serve(w.cache, [*STEM, 1], chunk=8) for _ in range(2)] == [0, 40]
    w.cache.evict({"path": 100, "window": 100, "point": 8})
    if w.simulation is not None:
        w.simulation.drain()
    assert serve(w.cache, [*STEM, 1]) == 40, "from the host"


def struck(verb: str, line: int, error: type[BaseException]) -> int:
    """How many lines the verb has."""
    w = world(verb)
    interrupt = Interrupt(line, error)
    try:
        with interrupt:
            VERBS[verb](w)
    except (PrefixloomError, error):
        pass
    if line > 0:
        after(w, line)
    return line - interrupt.left


CASES = [(verb, error) for verb in VERBS for error in (MemoryError, KeyboardInterrupt)]
SAMPLED = [*((*case, 59) for case in CASES), *(slow(*case, 1) for case in CASES)]


@pytest.mark.parametrize(("verb", "error", "every"), SAMPLED)
@pytest.mark.timeout(1800)
def test_after_an_error_at_any_line_what_hits_is_right_and_what_is_raised_is_ours(
    verb: str, error: type[BaseException], every: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL")
    lines = struck(verb, -1, error)
    assert lines > 5
    for line in range(1 + len(verb) % every, lines + 1, every):
        try:
            struck(verb, line, error)
        except BaseException as failure:
            failure.add_note(f"{error.__name__} at line {line} of {lines} of {verb}")
            raise


# ---------------------------------------------------------------- slots of an engine


def handed_in(cache: Cache, tokens: list[int], slots: dict[str, list[int]]) -> Inserted:
    """What an engine computed of ``tokens`` in slots of its own."""
    for lane in cache.core.shape.lanes:
        data = cache.pool(lane.name).buffers["data"]
        if lane.unit == "boundary":
            data[:, slots[lane.name]] = mark("", tokens)
        else:
            for at in range(len(tokens)):
                data[:, slots[lane.name][at // 4], at % 4] = mark("", tokens[: at + 1])
    return cache.insert(tokens, slots)


@pytest.mark.parametrize(("error", "every"), [(MemoryError, 59), slow(MemoryError, 1), slow(KeyboardInterrupt, 1)])
@pytest.mark.timeout(1800)
def test_after_an_error_at_any_line_of_an_insert_what_hits_is_right_and_a_flush_gives_all_slots_back(
    error: type[BaseException], every: int
) -> None:
    tokens = [*STEM[:8], *range(60, 72)]
    slots = {"path": [0, 1, 4, 5, 6], "window": [3, 2, 4, 5, 6], "point": [2]}

    def struck(line: int) -> int:
        parts = (part("path", Path()), part("window", Window(10)), part("point", Point()))
        capacity = {"path": 64, "window": 64, "point": 4}
        cache = compose(None, plugins=parts, page_size=4, capacity=capacity, slots="lent")
        handed_in(cache, STEM[:16], {"path": [0, 1, 2, 3], "window": [3, 2, 1, 0], "point": [1]})
        mine = {**slots, "path": [7, 8, 4, 5, 6], "window": [7, 8, 4, 5, 6]}
        interrupt = Interrupt(line, error)
        with contextlib.suppress(PrefixloomError, error), interrupt:
            handed_in(cache, tokens, mine)
        for prompt in (STEM[:16], tokens):
            with contextlib.suppress(PrefixloomError), cache.open([*prompt, 1], leave=1) as sequence:
                with cache.step([sequence]) as step:
                    step.run_ops()
                assert wrong(cache, sequence, prompt) == []
        cache.flush()
        cache.take_back()
        assert {name: figures.outside for name, figures in cache.stats().components.items()} == {
            "path": 16, "window": 16, "point": 4,
        }  # fmt: skip
        assert handed_in(cache, tokens, slots).length == 20
        return line - interrupt.left

    lines = struck(-1)
    assert lines > 50
    for line in range(1, lines + 1, every):
        struck(line)


# ---------------------------------------------------------------- a store


@pytest.mark.parametrize(("error", "every"), [(MemoryError, 4001), slow(MemoryError, 97), slow(KeyboardInterrupt, 97)])
@pytest.mark.timeout(1800)
def test_after_an_error_at_any_line_the_store_has_nothing_wrong(
    error: type[BaseException], every: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL")
    host = {"path": 40, "window": 40, "point": 8}

    def struck(line: int) -> int:
        store = MemoryBackend(capacity=1 << 22)
        cache, tier = composed(store=store, host=host, tokens=112, debug=False)
        interrupt = Interrupt(line, error)
        with contextlib.suppress(PrefixloomError, error), interrupt:
            for namespace, tokens in PROMPTS:
                serve(cache, tokens, chunk=16, namespace=namespace)
                cache.poll()
            cache.evict(60)
            cache.open([*STEM, 1]).restore()
            cache.poll()
        for namespace, tokens in PROMPTS:
            with contextlib.suppress(PrefixloomError):
                serve(cache, tokens, namespace=namespace)
        cache.flush()
        for namespace, tokens in PROMPTS:
            read_back(cache, [*tokens, 1], namespace=namespace)
        tier.detach()
        other, _ = composed(store=store, host=host, tokens=112)
        for namespace, tokens in PROMPTS:
            read_back(other, [*tokens, 1], namespace=namespace)
        return line - interrupt.left

    lines = struck(-1)
    assert lines > 1000
    for line in range(1, lines + 1, every):
        struck(line)


def test_step_that_a_flush_has_ended_does_not_end_the_work_of_another_step() -> None:
    """Its block was left after an interrupt was caught in it, and its object lived on."""
    cache = compose(None, plugins=[part("path", Path(), Interrupted)], page_size=4, capacity=24, debug=True)
    with cache.open(range(16)) as first:
        compute(cache, first, [*range(16)], 16)
    ended = cache.step([cache.open(range(100, 200))]).__enter__()
    with pytest.raises(KeyboardInterrupt):
        cache.evict(4)
    with pytest.raises(BrokenError):
        ended.__exit__(None, None, None)
    cache.flush()
    sequence = cache.open(range(16))
    sequence.grow(4)
    with cache.step([sequence]) as step:
        step.run_ops()
        del ended
        cache.poll()
    assert sequence.committed == 4


class Interrupted(Component):
    @hookimpl
    def evict_component(self, node: object) -> None:
        raise KeyboardInterrupt
