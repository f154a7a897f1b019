"""What was used last goes last, whichever way it was used: eviction is compared with a list."""

from __future__ import annotations

import random
from typing import Any

import pytest

from prefixloom import Claim, Component, Path, Point, Window, hookimpl
from tests.support.helpers import cache_of, part, serve

DOCUMENTS = [[number] * 8 for number in range(7)]


class Observing(Component):
    """It asks to be told of publications and evictions, and leaves them as they are."""

    @hookimpl
    def commit_insert(self, walk: Any) -> None: ...

    @hookimpl
    def evict_component(self, node: Any, tier: str) -> Claim:
        return Claim(keep=())


def used(cache: Any, tokens: list[int], how: int) -> None:
    """Use a document that is cached, in one of the ways in which it can be used."""
    if how == 0:  # hit, and go on with another token
        serve(cache, [*tokens, 50])
    elif how == 1:  # compute it again: the tree has it meanwhile
        serve(cache, tokens, leave=len(tokens))
    elif how == 2:  # compute it again, and publish before the end
        serve(cache, tokens, leave=len(tokens), chunk=4)
    else:
        with cache.lease(cache.match(tokens)):
            pass


@pytest.mark.parametrize("kind", [Component, Observing])
@pytest.mark.parametrize("reach", [Path(), Window(20), Point()], ids=repr)
@pytest.mark.parametrize("seed", range(6))
def test_the_least_recently_used_goes_first(seed: int, reach: Any, kind: type[Component]) -> None:
    """Documents of one leaf each, so that no leaf hides another."""
    rng = random.Random(seed)
    mine = part("mine", reach, kind=kind)
    cache = cache_of(mine, slots=24) if isinstance(reach, Path) else cache_of(part("keys", Path()), mine, slots=24)
    order = list(range(len(DOCUMENTS)))
    for number in order:
        serve(cache, DOCUMENTS[number])
    for _ in range(rng.randrange(12)):
        number = rng.choice(order)
        used(cache, DOCUMENTS[number], rng.randrange(4))
        order.remove(number)
        order.append(number)
    while order:
        for _ in range(4):  # a document that was split goes in parts
            cache.evict({"mine": 1})
            whole = [number for number in order if cache.peek(DOCUMENTS[number]) == 8]
            if whole != order:
                break
        assert whole == order[1:], f"{order[0]} was used before {order[1:]}"
        order = whole
