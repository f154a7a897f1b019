"""No call of the cache does more than it did: counted work (``work.py``), so that no load of the machine matters.

The figures of ``work_table.tsv`` are exact for what does not depend on the interpreter; bytecodes and memory may be a
little above them. What must not grow with the tree, or with what is cached already, is held to be flat.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest

import work
from helpers import PAGE, cache_of, part, serve
from prefixloom import Path, encode
from prefixloom.cache.cache import Cache
from test_hot_path import Watched
from work import CASES, Case, Scene, Work, all_nodes, allocated, executed, lens_alone, looked_at, measure

INTERPRETER, TABLE = work.read_table()
FLAT = [Case("F", False, 16), Case("FSM", False, 16), Case("FSM", True, 16), Case("FSM", False, 1)]
ALLOWED: dict[str, Callable[[int], float]] = {
    "hooks": lambda today: today,
    "nodes": lambda today: today,
    "read": lambda today: today,
    "bytecodes": lambda today: today * 1.03 + 10,
    "blocks": lambda today: today + 16,
    "peak": lambda today: today * 1.15 + 512,
}
"""How much of each figure is allowed, given the table's. Memory depends a little on what the interpreter has."""
OF_THE_INTERPRETER = {"bytecodes", "blocks", "peak"}


# ---------------------------------------------------------------- against the table


@pytest.mark.parametrize("case", CASES, ids=str)
def test_no_operation_does_more_than_the_table_says(case: Case) -> None:
    checked = set(ALLOWED) - (set() if work.version() == INTERPRETER else OF_THE_INTERPRETER)
    more = [
        f"{operation}: {found[figure]} {figure}, at most {ALLOWED[figure](today[figure]):.0f}"
        for operation, found in measure(lambda: Scene(case)).items()
        for today in [TABLE[str(case), operation]]
        for figure in sorted(checked)
        if found[figure] > ALLOWED[figure](today[figure])
    ]
    assert not more, f"more work in {case} than before (python tests/work.py --renew, if for a reason): {more}"


def test_the_table_has_every_operation_of_every_case() -> None:
    assert set(TABLE) == {(str(case), operation) for case in CASES for operation in work.OPERATIONS}


# ---------------------------------------------------------------- flat


def same(few: dict[str, Work], many: dict[str, Work]) -> list[str]:
    """Where the second does more: the bytecodes of a step or two of a loop are let go."""
    return [
        f"{name}: {work} instead of {few[name]}"
        for name, work in many.items()
        if work["bytecodes"] > few[name]["bytecodes"] * 1.01 + 10
        or work["nodes"] > few[name]["nodes"]
        or work["read"] > few[name]["read"]
    ]


@pytest.mark.parametrize("case", FLAT, ids=str)
def test_no_operation_depends_on_how_many_leaves_the_tree_has(case: Case) -> None:
    few, many = (measure(lambda n=n: Scene(case, leaves=n), (executed, looked_at)) for n in (32, 512))  # type: ignore[misc]
    assert not same(few, many)


@pytest.mark.parametrize("case", FLAT, ids=str)
def test_a_chunk_costs_the_same_however_much_is_cached_before_it(case: Case) -> None:
    assert not same(chunk_after(case, 1024), chunk_after(case, 16384))


def chunk_after(case: Case, cached: int) -> dict[str, Work]:
    found: Work = {}
    for lens in (executed, looked_at):
        scene = Scene(case, leaves=2, cached=cached + 1024, pieces=cached // 256 + 4)
        scene.cache.flush()
        with scene.cache.open(scene.text(cached + 1024)) as sequence:
            while sequence.reserved < cached:
                scene.chunk(sequence, 256)
            found |= lens_alone(lens, scene, lambda: scene.chunk(sequence, 256))  # noqa: B023  # called at once
    return {"chunk": found}


@pytest.mark.parametrize("case", FLAT, ids=str)
def test_a_long_prefix_in_one_node_is_compared_once_and_costs_no_more_than_a_short_one(case: Case) -> None:
    # Not so eviction: of a window it first takes, in one go, what of a long prefix no boundary needs.
    short, long = (
        measure(lambda n=n: Scene(case, leaves=32, cached=n, pieces=1), (executed, looked_at))  # type: ignore[misc]
        for n in (1024, 16384)
    )
    for name in ("match hot", "open"):
        assert long[name]["bytecodes"] <= short[name]["bytecodes"] + 10, name
        assert long[name]["nodes"] == short[name]["nodes"], name
        looked_up = 4 * case.page  # the first page below the root; what follows is an only child
        assert (short[name]["read"], long[name]["read"]) == (4 * 1024 - looked_up, 4 * 16384 - looked_up), name
    rest = [name for name in work.OPERATIONS if name not in ("match hot", "open", "evict", "evict ten")]
    assert not same({name: short[name] for name in rest}, {name: long[name] for name in rest})


@pytest.mark.parametrize("case", FLAT, ids=str)
def test_a_match_costs_the_same_for_every_further_node(case: Case) -> None:
    def hot(pieces: int) -> Work:
        found: Work = {}
        for lens in (executed, looked_at):
            scene = Scene(case, leaves=2, cached=4096, pieces=pieces)
            found |= lens_alone(lens, scene, lambda: scene.cache.match(scene.asked))  # noqa: B023  # called at once
        return found

    few, more, most = (hot(pieces) for pieces in (4, 8, 16))
    assert (more["nodes"] - few["nodes"], most["nodes"] - more["nodes"]) == (4, 8)
    looked_up = 4 * case.page  # the first page below the root; the others are only children
    assert [found["read"] for found in (few, more, most)] == 3 * [4 * 4096 - looked_up]
    assert 2 * (more["bytecodes"] - few["bytecodes"]) == most["bytecodes"] - more["bytecodes"]
    assert (more["bytecodes"] - few["bytecodes"]) / 4 <= 60


@pytest.mark.parametrize("case", FLAT, ids=str)
def test_eviction_costs_the_same_for_every_further_leaf(case: Case) -> None:
    def evicting(leaves: int) -> Work:
        found: Work = {}
        for lens in (executed, looked_at):
            scene = Scene(case, leaves=64)
            scene.cache.evict(640)  # and with it what windows keep of the long conversation for no boundary
            found |= lens_alone(lens, scene, lambda: scene.cache.evict(64 * leaves))  # noqa: B023  # called at once
        return found

    ten, twenty, forty = (evicting(leaves) for leaves in (10, 20, 40))
    assert (twenty["nodes"] - ten["nodes"], forty["nodes"] - twenty["nodes"]) == (10, 20)
    assert twenty["read"] == forty["read"] == 0
    first, then = twenty["bytecodes"] - ten["bytecodes"], forty["bytecodes"] - twenty["bytecodes"]
    assert then <= 2 * first * 1.02


# ---------------------------------------------------------------- garbage


@pytest.mark.parametrize("case", [case for case in CASES if case.page == 16], ids=str)
def test_requests_under_eviction_leave_nothing_to_the_collector(case: Case) -> None:
    scene = Scene(case, leaves=16)
    scene.fill()

    def requests() -> None:
        for _ in range(10):
            scene.strange = encode(scene.text(128))
            scene.turn()
            scene.cache.evict(64)

    gc.collect()
    gc.disable()
    try:
        requests()
        assert gc.collect() == 0
    finally:
        gc.enable()
    assert scene.cache.stats().components["full"].evicted


# ---------------------------------------------------------------- the lenses see


@pytest.fixture
def scene() -> Scene:
    return Scene(Case("F", False, 16), leaves=4)


def test_one_more_walk_is_seen_in_bytecodes(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    once = lens_alone(executed, scene, lambda: scene.cache.match(scene.asked))
    plain = type(scene.cache._tree).walk

    def twice(*args: Any) -> Any:
        plain(*args)
        return plain(*args)

    monkeypatch.setattr(type(scene.cache._tree), "walk", twice)
    later = Scene(Case("F", False, 16), leaves=4)  # what is made for it has that walk
    more = lens_alone(executed, later, lambda: later.cache.match(later.asked))
    assert more["bytecodes"] > ALLOWED["bytecodes"](once["bytecodes"])


def test_each_node_that_is_touched_is_seen_and_each_key_that_is_read(scene: Scene) -> None:
    nodes = all_nodes(scene)
    found = lens_alone(looked_at, scene, lambda: [node.rest for node in nodes])
    assert found == {"nodes": len(nodes), "read": sum(len(node.rest) for node in nodes)}
    assert lens_alone(looked_at, scene, lambda: None) == {"nodes": 0, "read": 0}


def test_what_is_kept_and_what_is_only_used_is_seen(scene: Scene) -> None:
    kept: list[object] = []
    assert lens_alone(allocated, scene, lambda: kept.extend([object() for _ in range(100)]))["blocks"] >= 100
    assert lens_alone(allocated, scene, lambda: bytes(1 << 16))["peak"] >= 1 << 16
    assert lens_alone(allocated, scene, lambda: None)["blocks"] <= 1


def test_a_hook_is_seen() -> None:
    cache: Cache = cache_of(part("it", Path(), kind=Watched), debug=False)
    serve(cache, range(8 * PAGE))
    found = executed(Scene(Case("F", False, 16), leaves=1), lambda: cache.match(range(8 * PAGE)))
    assert found["hooks"] == 1  # finalize_match_result; the validator itself has no name of a hook
