"""Which prefill replica computes a prompt, and how a process of the fleet learns of them, without a cluster."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Awaitable, Mapping
from typing import Any

import pytest

with warnings.catch_warnings():  # of Ray's own code
    warnings.simplefilter("ignore")
    pytest.importorskip("ray.serve", reason="the extra 'ray' is not installed")

from ray.exceptions import RayError

from prefixloom_fleet.deploy import prefill
from prefixloom_fleet.deploy.calls import RoutedCall
from prefixloom_fleet.deploy.prefill import PrefillReplicas, PrefillRouter
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

        async def answer() -> str:
            if self.asked <= self.fails:
                raise RayError("nobody is there")
            if self.hangs:
                await asyncio.sleep(3600)
            return "one"

        return answer()


def asked(tokens: range) -> RoutingRequest:
    return RoutingRequest(tuple(tokens), len(tokens), 0, "", "", links_of(tokens, ""), PAGE)


async def learned(replicas: PrefillReplicas) -> None:
    for _ in range(200):
        if replicas.known():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("nobody is known")


def test_it_is_asked_until_ray_has_named_them_and_from_then_on_ray_tells_of_itself() -> None:
    async def run() -> None:
        handle = Handle({"b": "tcp://two", "a": "tcp://one", "starts": ""}, fails=3)
        replicas = PrefillReplicas(handle)  # type: ignore[arg-type]
        assert replicas.addresses() == []
        await learned(replicas)
        assert replicas.addresses() == ["tcp://one", "tcp://two"] and handle.asked == 4
        handle.set({"b": "tcp://two", "c": "tcp://three"})
        assert replicas.addresses() == ["tcp://three", "tcp://two"] and handle.asked == 4

    asyncio.run(run())


def test_one_that_hangs_keeps_nobody_from_learning_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "LEARN_SECONDS", 0.05)

    async def run() -> None:
        replicas = PrefillReplicas(Handle({"a": "tcp://one"}, hangs=True))  # type: ignore[arg-type]
        await learned(replicas)
        assert replicas.addresses() == ["tcp://one"]

    asyncio.run(run())


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
