"""Leases: what they cover, that a release undoes exactly its own acquire, and what hooks may add."""

from __future__ import annotations

from typing import Any

import pytest

from prefixloom import Component, Path, PluginError, Point, ProtocolError, Receipt, Touch, Window, hookimpl
from prefixloom.tree import paged_reach
from tests.support.helpers import Holes, cache_of, every_reach, held, locks, part, path_cache, run, serve, settle

TOKENS = list(range(40))
each = pytest.mark.parametrize("name", every_reach())


def served(*components: Component, **options: Any) -> Any:
    cache = cache_of(*components, **options)
    serve(cache, TOKENS, chunk=20)
    return cache


def test_a_lease_says_where_it_is_and_whether_it_holds() -> None:
    cache = served(part("path", Path()))
    lease = cache.lease(cache.match(TOKENS[:30]))
    assert (lease.boundary, lease.active) == (28, True)
    assert repr(lease) == "<Lease at 28>"
    lease.release()
    assert not lease.active
    assert repr(lease) == "<Lease at 28, released>"


def test_releasing_twice_is_refused_and_changes_nothing() -> None:
    cache = served(part("path", Path()))
    keeper, lease = cache.lease(cache.match(TOKENS)), cache.lease(cache.match(TOKENS))
    lease.release()
    before = locks(cache)
    with pytest.raises(ProtocolError, match="released already"):
        lease.release()
    with pytest.raises(ProtocolError, match="released already"):
        lease.__enter__()
    assert locks(cache) == before
    keeper.release()


def test_a_with_block_releases_even_when_it_raises_and_even_if_it_released_itself() -> None:
    cache = served(part("path", Path()))
    with pytest.raises(KeyError), cache.lease(cache.match(TOKENS)):
        raise KeyError
    assert cache.stats().components["path"].leased == 0
    with cache.lease(cache.match(TOKENS)) as lease:
        lease.release()
    settle(cache)


def test_a_lease_from_a_stale_plan_covers_what_is_true_now() -> None:
    cache = served(part("path", Path()))
    plan = cache.match(TOKENS)
    cache.evict(8)
    assert plan.stale
    with cache.lease(plan) as lease:
        assert lease.boundary == 20
        cache.evict(256)
        assert cache.peek(TOKENS) == 20
    settle(cache)


def test_a_plan_of_another_cache_is_refused() -> None:
    first, second = path_cache(), path_cache()
    for what in (first.match(TOKENS), None, "plan", 5):
        with pytest.raises(ProtocolError, match="was not made by this cache"):
            second.lease(what)  # type: ignore[arg-type]
    settle(second)


# ---------------------------------------------------------------- hooks


class Widening(Component):
    """Covers some of the first eight positions as well, and says what a release touches."""

    wide: Any = Receipt(positions=((4, 8),), data="mine")
    touch: Any = None
    released: list[Any]

    @hookimpl
    def acquire_component_lock(self, anchor: Any, tier: str) -> Any:
        assert tier == "device"
        return self.wide

    @hookimpl
    def release_component_lock(self, receipt: Any) -> Any:
        self.__dict__.setdefault("released", []).append(receipt)
        return self.touch


@pytest.mark.parametrize("name", [n for n in every_reach() if n != "point"])
def test_a_hook_widens_what_a_lease_covers_and_the_release_undoes_it(name: str) -> None:
    component = part(name, every_reach()[name], kind=Widening)
    cache = served(part("keys", Path()), component)
    serve(cache, [*TOKENS[:8], 99, 99, 99, 99], chunk=8)  # the first eight positions are a node of their own
    before = locks(cache)
    lease = cache.lease(cache.match(TOKENS))
    if (name, 0, 8) in before:
        assert locks(cache)[name, 0, 8] > before[name, 0, 8]
    cache.evict({name: 64})
    assert (name, 0, 8) not in before or (name, 0, 8) in locks(cache)
    lease.release()
    assert not any(count for (_, start, end), count in locks(cache).items() if end > start)
    assert component.released[-1].data == "mine"  # type: ignore[attr-defined]
    settle(cache)


@pytest.mark.parametrize("positions", [((0, 10**6),), ((-5, 3),), ((36, 36),), (), ((4, 2),), ((2, 3), (1, 2))])
def test_positions_outside_of_what_is_held_are_passed_over(positions: Any) -> None:
    component = part("window", Window(10), kind=Widening)
    component.wide = Receipt(positions=positions)  # type: ignore[attr-defined]
    cache = served(component)
    before = locks(cache)
    cache.lease(cache.match(TOKENS)).release()
    assert locks(cache) == before
    settle(cache)


def test_a_hook_can_widen_and_never_narrow() -> None:
    component = part("window", Window(10), kind=Widening)
    component.wide = Receipt(positions=())  # type: ignore[attr-defined]
    cache = served(component)
    with cache.lease(cache.match(TOKENS)):
        cache.evict(256)
        assert cache.peek(TOKENS) == 40


def test_a_lock_hook_beside_a_state_leaves_no_lock_behind() -> None:
    cache = cache_of(part("path", Path(), kind=Widening), part("state", Point()))
    serve(cache, TOKENS, chunk=8)
    assert not any(count for (_, start, end), count in locks(cache).items() if end > start)
    settle(cache)


def test_a_state_whose_own_hook_widens_is_covered_only_until_it_was_copied() -> None:
    cache = cache_of(part("path", Path()), part("state", Point(), kind=Widening))
    with cache.open(TOKENS) as sequence:
        for _ in range(5):
            run(sequence, 8)
            sequence.publish()
        run(sequence, 0)
        assert cache.stats().components["state"].leased == 0
    settle(cache)


@pytest.mark.parametrize(("touch", "first_to_go"), [(Touch(positions=()), 0), (None, 1), (Touch(), 1)])
def test_what_a_release_does_not_touch_is_the_first_to_go(touch: Any, first_to_go: int) -> None:
    component = part("path", Path(), kind=Widening)
    cache = cache_of(component)
    prompts = [[1] * 8, [2] * 8]
    for prompt in reversed(prompts):
        serve(cache, prompt)
    component.touch = touch  # type: ignore[attr-defined]
    cache.lease(cache.match(prompts[0])).release()
    component.touch = None  # type: ignore[attr-defined]
    cache.evict(4)
    assert [held(cache, prompt) for prompt in prompts] == [8 * (i != first_to_go) for i in range(2)]
    settle(cache)


class Late(Component):
    """Fails when it is asked for a lock, so that what others took must be given back."""

    fails = False

    @hookimpl
    def acquire_component_lock(self, anchor: Any) -> None:
        if self.fails:
            raise LookupError("not today")


def test_a_lock_hook_that_raises_half_way_leaves_nothing_locked() -> None:
    late = part("late", Window(10), kind=Late)
    cache = served(part("path", Path()), part("state", Point()), late, part("after", Window(6)))
    before, figures = locks(cache), cache.stats().components
    late.fails = True  # type: ignore[attr-defined]
    for attempt in (lambda: cache.lease(cache.match(TOKENS)), lambda: cache.open(TOKENS)):
        with pytest.raises(PluginError, match="'late': acquire_component_lock raised LookupError"):
            attempt()
        assert locks(cache) == before
        assert cache.stats().components == figures
    settle(cache)
    late.fails = False  # type: ignore[attr-defined]
    assert serve(cache, [*TOKENS, 1]) == 40


@pytest.mark.parametrize("end", ["publish", "close"])
def test_a_lock_hook_that_raises_while_publishing_leaves_a_usable_sequence(end: str) -> None:
    late = part("late", Path(), kind=Late)
    cache = served(late, part("window", Window(10)))
    sequence = cache.open([*TOKENS, *range(100, 120)])
    run(sequence, 20)
    late.fails = True  # type: ignore[attr-defined]
    with pytest.raises(PluginError, match="not today"):
        getattr(sequence, end)()
    late.fails = False  # type: ignore[attr-defined]
    settle(cache)
    if end == "publish":
        assert (sequence.open, sequence.published) == (True, 40)
        sequence.publish()
        sequence.close()
        assert held(cache, [*TOKENS, *range(100, 120)]) == 60
    settle(cache)


@pytest.mark.parametrize("way", ["open", "lease"])
def test_a_reach_that_raises_while_it_is_covered_leaves_nothing_covered(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Moody(Holes):
        raises = False

        def needs(self, n: int) -> tuple[tuple[int, int], ...]:
            if self.raises:
                raise ArithmeticError("not now")
            return super().needs(n)

        def until(self, p: int) -> float:
            if self.raises:
                raise ArithmeticError("not now")
            return 1 << 40

    moody = Moody()
    cache = cache_of(part("path", Path()), part("moody", moody))
    serve(cache, list(range(40)))
    plan = cache.match([*range(24), 99])
    assert plan.ready == 24
    monkeypatch.setattr(paged_reach, "MOST", 0)
    cache.match([*range(16), 99])  # now what the reach said of 24 has to be asked again
    moody.raises = True
    with pytest.raises(PluginError, match="not now"):
        getattr(cache, way)(plan)
    moody.raises = False
    assert cache.stats().components["path"].leased == 0
    settle(cache)
