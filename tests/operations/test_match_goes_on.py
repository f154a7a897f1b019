"""Whether cached keys go on where a prompt leaves them, beside what the contents say."""

from __future__ import annotations

import random

import pytest

from prefixloom import Path, Point
from tests.support.helpers import PAGE, cache_of, part, serve


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("seed", range(8))
def test_keys_go_on_where_something_longer_that_begins_alike_is_cached(seed: int, lookahead: int) -> None:
    rng = random.Random(seed)
    cache = cache_of(part("full", Path(), lookahead=lookahead), part("state", Point(), lookahead=lookahead))
    answers, served = set(), [[0]]

    def prompt() -> list[int]:
        return [rng.randrange(2) for _ in range(rng.randrange(1, 5 * PAGE))]

    for _ in range(40):
        if rng.random() < 0.3:
            cache.evict({rng.choice(("full", "state")): rng.randrange(1, 6)})
        else:
            served.append(prompt())
            serve(cache, served[-1])
        asked = rng.choice(([], rng.choice(served))) + prompt()
        plan = cache.match(asked)
        least = plan.walked + PAGE + lookahead
        paths = [change.tokens.tolist() for change in cache.contents()]
        longer = [path for path in paths if len(path) >= least]
        expected = any(path[: plan.walked + lookahead] == asked[: plan.walked + lookahead] for path in longer)
        if not plan.walked:
            expected = bool(paths)
        assert plan.goes_on is expected, (asked, plan.walked, paths)
        answers.add((plan.goes_on, bool(plan.walked)))
    assert {(True, True), (False, True)} <= answers


def test_in_a_namespace_that_has_nothing_no_key_goes_on() -> None:
    cache = cache_of(part("full", Path()))
    serve(cache, range(12))
    assert cache.match(range(8)).goes_on
    assert not cache.match(range(12)).goes_on
    assert not cache.match(range(8), namespace="other").goes_on
