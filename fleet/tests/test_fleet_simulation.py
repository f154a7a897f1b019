"""Simulated fleets: against the lab's replay, against what can be worked out by hand, and what must always be true."""

from __future__ import annotations

import json
import math
import pickle
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import attrs
import pytest

from prefixloom import ComponentSpec, InputError, PageChain, Profile, ProtocolError, Traffic
from prefixloom.lab import BlockPrompt, LabRequest, Service, Setup, SyntheticTrace
from prefixloom_fleet.routing import POLICIES, ReplicaView, RoutingRequest, find_policy
from prefixloom_fleet.simulation import FleetOutcome, FleetSetup, Outage, RepeatedTrace, StoreSpeed, simulate
from prefixloom_fleet.simulation.fleet_simulation import Fleet
from prefixloom_fleet.simulation.prefix_index import PrefixIndex
from prefixloom_fleet.simulation.shared_store import BytesOfBoundaries, SharedStore

PAGE = 16
KV = {"kv_heads": 1, "k_dim": 4, "v_dim": 4, "dtype": "float32"}
STATES = ComponentSpec("mamba", options={"conv": [4, 4], "recurrent": [4, 4]})
HYBRID = Profile([ComponentSpec("full", options={"layers": [0], **KV}), STATES], page_size=PAGE)
WINDOWED = Profile(
    [*HYBRID.components, ComponentSpec("swa", options={"layers": [1], "window": 64, **KV})], page_size=PAGE
)
SERVICE = Service(prefill=4000, decode=40, max_running=4, chunk=128)


def traffic(seed: int, requests: int = 80) -> SyntheticTrace:
    return SyntheticTrace(Traffic(4, 600, 60, 0.3, chunk=128), users=10, requests=requests, turns=4, think=3, seed=seed)


def setup(full: int = 6000, states: int = 40, swa: int | None = None, **more: Any) -> Setup:
    """Return replicas with so many tokens and states, and with windows if ``swa`` is given."""
    model, windows = (HYBRID, {}) if swa is None else (WINDOWED, {"swa": swa})
    return Setup(model, capacity={"full": full, "mamba": states, **windows}, service=SERVICE, **more)


def holds(outcome: FleetOutcome, total: int) -> None:
    """What must be true of every outcome."""
    assert outcome.requests + outcome.refused + outcome.unanswered == total
    assert sum(outcome.waits.values()) == outcome.requests
    assert outcome.hit + outcome.restored + sum(outcome.missed.values()) == outcome.prompt
    replicas = outcome.as_dict()["replicas"]
    for name in ("requests", "refused", "prompt", "hit", "restored", "computed", "lost", "ideal"):
        assert sum(each[name] for each in replicas) == getattr(outcome, name)
    assert outcome.imbalance >= 1 - 1e-9
    assert outcome.first_token(0.5) <= outcome.first_token(0.9) <= outcome.first_token(1.0)
    json.dumps(outcome.as_dict())


# ---------------------------------------------------------------- one replica


@pytest.mark.parametrize(("number", "routing"), [*enumerate(POLICIES)])
def test_one_replica_is_the_labs_replay_to_the_last_figure(number: int, routing: str) -> None:
    full, outputs = (1600, 2400, 900)[number % 3], ("running", "published")[number % 2]
    one = setup(full, 12, 900, outputs=outputs)
    alone = one.replay(traffic(number))
    fleet = simulate(FleetSetup(one, 1, routing), RepeatedTrace(traffic(number)))
    holds(fleet, 80)
    (replica,) = fleet.replicas
    assert replica.outcome == attrs.evolve(alone, memory=(), cpu=0.0)
    assert (fleet.computed, fleet.multiple, fleet.span) == (alone.computed, alone.multiple, alone.span)
    assert alone.retracted or alone.refused or full > 1600  # memory is short where it is to be


# ---------------------------------------------------------------- whatever happens


class Counting:
    """A policy that counts how often it is asked of each request."""

    def __init__(self, name: str, follows: bool) -> None:
        self.inner, self.asked = find_policy(name, follows=follows), Counter[tuple[str, int, int]]()
        self.views: Sequence[ReplicaView] = ()

    def order(self, request: RoutingRequest, replicas: Sequence[ReplicaView]) -> Sequence[ReplicaView]:
        self.asked[request.namespace, request.count, hash(tuple(request.links))] += 1
        assert len({each.name for each in replicas}) == len(replicas)
        self.views = replicas
        for each in replicas:
            assert each.tokens_ahead >= 0 and each.running >= 0
            assert all(0 <= part <= 1 for part in each.free.values())
        return self.inner.order(request, replicas)


@pytest.mark.parametrize("seed", range(15))
def test_each_request_is_answered_once_whatever_fails_lies_or_is_late(seed: int) -> None:
    chance = random.Random(seed)
    replicas = chance.randrange(1, 6)
    outages, free_from = [], [0.0] * replicas
    for _ in range(chance.randrange(6)):
        place = chance.randrange(replicas)
        if free_from[place] < math.inf:
            at = free_from[place] + chance.uniform(0, 20)
            outages.append(Outage(place, at, chance.choice([0.0, 5.0, 30.0, math.inf])))
            free_from[place] = outages[-1].until
    fleet = FleetSetup(
        setup(
            chance.choice([1500, 4000]), chance.choice([8, 60]), 2000 if seed % 3 == 0 else None, debug=seed % 4 == 0
        ),
        replicas,
        [*POLICIES][seed % len(POLICIES)],
        late=chance.choice([None, 0.0, 2.5]),
        lies=(0,) if seed % 5 == 0 else (),
        outages=tuple(outages),
        store=chance.choice([None, StoreSpeed(10**6), StoreSpeed(10**9, 10**6, 0.01)]),
    )
    trace = RepeatedTrace(traffic(seed), copies=1 + seed % 2)
    policy = Counting(fleet.routing, fleet.late is not None)
    one = simulate(fleet, trace, policy=policy)
    holds(one, 80 * trace.copies)
    assert sum(policy.asked.values()) == 80 * trace.copies + one.resent - one.unanswered
    if not outages:
        assert (one.resent, one.lost, one.unanswered) == (0, 0, 0)
        assert [(each.running, each.tokens_ahead) for each in policy.views] == [(0, 0)] * replicas
    if seed % 4 == 1:
        again = simulate(pickle.loads(pickle.dumps(fleet)), trace)  # as in another process
        assert attrs.evolve(again, cpu=0.0) == attrs.evolve(one, cpu=0.0)  # equal inputs give equal outcomes


def test_what_a_dead_replica_had_is_sent_again_and_what_it_computed_is_lost() -> None:
    """4,000 tokens a second in chunks of 128: after a second the replica has begun with 32 chunks of the prompt."""
    request = LabRequest(0.0, BlockPrompt(range(500), PAGE, 8000), 5)
    fleet = FleetSetup(setup(20000), 1, "resumable", outages=(Outage(0, 1.0, 2.0),))
    outcome = Fleet(fleet, "one").run([request])
    holds(outcome, 1)
    assert (outcome.resent, outcome.lost, outcome.computed) == (1, 32 * 128, 32 * 128 + 8000)
    assert outcome.ideal == 8000  # it is no prompt that was seen before
    assert [(each.name, each.begun, each.died) for each in outcome.replicas] == [
        ("replica 0", 0.0, 1.0),
        ("replica 0, joined again (1)", 3.0, None),
    ]
    assert outcome.first_token(1.0) == 5.0  # two seconds of prompt from when it joined again
    never = Fleet(attrs.evolve(fleet, outages=(Outage(0, 1.0),)), "one").run([request])
    assert (never.requests, never.unanswered, never.resent) == (0, 1, 1)


def test_a_policy_that_names_nobody_is_an_error() -> None:
    class Silent:
        def order(self, request: RoutingRequest, replicas: Sequence[ReplicaView]) -> Sequence[ReplicaView]:
            return []

    with pytest.raises(ProtocolError, match="names no replica"):
        simulate(FleetSetup(setup(), 2, "resumable"), RepeatedTrace(traffic(0)), policy=Silent())


# ---------------------------------------------------------------- what routers know


@pytest.mark.parametrize("late", [0.0, 3.0])
def test_the_index_says_what_each_cache_said_so_many_seconds_ago(late: float) -> None:
    """``peek`` is asked of every cache after each request, and what it said is compared with the index later."""
    caches = [setup(2400, 10, 700).compose() for _ in range(3)]
    index = PrefixIndex(late)
    chance = random.Random(1)
    requests = list(traffic(3, 60))
    links = [PageChain(PAGE).numbers(each.prompt.tokens(), "") for each in requests]
    said: dict[int, list[list[int]]] = {}
    for at, request in enumerate(requests):
        number = chance.randrange(3)
        if at == 0:
            for each, cache in enumerate(caches):
                index.follow(each, cache)
        with caches[number].open(request.prompt.tokens(), leave=1) as sequence:
            while sequence.reserved < request.prompt.count:
                sequence.grow(min(128, request.prompt.count - sequence.reserved))
                with caches[number].step([sequence]) as step:
                    step.run_ops()
                sequence.publish()
        index.poll(number, float(at))
        said[at] = [[cache.peek(each.prompt.tokens()) for each in requests[: at + 1]] for cache in caches]
        then = at - int(late)
        if then in said:
            for place in range(then + 1):
                has, resumes = index.depths(links[place], float(at))
                for each in range(3):
                    assert resumes.get(each, 0) * PAGE == said[then][each][place]
                    assert has.get(each, 0) >= resumes.get(each, 0)
    assert any(any(row) for row in said[59])
    index.drop(0)
    assert all(0 not in found for each in links for found in index.depths(each, 10**6))


def test_requests_go_where_they_resume_as_soon_as_the_router_has_heard_and_by_what_was_sent_before() -> None:
    """Turns of one talk, each long after the one before. The router's own memory is used up by others in between."""
    turns = [LabRequest(20.0 * at, BlockPrompt(range(10 + at), PAGE, PAGE * (10 + at)), 1) for at in range(5)]
    others = [
        LabRequest(20.0 * at + 0.1 * each, BlockPrompt([1000 * at + each + 10], PAGE, PAGE), 1)
        for at in range(5)
        for each in range(1, 41)
    ]
    requests = sorted([*turns, *others], key=lambda request: request.at)
    computed = {}
    for late in (0.0, 50.0):
        outcome = Fleet(FleetSetup(setup(), 2, "prefix", late=late), "turns").run(requests)
        holds(outcome, len(requests))
        computed[late] = outcome.computed - outcome.ideal
    assert computed[0.0] == 0 < computed[50.0]


def test_a_replica_that_lies_gets_what_it_should_not_and_answers_it() -> None:
    shares = []
    for lies in ((), (2,)):
        outcome = simulate(FleetSetup(setup(), 4, "resumable", lies=lies), RepeatedTrace(traffic(5)))
        holds(outcome, 80)
        shares.append([each.outcome.requests if each.outcome else 0 for each in outcome.replicas])
    assert shares[1][2] > 60 > shares[0][2]


@pytest.mark.parametrize("routing", ["prefix", "resumable"])
def test_a_replica_whose_lies_do_not_hit_is_not_believed_for_a_minute(routing: str) -> None:
    """One prompt a second, of which no two are alike: the liar gets 24, and then each replica its part for a minute."""
    requests = [
        LabRequest(float(number), BlockPrompt(range(40 * number, 40 * number + 40), PAGE, 640), 1)
        for number in range(100)
    ]
    lying = FleetSetup(setup(), 4, routing, lies=(2,))
    shares = [
        Fleet(lying, "all different").run(requests[:count]).replicas[2].outcome.requests for count in (24, 84, 100)
    ]
    assert shares == [24, 24 + 60 // 4, 24 + 60 // 4 + 16]


# ---------------------------------------------------------------- the store


def test_what_one_replica_computed_another_reads_from_the_store_if_that_is_sooner() -> None:
    """640 tokens in chunks of 128, the last boundary after 624. A page has 512 bytes, a state 96."""
    first, again = (LabRequest(at, BlockPrompt(range(40), PAGE, 640), 1) for at in (0.0, 10.0))
    size = 39 * 512 + 96
    for bandwidth, reads in ((1e6, True), (size / 0.2, False)):
        store = StoreSpeed(10**6, bandwidth, 0.004)
        outcome = Fleet(FleetSetup(setup(), 2, "round-robin", store=store), "two").run([first, again])
        holds(outcome, 2)
        assert outcome.restored == (624 if reads else 0)
        assert outcome.computed == 640 + (16 if reads else 640)
        assert outcome.read == (size if reads else 0)
        assert outcome.written == 40 * 512 + 6 * 96
        seconds = 0.004 + size / bandwidth + 16 / 4000 if reads else 640 / 4000
        assert outcome.first_token(0.5) == pytest.approx(seconds, rel=0.006)
    small = StoreSpeed(20 * 512, 1e6, 0.004)  # the beginning of the path is kept, and its end is not
    outcome = Fleet(FleetSetup(setup(), 2, "round-robin", store=small), "two").run([first, again])
    assert outcome.restored == 256


def test_the_store_keeps_beginnings_within_its_memory_and_gives_nothing_before_it_is_written() -> None:
    """Random paths of a tree, in chunks of 4 pages: what is stored of each is always a beginning of it."""
    sizes = BytesOfBoundaries(setup().compose())
    for seed in range(20):
        chance, now = random.Random(seed), 0.0
        most = 60 * 512
        store = SharedStore(StoreSpeed(most, 1e5, 0.01), sizes, PAGE)
        paths: list[list[int]] = [[]]
        for _ in range(80):
            path = chance.choice(paths)
            path = [*path[: 4 * chance.randrange(len(path) // 4 + 1)], *(chance.getrandbits(60) for _ in range(12))]
            paths.append(path)
            now += chance.random()
            start = store.deepest(path, 0, now) if chance.random() < 0.7 else 4  # a replica may have what is not stored
            written = store.written
            store.write(path, start, range(start + 4, len(path) + 1, 4), now)
            if (size := store.written - written) > 1e5 * 1e-3:
                assert store.deepest(path, start, now) < len(path)  # it is on its way
                assert store.deepest(path, 0, now + 60) > start or size > most
            there = 0
            for each in paths:
                deepest = store.deepest(each, 0, math.inf)
                there += deepest == len(each)
                for end in range(4, deepest + 1, 4):
                    assert store.deepest(each[:end], 0, math.inf) == end
            assert 0 < there * 4 * 512 <= most
            if end := store.deepest(path, 0, now):
                assert store.take(path, 0, end, now) >= 0.01 + sizes.between(0, end * PAGE) / 1e5


@pytest.mark.parametrize("seed", range(2))
def test_a_fast_store_makes_good_what_round_robin_loses(seed: int) -> None:
    one = setup(6000, 80, 4000)
    without = simulate(FleetSetup(one, 4, "round-robin"), RepeatedTrace(traffic(seed)))
    store = StoreSpeed(10**12, 10**12, 0.0)
    behind = simulate(FleetSetup(one, 4, "round-robin", store=store), RepeatedTrace(traffic(seed)))
    holds(behind, 80)
    assert behind.multiple < 1.25 < 1.5 < without.multiple
    assert behind.first_token(0.9) < without.first_token(0.9)


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: asked(replicas=0), "replicas are a whole number from 1 up, got 0"),
        (lambda: asked(replicas=2.0), "replicas are a whole number from 1 up"),
        (lambda: asked(routing="best"), "routing policies are"),
        (lambda: asked(late=-1.0), "after 0 seconds or more, or never; got -1.0"),
        (lambda: asked(late=math.nan), "or never; got nan"),
        (lambda: asked(lies=(3,)), "replica 3 cannot lie: there are 3"),
        (lambda: asked(outages=(Outage(3, 1.0),)), "replica 3 cannot fail: there are 3"),
        (lambda: asked(outages=(Outage(1, 1.0, 5.0), Outage(1, 3.0))), "fail at second 3: it is away since 1"),
        (lambda: asked(setup=attrs.evolve(setup(), service=None)), "a fleet needs a service"),
        (lambda: Outage(-1, 0.0), "counted from 0"),
        (lambda: Outage(0, -1.0), "dies at a time from 0 on"),
        (lambda: Outage(0, 1.0, -1.0), "for 0 seconds or more"),
        (lambda: Outage.parse("1"), "REPLICA@SECOND"),
        (lambda: Outage.parse("a@1+2"), "REPLICA@SECOND"),
        (lambda: StoreSpeed(0), "a store has a memory"),
        (lambda: StoreSpeed(1, 1.0, -0.1), "a latency from 0 up"),
        (lambda: RepeatedTrace(traffic(0), 0), "copies of a trace"),
        (lambda: RepeatedTrace(traffic(0), 1, 0.0), "speed of a trace"),
    ],
)
def test_what_cannot_be_is_refused(make: Any, expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        make()


def asked(**wrong: Any) -> FleetSetup:
    return FleetSetup(**{"setup": setup(), "replicas": 3, "routing": "prefix", **wrong})


def test_copies_of_a_trace_are_in_order_share_nothing_and_keep_their_pace() -> None:
    trace = RepeatedTrace(traffic(0, 20), copies=3, speed=2.0)
    requests = list(trace)
    assert [each.at for each in requests] == sorted(each.at for each in requests)
    assert Counter(each.namespace for each in requests) == {"": 20, "#1": 20, "#2": 20}
    first = [each.at for each in requests if not each.namespace]
    assert first == [each.at / 2 for each in traffic(0, 20)]
    assert trace.name == "3 x synthetic traffic, 2 times as fast"
