"""What is announced: pages that lead to where a request can resume, what each component keeps, and by which names."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from prefixloom import (
    Buffer,
    Cache,
    Component,
    Manifest,
    Path,
    Point,
    Sinks,
    Window,
    compose,
)  # fmt: skip
from prefixloom_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    Mirror,
    PageLabel,
    RebuiltCache,
    decode_batch,
    encode_batch,
    salt_digest,
)
from prefixloom_resumable import Run
from prefixloom_resumable.boundaries import Boundaries
from tests.support.tiers import Requests, serve, tiered

CONTENT = [Buffer("content", (), "int64")]


def full(**facts: Any) -> Component:
    return Component("full", Manifest(CONTENT, **facts), Path())


def near(width: int = 5, **facts: Any) -> Component:
    return Component("near", Manifest(CONTENT, **facts), Window(width))


def state(**facts: Any) -> Component:
    return Component("state", Manifest(CONTENT, **facts), Point())


class Followed:
    """A cache, the events of it, and what a subscriber makes of them."""

    def __init__(self, *parts: Component, components: bool = True, **options: Any) -> None:
        options.setdefault("capacity", {part.name: 16 if part.name == "state" else 256 for part in parts})
        self.cache: Cache = compose(None, plugins=list(parts), page_size=4, debug=True, **options)
        self.journal = self.cache.journal()
        self.mirror = Mirror(self.cache.composition, lambda name: PageLabel(name or None), components)
        self.rebuilt = RebuiltCache()

    def events(self) -> list[Any]:
        """The events since the last call, as they come off the wire."""
        batch = decode_batch(encode_batch(EventBatch(0.0, self.mirror.apply(self.journal.take()), None)))
        self.rebuilt.apply(batch.events)
        assert self.rebuilt.faults == []
        return batch.events

    def run(self, tokens: Any, *stops: int, namespace: str = "", extra: Any = ()) -> None:
        """Compute a prompt in chunks that end at ``stops``, each of which is published."""
        with self.cache.open(tokens, namespace=namespace, extra=extra) as sequence:
            for stop in (*stops, len(tokens)):
                sequence.grow(stop - sequence.reserved)
                with self.cache.step([sequence]) as step:
                    step.run_ops()
                sequence.publish()

    def pages(self, tokens: Any, **named: Any) -> int:
        self.events()
        return self.rebuilt.pages(tokens, **named)


def stored(events: list[Any], group: int = 0) -> list[BlockStored]:
    return [event for event in events if isinstance(event, BlockStored) and event.group_idx == group]


def test_pages_of_plain_attention_are_announced_as_they_are_published() -> None:
    seen = Followed(full())
    seen.run(range(11))
    first, *others = seen.events()
    assert first == AllBlocksCleared()
    (event,) = stored(others)
    assert event.token_ids == list(range(8)) and event.block_size == 4 and len(event.block_hashes) == 2
    assert (event.parent_block_hash, event.medium, event.kv_cache_spec_kind) == (None, "GPU", "full_attention")
    seen.run(range(16))
    (event,) = stored(seen.events())
    assert event.parent_block_hash == first_hash(range(8), 2) and event.token_ids == list(range(8, 16))


def first_hash(tokens: Any, pages: int, salt: str | None = None) -> int:
    """The hash of the last of so many pages, by the rule of the documentation, from scratch."""
    root = json.dumps([json.dumps([salt, None]), 4, 0]).encode()
    digest = hashlib.blake2b(root, digest_size=32, person=b"loom.namespace").digest()
    tokens = list(tokens)
    for page in range(pages):
        words = b"".join(token.to_bytes(4, "little") for token in tokens[page * 4 : page * 4 + 4])
        digest = hashlib.blake2b(digest + words, digest_size=32, person=b"loom.page").digest()
    return int.from_bytes(digest[:8], "big")


def test_a_page_of_a_hybrid_is_announced_only_while_a_resumable_boundary_lies_at_or_below_it() -> None:
    seen = Followed(full(), state())
    seen.run(range(22), 8, 12)  # states at 8 and 12; 16 and 20 have pages alone
    assert seen.pages(range(22)) == seen.cache.peek(range(22)) == 12
    assert seen.rebuilt.pages(range(22), group=1) == 20, "full attention has more"
    with seen.cache.open(range(12)):  # the state at 12 stays
        seen.cache.evict({"state": 1})
    assert seen.pages(range(22)) == 12, "12 lies below 8"
    seen.cache.evict({"state": 1})
    assert seen.cache.peek(range(22)) == seen.pages(range(22)) == 0
    (event,) = [each for each in seen.mirror.snapshot() if isinstance(each, BlockStored)]
    assert event.component == "full", "what nobody can resume from is announced of its component alone"


def test_a_page_is_announced_while_any_branch_below_it_can_be_resumed() -> None:
    seen = Followed(full(), state())
    one, other = [*range(8), 50, 51, 52, 53], [*range(8), 60, 61, 62, 63]
    seen.run(one, 12)
    seen.run(other, 12)
    assert seen.pages(one) == seen.pages(other) == 12
    with seen.cache.open(one):
        seen.cache.evict({"state": 9})
    assert seen.cache.peek(other) == 0
    assert seen.pages(other) == 8, "a router that knows pages alone promises the part that leads to the other branch"
    assert seen.rebuilt.boundary(other) == 0, "the boundaries say it"
    assert seen.pages(one) == seen.rebuilt.boundary(one) == seen.cache.peek(one) == 12


def test_boundaries_are_announced_beside_the_pages_and_components_only_if_wanted() -> None:
    seen, plain = Followed(full(), state()), Followed(full(), state(), components=False)
    for each in (seen, plain):
        each.run(range(16), 8)
    last = stored(seen.events(), group=3)
    assert [(event.boundaries, event.token_ids, event.component) for event in last] == [(True, [], None)]
    assert last[0].block_hashes == [first_hash(range(16), 2), first_hash(range(16), 4)]
    assert {event.group_idx for event in plain.events() if isinstance(event, BlockStored)} == {0}
    plain.cache.evict({"full": 64})
    (event,) = plain.events()
    assert isinstance(event, BlockRemoved) and len(event.block_hashes) == 4


def test_each_run_of_pages_is_judged_once_however_many_above_it_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Followed(Component("near", Manifest(CONTENT), Sinks(2) | Window(9)), capacity={"near": 1024})
    for branch in range(1, 40):  # each leaves the path at another page
        seen.run([*range(4 * branch), *[999] * 4])
    judgements, judge = [], Boundaries.judge

    def counted(self: Boundaries, run: Run, since: int) -> None:
        judgements.append(run)
        judge(self, run, since)

    monkeypatch.setattr(Boundaries, "judge", counted)
    seen.events()
    assert 39 * 2 - 1 <= len(judgements) <= 2 * len(set(judgements))


def test_blocks_are_removed_from_the_leaves_up_and_stored_from_the_root_down() -> None:
    seen = Followed(full())
    seen.run(range(16))
    hashes = [first_hash(range(16), count) for count in (1, 2, 3, 4)]
    (event,) = stored(seen.events())
    assert event.block_hashes == hashes
    seen.cache.evict({"full": 64})
    gone = [event.block_hashes for event in seen.events() if isinstance(event, BlockRemoved) and not event.group_idx]
    assert gone == [hashes[::-1]]


def test_nothing_of_two_namespaces_has_the_same_name() -> None:
    seen = Followed(full())
    seen.run(range(8))
    seen.run(range(8), namespace="tenant")
    plain, other = stored(seen.events())
    assert (plain.cache_salt, other.cache_salt) == (None, salt_digest(PageLabel("tenant")))
    assert b"tenant" not in encode_batch(EventBatch(0.0, [other], 0)), "a salt is a secret"
    assert not set(plain.block_hashes) & set(other.block_hashes)
    assert other.block_hashes[1] == first_hash(range(8), 2, "tenant")
    assert seen.rebuilt.pages(range(8), salt="tenant") == 8 and seen.rebuilt.pages(range(8), salt="another") == 0
    seen.cache.drop_namespace("tenant")
    assert seen.pages(range(8)) == 8 and seen.rebuilt.pages(range(8), salt="tenant") == 0


def test_images_are_in_the_hashes_and_in_the_extra_keys() -> None:
    seen = Followed(full())
    image = [(2, 6, "an image")]
    seen.run(range(12), extra=image)
    (event,) = stored(seen.events())
    assert event.extra_keys == [[["an image", 2]], [["an image", 0]], None]
    assert event.token_ids == list(range(12))
    for keys, right in (
        (image, 12),
        ([], 0),
        ([(2, 6, "another")], 0),
        ([(1, 6, "an image")], 0),
        ([(2, 5, "an image")], 4),
    ):
        assert seen.rebuilt.pages(range(12), extra=keys) == seen.cache.peek(range(12), extra=keys) == right, keys


def test_any_key_and_any_salt_can_be_announced() -> None:
    half = "\ud800"  # of a surrogate pair: no text in UTF-8 has it
    seen = Followed(full())
    keys = [half, (half,), 1 << 70, 10**5000, -(1 << 63) - 1, (10**5000,), b"\xff", True, None]
    for key in keys:
        seen.run(range(8), extra=[(0, 2, key)])
    seen.run(range(8), namespace=half)
    *of_keys, of_salt = stored(seen.events())
    assert len({repr(event.extra_keys) for event in of_keys}) == len(keys)
    assert of_salt.cache_salt and seen.rebuilt.boundary(range(8), salt=half) == 8
    assert all(seen.rebuilt.boundary(range(8), extra=[(0, 2, key)]) == 8 for key in keys)


def test_a_lookahead_is_announced_with_the_tokens_that_it_looks_at() -> None:
    seen = Followed(full(lookahead=1))
    seen.run(range(9))
    (event,) = stored(seen.events())
    assert event.lookahead_token_ids == [[4], [8]] and event.token_ids == list(range(8))
    for prompt in (range(9), [*range(8), 99], range(8), [0, 1, 2, 3, 4]):
        assert seen.rebuilt.pages(prompt) == seen.cache.peek(prompt)


def test_components_with_smaller_pages_are_announced_in_these() -> None:
    seen = Followed(full(page_size=4), near(3, page_size=2), state(grid=8))
    seen.run(range(16), 8)
    events = seen.events()
    assert [len(event.block_hashes) for event in stored(events)] == [2], "pages of the tree have 8 tokens"
    assert sum(len(event.block_hashes) for event in stored(events, group=1)) == 4
    assert sum(len(event.block_hashes) for event in stored(events, group=2)) == 8
    assert {event.block_size for event in stored(events, group=2)} == {2}
    (smaller,) = stored(events, group=2)
    assert smaller.token_ids == list(range(16)) and smaller.parent_block_hash is None
    seen.run(range(32))
    (behind,) = stored(seen.events(), group=2)
    assert behind.token_ids == list(range(16, 32)) and behind.parent_block_hash == smaller.block_hashes[-1]
    assert [seen.rebuilt.pages(range(32), group=group) for group in (0, 1, 2)] == [32, 32, 32]
    seen.cache.evict({"near": 1})
    seen.events()
    assert [seen.rebuilt.pages(range(32), group=group) for group in (0, 1, 2)] == [32, 32, 0], "its first page has gone"


def test_a_flush_is_announced_as_cleared() -> None:
    seen = Followed(full(), state())
    seen.run(range(8))
    seen.events()
    seen.cache.flush()
    assert seen.events() == [AllBlocksCleared()]
    assert seen.mirror.pages == 0
    seen.run(range(8))
    assert seen.pages(range(8)) == seen.cache.peek(range(8)) == 8


def test_the_group_of_a_component_has_no_kind_that_routers_count() -> None:
    """Dynamo's indexer counts blocks of these kinds, and of no kind in group 0."""
    seen = Followed(full(), near(), state())
    seen.run(range(16))
    kinds = {event.group_idx: event.kv_cache_spec_kind for event in seen.events() if isinstance(event, BlockStored)}
    assert kinds == {0: "full_attention", 1: None, 2: "sliding_window", 3: "mamba", 4: None}


@pytest.mark.parametrize("write", ["through", "back", "selective"])
@pytest.mark.parametrize("names", [("path", "window", "point"), ("path", "holes")])
def test_what_is_announced_of_two_tiers_is_what_matches_say(names: tuple[str, ...], write: str) -> None:
    from tests.tiers.test_tier import parts

    requests = Requests((names, write, "events"))
    host = {name: 9 if name == "point" else 200 for name in names}
    cache = tiered(*parts(names), page=4, tokens=96, slots=7, write=write, hits=1, host=host)
    mirror, rebuilt, journal = (
        Mirror(cache.composition, lambda name: PageLabel(name or None)),
        RebuiltCache(),
        cache.journal(),
    )
    asked = [requests.next() for _ in range(36)]
    below = 0
    for tokens in asked:
        serve(cache, tokens)
        rebuilt.apply(mirror.apply(journal.take()))
        assert rebuilt.faults == []
        for other in asked:
            plan = cache.match(other)
            assert rebuilt.boundary(other) == plan.ready
            assert rebuilt.boundary(other, medium="CPU") == plan.restorable
            below += plan.restorable > plan.ready
    assert below
