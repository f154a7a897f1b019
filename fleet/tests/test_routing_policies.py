"""Routing policies: the rule of each, against views of replicas that are written down here."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import attrs
import pytest

from prefixloom import InputError
from prefixloom_fleet.routing import POLICIES, RoutingPolicy, RoutingRequest, find_policy
from prefixloom_fleet.routing.lately_sent import LATELY, LatelySent, marks

PAGE = 16


@attrs.define(eq=False)
class View:
    """A replica as a test says it is."""

    name: str
    tokens_ahead: int = 0
    running: int = 0
    pages: int = 0
    boundary: int = 0
    free: Mapping[str, float] = attrs.field(factory=dict)
    needed: Mapping[str, float] = attrs.field(factory=dict)

    def needs(self, request: RoutingRequest) -> Mapping[str, float]:
        return self.needed

    def matched(self, request: RoutingRequest) -> int:
        return self.pages

    def resumable(self, request: RoutingRequest) -> int:
        return self.boundary


def asked(count: int, *, seed: int = 0, common: int = 0, session: str = "") -> RoutingRequest:
    """A prompt of ``count`` tokens, of which the first ``common`` are those of all prompts."""
    own = random.Random(f"{seed} {count}")
    links = [page if page < common // PAGE else own.getrandbits(60) for page in range(count // PAGE)]
    return RoutingRequest(None, count, 10, "", session, links, PAGE)


def sent_to(policy: RoutingPolicy, request: RoutingRequest, views: Sequence[View]) -> str:
    ordered = policy.order(request, views)
    assert sorted(each.name for each in ordered) == sorted(each.name for each in views)
    return ordered[0].name


@pytest.mark.parametrize("name", POLICIES)
def test_equal_replicas_are_taken_in_turns_and_one_that_joins_is_next(name: str) -> None:
    policy = find_policy(name)
    views = [View("a"), View("b"), View("c")]
    assert [sent_to(policy, asked(1600, seed=n), views) for n in range(6)] == [*"abcabc"]
    views.append(View("d"))
    assert [sent_to(policy, asked(1600, seed=n), views) for n in range(6, 11)] == [*"dabcd"]
    assert list(policy.order(asked(1600), [])) == []


def test_an_unknown_policy_is_refused_with_the_names_that_there_are() -> None:
    with pytest.raises(InputError, match=r"round-robin, least-loaded, prefix, resumable, decode-room; got 'best'"):
        find_policy("best")


LONG = 10_000
THREE = {"full": 0.1, "swa": 0.02, "mamba": 0.1}


def halved(need: float) -> list[View]:
    """Two replicas, of which the pools of "a" are half as large, so that a request takes twice as much of them."""
    return [
        View("a", free={"full": 0.9, "swa": 0.9}, needed={"full": 2 * need, "swa": 0.0}),
        View("b", free={"full": 0.8, "swa": 0.8}, needed={"full": need, "swa": 0.0}),
    ]


def cached_at(name: str, boundary: int, free: float) -> View:
    return View(name, free={"kv": free}, boundary=boundary)


@pytest.mark.parametrize(
    ("policy", "count", "views", "expected"),
    [
        ("least-loaded", 160, [View("a", 500, 1), View("b", 400, 9), View("c", 400, 2)], "c"),
        # too little matches, enough, not yet out of balance, out of balance
        ("prefix", 1000, [View("a", pages=299), View("b", tokens_ahead=10**6)], "b"),
        ("prefix", 1000, [View("a", pages=301), View("b", tokens_ahead=10**6)], "a"),
        ("prefix", 1000, [View("a", running=64, pages=301), View("b", tokens_ahead=10**6)], "a"),
        ("prefix", 1000, [View("a", running=65, pages=301), View("b", tokens_ahead=10**6)], "b"),
        # balanced while the busiest has not half as many again
        ("prefix", 1000, [View("a", running=300, pages=900), View("b", running=201)], "a"),
        ("prefix", 1000, [View("a", running=300, pages=900), View("b", running=199)], "b"),
        # pages without a boundary
        ("prefix", LONG, [View("a", pages=9000), View("b", pages=4000, boundary=4000)], "a"),
        ("resumable", LONG, [View("a", pages=9000), View("b", pages=4000, boundary=4000)], "b"),
        # a second copy of a hot prefix when its queue costs more: what is computed again counts twelve times
        ("resumable", 12_000, [View("a", tokens_ahead=119_000, boundary=LONG), View("b")], "a"),
        ("resumable", 12_000, [View("a", tokens_ahead=121_000, boundary=LONG), View("b")], "b"),
        # a short beginning that all prompts have, and a beginning that is most of a prompt
        ("resumable", 4096, [View("a", boundary=512), View("b")], "b"),
        ("resumable", 1024, [View("a", boundary=512), View("b")], "a"),
        # every component is asked, and not their sum
        ("decode-room", 1000, [View("a", free={"full": 1.0, "swa": 1.0, "mamba": 0.15}, needed=THREE),
                               View("b", free={"full": 0.4, "swa": 0.4, "mamba": 0.4}, needed=THREE)], "b"),
        ("decode-room", 1000, halved(0.05), "a"),
        ("decode-room", 1000, halved(0.3), "b"),
        # fewer run where the room is the same
        ("decode-room", 1000, [View("a", running=3, free={"kv": 0.5}), View("b", running=2, free={"kv": 0.495})], "b"),
        ("decode-room", 1000, [View("a", running=3, free={"kv": 0.5}), View("b", running=2, free={"kv": 0.48})], "a"),
        # what is cached counts for a little room
        ("decode-room", 1000, [cached_at("a", 1000, 0.42), cached_at("b", 0, 0.5)], "a"),
        ("decode-room", 1000, [cached_at("a", 1000, 0.38), cached_at("b", 0, 0.5)], "b"),
        ("decode-room", 1000, [cached_at("a", 500, 0.5), cached_at("b", 900, 0.5)], "b"),
        # who has told nothing is empty
        ("decode-room", 1000, [View("a", free={"kv": 0.9}, needed={"kv": 0.1}), View("b", needed={"kv": 0.1})], "b"),
        ("decode-room", 0, [View("a"), View("b")], "a"),
    ],
)  # fmt: skip
def test_a_policy_goes_to_the_replica_that_its_rule_names(
    policy: str, count: int, views: list[View], expected: str
) -> None:
    made = find_policy(policy)
    if expected == "b" or policy == "prefix":
        sent_to(made, asked(160), [View("a")])  # so that "b" is next in turn
    assert sent_to(made, asked(count, seed=1), views) == expected


def test_two_requests_of_one_new_prefix_go_to_one_replica_unless_it_is_overloaded() -> None:
    for ahead, expected in ((6_000, "a"), (60_000, "b")):
        for name in ("resumable", "prefix"):
            policy = find_policy(name)
            views = [View("a"), View("b")]
            assert sent_to(policy, asked(4800, seed=1, common=3200), views) == "a"
            views[0].tokens_ahead, views[0].running = ahead, ahead // 500
            assert sent_to(policy, asked(4800, seed=2, common=3200), views) == expected


def test_a_session_stays_where_it_was_if_that_costs_little() -> None:
    for ahead, expected in ((2000, "a"), (3000, "b")):
        policy = find_policy("resumable")
        assert sent_to(policy, asked(800, session="s"), [View("a")]) == "a"
        views = [View("b"), View("a", tokens_ahead=ahead)]
        assert sent_to(policy, asked(1600, seed=1, session="s"), views) == expected
        assert sent_to(policy, asked(1600, seed=2, session="other"), views) == "b"


def test_what_was_sent_lately_is_the_longest_common_beginning_of_those_requests() -> None:
    """Against a plain list of what was sent, with random trees of prompts and replicas that are busy or not."""
    for seed in range(12):
        chance = random.Random(seed)
        always = bool(seed % 2)
        lately = LatelySent(always=always)
        views = [View(name, running=chance.randrange(4)) for name in "abc"]
        log: dict[str, list[Sequence[int]]] = {each.name: [] for each in views}
        talks: list[list[int]] = [[]]
        for _ in range(120):
            talk = [*chance.choice(talks), *(chance.getrandbits(60) for _ in range(chance.randrange(1, 90)))]
            talk = talk[:400]
            talks.append(talk)
            request = RoutingRequest(None, PAGE * len(talk), links=talk, unit=PAGE)
            expected = {}
            for name, sent in log.items():
                depths = [_common(talk, each) for each in sent]
                if found := max(depths, default=0):
                    expected[name] = PAGE * found
            assert lately.depths(request) == expected
            view = chance.choice(views)
            lately.add(request, view)
            log[view.name].append(talk)
            if not always:
                del log[view.name][: -(view.running + 1 + LATELY)]
        held = sum(len(list(marks(len(each)))) for sent in log.values() for each in sent)
        assert len(lately) == held


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """The pages of the deepest mark that two prompts have in common."""
    same = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return max((at + 1 for at in marks(same)), default=0)


def test_what_is_remembered_of_what_was_sent_is_bounded() -> None:
    lately = LatelySent(always=True, most=500)
    for number in range(200):
        lately.add(asked(1600, seed=number), View("ab"[number % 2]))
    assert 400 < len(lately) <= 500
    assert lately.depths(asked(1600, seed=0)) == {}
    assert lately.depths(asked(1600, seed=199)) == {"b": 1584}  # of the last pages, every other one


def test_decode_room_against_its_rule_written_out() -> None:
    """Any replicas: whoever is first has, within 1/64, the greatest least room, and of those the fewest requests."""
    for seed in range(100):
        chance = random.Random(seed)
        policy = find_policy("decode-room")
        names = ["full", "swa", "mamba"][: chance.randrange(1, 4)]
        for _ in range(10):
            request = asked(chance.randrange(1, 5000), seed=chance.randrange(9))
            views = [
                View(
                    name, running=chance.randrange(4), boundary=chance.choice([0, 0, 160, 4000, 8000]),
                    free={each: chance.choice([1.0, 0.5, round(chance.random(), 2)]) for each in names},
                    needed={each: round(chance.random() / 3, 2) for each in names},
                )
                for name in "abcde"[: chance.randrange(1, 6)]
            ]  # fmt: skip
            sums = {}
            for view in views:
                least = 2.0
                for each in names:
                    least = min(least, view.free[each] - view.needed[each])
                sums[view.name] = least + 0.1 * min(view.boundary, request.count) / request.count
            best = [view for view in views if sums[view.name] >= max(sums.values()) - 1 / 64]
            first = sent_to(policy, request, views)
            assert first in {view.name for view in best}
            assert next(view for view in best if view.name == first).running == min(view.running for view in best)
