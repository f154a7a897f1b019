"""How a process of the fleet learns of its replicas, and which one computes a prompt, without a cluster."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Awaitable, Mapping
from typing import Any

import pytest

with warnings.catch_warnings():  # of Ray's own code
    warnings.simplefilter("ignore")
    pytest.importorskip("ray.serve", reason="Ray is not installed")

from ray.exceptions import RayError

from prefixloom import Buffer, Component, Manifest, Path, compose
from prefixloom_events import EventPublisher
from prefixloom_fleet.deploy import deployed_replicas
from prefixloom_fleet.deploy.calls import RoutedCall
from prefixloom_fleet.deploy.deployed_replicas import DeployedReplicas
from prefixloom_fleet.deploy.prefill import PrefillRouter, addresses
from prefixloom_fleet.knowledge.followed import FollowedEvents
from prefixloom_fleet.knowledge.replicas import TrackedReplicas
from prefixloom_fleet.knowledge.sent_prompts import PAGE, links_of
from prefixloom_fleet.routing.contract import RoutingRequest


class Handle:
    """Ray's handle of a deployment, whose router knows ``replicas``. It does not answer ``fails`` times."""

    def __init__(self, replicas: Mapping[str, str], fails: int = 0, *, hangs: bool = False) -> None:
        self.known = TrackedReplicas(follow=False)
        self.set(replicas)
        self.fails, self.hangs, self.asked = fails, hangs, 0

    def set(self, replicas: Mapping[str, str]) -> None:
        self.known.update((name, {"prefill": address}, {}) for name, address in replicas.items())

    def options(self, **_: Any) -> Handle:
        return self

    def remote(self, call: RoutedCall) -> Awaitable[str]:
        self.asked += 1
        assert call.looks
        if self.asked > self.fails:
            call.known = self.known
            if call.follow:
                self.known.follow_events()

        async def answer() -> str:
            if self.asked <= self.fails:
                raise RayError("nobody is there")
            if self.hangs:
                await asyncio.sleep(3600)
            return "one"

        return answer()


def asked(tokens: range) -> RoutingRequest:
    return RoutingRequest(tuple(tokens), len(tokens), 0, "", "", links_of(tokens, ""), PAGE)


async def learned(replicas: DeployedReplicas) -> None:
    for _ in range(200):
        if replicas.known():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("nobody is known")


def test_it_is_asked_until_ray_has_named_them_and_from_then_on_ray_tells_of_itself() -> None:
    async def run() -> None:
        handle = Handle({"b": "tcp://two", "a": "tcp://one", "starts": ""}, fails=3)
        replicas = DeployedReplicas(handle)  # type: ignore[arg-type]
        assert addresses(replicas.known()) == []
        await learned(replicas)
        assert addresses(replicas.known()) == ["tcp://one", "tcp://two"] and handle.asked == 4
        handle.set({"b": "tcp://two", "c": "tcp://three"})
        assert addresses(replicas.known()) == ["tcp://three", "tcp://two"] and handle.asked == 4

    asyncio.run(run())


def test_one_that_hangs_keeps_nobody_from_learning_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deployed_replicas, "LEARN_SECONDS", 0.05)

    async def run() -> None:
        replicas = DeployedReplicas(Handle({"a": "tcp://one"}, hangs=True))  # type: ignore[arg-type]
        await learned(replicas)
        assert addresses(replicas.known()) == ["tcp://one"]

    asyncio.run(run())


def test_who_waits_knows_what_each_replica_has_cached_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A front takes its first request only then."""
    pages = Component("kv", Manifest([Buffer("content", (), "int64")]), Path())
    cache = compose(None, plugins=[pages], page_size=16, capacity=1024)
    publisher = EventPublisher(cache, "tcp://127.0.0.1:0")
    with cache.open(range(100), leave=1) as sequence:
        sequence.grow(100)
        with cache.step([sequence]) as step:
            step.run_ops()
    assert publisher.flush()

    async def run() -> None:
        handle = Handle({})
        replicas = DeployedReplicas(handle, follow=True)  # type: ignore[arg-type]
        assert not await replicas.heard(0.1), "there is none yet"
        where = {"events": publisher.endpoint, "replay": publisher.replay_endpoint}
        handle.known.update([("one", where, {})])
        assert await replicas.heard(10)
        (one,) = replicas.known()
        assert one.resumable(asked(range(200))) == 96
        monkeypatch.setattr(FollowedEvents, "doubt", "its events were not heard yet")
        assert not await replicas.heard(0.1)
        one.close()

    try:
        asyncio.run(run())
    finally:
        publisher.close()


def test_a_prompt_counts_where_it_is_computed_as_long_as_that_takes() -> None:
    async def run() -> None:
        handle = Handle({"a": "tcp://one", "b": "tcp://two"})
        router = PrefillRouter(handle, "least-loaded", False)  # type: ignore[arg-type]
        with router.chosen(asked(range(100))) as nobody:
            assert nobody == "", "nobody is known yet"
        await learned(router.replicas)
        with router.chosen(asked(range(100))) as first, router.chosen(asked(range(200))) as second:
            assert {first, second} == {"tcp://one", "tcp://two"}
            with router.chosen(asked(range(50))) as third:
                assert third == first
            assert sorted(each.tokens_ahead for each in handle.known.all()) == [100, 200]
        assert [(each.tokens_ahead, each.running) for each in handle.known.all()] == [(0, 0), (0, 0)]
        with router.chosen(RoutingRequest((), 0)) as nothing:
            assert nothing == "", "there is nothing to compute"

    asyncio.run(run())


def test_a_prompt_goes_back_to_where_its_beginning_was_computed() -> None:
    async def run() -> None:
        handle = Handle({"a": "tcp://one", "b": "tcp://two"})
        router = PrefillRouter(handle, "resumable", False)  # type: ignore[arg-type]
        with router.chosen(asked(range(10))):
            await learned(router.replicas)
        homes = []
        for talk in range(4):
            with router.chosen(asked(range(1000 * talk, 1000 * talk + 600))) as home:
                homes.append(home)
        assert set(homes) == {"tcp://one", "tcp://two"}
        for talk in (2, 0, 3, 1):
            with router.chosen(asked(range(1000 * talk, 1000 * talk + 700))) as again:
                assert again == homes[talk]

    asyncio.run(run())
