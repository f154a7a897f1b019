"""Routing policies: the rule of each, against views of replicas that are written down here."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import attrs
import pytest

from prefixloom import InputError
from prefixloom_fleet.routing import POLICIES, RoutingPolicy, RoutingRequest, find_policy
from prefixloom_fleet.routing.sent import LATELY, LatelySent, marks

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
    with pytest.raises(InputError, match=r"round-robin, least-loaded, prefix, resumable; got 'best'"):
        find_policy("best")


def test_least_loaded_counts_tokens_first_and_requests_of_equal_ones() -> None:
    views = [View("a", 500, 1), View("b", 400, 9), View("c", 400, 2)]
    assert [each.name for each in find_policy("least-loaded").order(asked(160), views)] == [*"cba"]


@pytest.mark.parametrize(
    ("matched", "running", "expected"),
    [
        (299, 0, "b"),  # too little matches
        (301, 0, "a"),
        (301, 64, "a"),  # not yet out of balance
        (301, 65, "b"),
    ],
)
def test_prefix_affinity_goes_to_the_match_if_it_is_long_enough_and_not_too_busy(
    matched: int, running: int, expected: str
) -> None:
    policy = find_policy("prefix")
    sent_to(policy, asked(160), [View("a")])  # so that "b" is next in turn
    views = [View("a", running=running, pages=matched), View("b", tokens_ahead=10**6)]
    assert sent_to(policy, asked(1000, seed=1), views) == expected


def test_prefix_affinity_is_balanced_while_the_busiest_has_not_half_as_many_again() -> None:
    views = [View("a", running=300, pages=900), View("b", running=201)]
    assert sent_to(find_policy("prefix"), asked(1000), views) == "a"
    views[1].running = 199
    assert sent_to(find_policy("prefix"), asked(1000), views) == "b"


def test_pages_without_a_boundary_draw_prefix_affinity_and_not_resumable_boundary() -> None:
    views = [View("a", pages=9000, boundary=0), View("b", pages=4000, boundary=4000)]
    assert sent_to(find_policy("prefix"), asked(10000), views) == "a"
    assert sent_to(find_policy("resumable"), asked(10000), views) == "b"


def test_a_hot_prefix_gets_a_second_copy_when_its_queue_costs_more_than_computing_it() -> None:
    """What is to be computed again counts four times, and less than 512 tokens make no difference."""
    for ahead, expected in ((39_000, "a"), (41_000, "b")):
        views = [View("a", tokens_ahead=ahead, boundary=10_000), View("b")]
        assert sent_to(find_policy("resumable"), asked(12_000), views) == expected


def test_two_requests_of_one_new_prefix_go_to_one_replica_unless_it_is_overloaded() -> None:
    for ahead, expected in ((6_000, "a"), (40_000, "b")):
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
    for seed in range(30):
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
