"""Debug mode tells of each kind of wrong books: every invariant is broken by hand once."""

from __future__ import annotations

from collections.abc import Callable
from struct import pack
from types import SimpleNamespace
from typing import Any

import pytest

from prefixloom import Path, Point, Window
from prefixloom.errors import InvariantError
from prefixloom.testing.inside.backdoor import tier_lane
from prefixloom.tiers.host_lane import HostCell
from prefixloom.tree.partial_lane import PartialCell
from tests.support.helpers import part, path_cache, run
from tests.support.tiers import path_of, serve, tiered

TOKENS = list(range(24))


class Books:
    """A cache with a tier, three nodes one below the other, and a lease on the second."""

    def __init__(self) -> None:
        self.cache = tiered(part("path", Path()), part("window", Window(6)), part("state", Point()), write="through")
        serve(self.cache, TOKENS, chunk=8)
        self.lease = self.cache.lease(self.cache.match(TOKENS[:16]))
        self.first, self.second, self.third = path_of(self.cache, TOKENS)
        self.tree = self.cache.core.index.tree
        self.path, self.window, self.state = self.cache.core.shape.lanes
        self.host_path, self.host_state = tier_lane(self.cache, "path"), tier_lane(self.cache, "state")

    def cell(self, node: Any, lane: Any) -> Any:
        return node.cells[lane.index]

    def stray(self, lane: Any, kind: Any) -> None:
        lane.queue.add(kind(self.first, b"", 0))

    def pin(self, lane: Any) -> None:
        """Lock a cell, and count that in the books, without taking the cell off its queue."""
        self.add(self.cell(self.third, lane), "locks")
        self.add(lane, "leased")

    def lose(self, lane: Any) -> None:
        """Take the cell of the first node as if it were a leaf's."""
        self.lease.release()
        lane.cell_above(self.first).below = 0
        lane.free_victim(self.cell(self.first, lane))

    def add(self, of: Any, name: str, by: Any = 1) -> None:
        setattr(of, name, getattr(of, name) + by)


BROKEN: dict[str, Callable[[Books], Any]] = {
    "does not know its parent": lambda b: setattr(b.third, "parent", b.first),
    "stands under the wrong first page": lambda b: setattr(b.third, "first", b"1234"),
    "has an edge that is no whole pages": lambda b: b.add(b.third, "rest", b"1"),
    "ends at the wrong boundary": lambda b: b.add(b.third, "end", 4),
    "belongs to another node": lambda b: setattr(b.cell(b.third, b.state), "node", b.first),
    "has slot 8, which does not exist": lambda b: setattr(b.cell(b.third, b.state), "data", pack("i", 8)),
    "slot . is owned by .* and by": lambda b: setattr(b.cell(b.third, b.state), "data", b.cell(b.second, b.state).data),
    "has a number for an extra key": lambda b: setattr(b.third, "rest", b.third.rest[:-4] + pack("i", -5)),
    "is bare and was not unlinked": lambda b: b.tree.attach(b.third, pack("4i", 9, 9, 9, 9), 28, 0),
    "4 nodes are counted, and there are 3": lambda b: b.add(b.tree, "nodes"),
    "window: .* has 0 pages of slack": lambda b: setattr(b.cell(b.third, b.window), "slack", SimpleNamespace(pages=3)),
    "1 slots are nobody's": lambda b: b.window.pool.take(1),
    "pages are cached, the books say": lambda b: b.add(b.window, "in_tree"),
    r"state: .* has 1 locks; live leases give 0": lambda b: b.add(b.cell(b.third, b.state), "locks"),
    "path: .* counts 2 cells below, not 1": lambda b: b.add(b.cell(b.first, b.path), "below"),
    "path: .* hangs loose": lambda b: b.lose(b.path),
    "window: .* pages are covered, the books say": lambda b: b.add(b.window, "leased"),
    "state: .* may be evicted but stands in no queue": lambda b: b.state.queue.remove(b.cell(b.third, b.state)),
    "state: .* is covered but stands in the eviction queue": lambda b: b.state.queue.add(b.cell(b.second, b.state)),
    "window: .* miscounts its pages": lambda b: b.add(b.cell(b.third, b.window), "pages"),
    "window: a queue has or remembers a cell that": lambda b: b.stray(b.window, PartialCell),
    "a sequence that has ended is still asked": lambda b: b.window.surplus.update({b: None}),
    "counts 1 leases; 0 are live": lambda b: b.add(b.third, "leases"),
    "path: 6 pages are cached, the books say 7": lambda b: b.add(b.host_path, "in_tree"),
    "host path: a queue has or remembers a cell that": lambda b: b.stray(b.host_path, HostCell),
    "host state: .* miscounts its pages": lambda b: b.add(b.cell(b.third, b.host_state), "pages"),
    "host path: .* counts 1 cells below, not 0": lambda b: b.add(b.cell(b.third, b.host_path), "below"),
    "host state: .* stands in no queue": lambda b: b.host_state.queue.remove(b.cell(b.third, b.host_state)),
    "host state: .* is covered but stands in the eviction queue": lambda b: b.pin(b.host_state),
    "host state: 0 pages are covered, the books say 1": lambda b: b.add(b.host_state, "leased"),
}


def test_debug_mode_tells_of_a_publication_of_what_nobody_computed() -> None:
    cache = path_cache()
    sequence = cache.open(TOKENS)
    sequence.grow(8)
    sequence.running.committed = 8
    with pytest.raises(InvariantError, match="is RESERVED, and was to become PUBLISHED"):
        sequence.publish()


@pytest.mark.parametrize("told", BROKEN)
def test_debug_mode_tells_what_is_wrong_and_after_which_operation(told: str) -> None:
    books = Books()
    books.cache.poll()
    BROKEN[told](books)
    with pytest.raises(InvariantError, match=f"after poll: .*{told}"):
        books.cache.poll()


@pytest.mark.parametrize("verb", ["grow", "append", "commit", "publish", "rewind", "close", "abort"])
def test_debug_mode_looks_after_each_verb_of_a_sequence(verb: str) -> None:
    cache = path_cache()
    sequence = cache.open(TOKENS)
    run(sequence, 8)
    cache.core.index.tree.nodes += 1
    needed: dict[str, list[Any]] = {"grow": [1], "append": [[1]], "rewind": [1]}
    with pytest.raises(InvariantError, match=f"after {verb}: .* nodes are counted"):
        getattr(sequence, verb)(*needed.get(verb, []))
