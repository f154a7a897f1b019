"""A small correct cache behind an adapter for the kit, and broken ones: at least one for each thing that is checked.

It has pages of keys and values, and a state at page boundaries, each in a pool of its own, and it runs one pass ahead.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from prefixloom import Path, Point
from prefixloom.testing.foreign.contract import (
    AdaptedComponent,
    ForeignCache,
    NoRoom,
    PassPart,
    PassResult,
    RequestTables,
    SlotContent,
    StateAccess,
    UnitOwners,
)

Key = tuple[str, tuple[int, ...]]


class ListedRequest:
    """A running request: its tokens, its pages, and which of them it owns alone."""

    def __init__(self, namespace: str, tokens: Sequence[int]) -> None:
        self.namespace, self.tokens = namespace, list(tokens)
        self.pages: list[int] = []
        self.own: set[int] = set()
        self.locked: list[Key] = []
        self.state = 0
        self.scheduled = 0
        self.checkpoints: list[tuple[int, int]] = []
        """(boundary, slot) of the states that passes on their way write beside the running one."""


class ListedCache(ForeignCache):
    """A dictionary of pages and one of states, by the whole prefix. The last that were cached go first."""

    ahead = 1

    def __init__(self, device: Any, components: str, page: int, tokens: int, states: int, window: int) -> None:
        self.device, self.page = device, page
        self.with_states = "M" in components
        self.components = [AdaptedComponent("kv", Path(), "pages", page)]
        self.pools = {"pages": range(tokens // page)}
        if self.with_states:
            self.components.append(AdaptedComponent("state", Point(), "states"))
            self.pools["states"] = range(states)
        self.free: dict[str, list[int]] = {name: list(units) for name, units in self.pools.items()}
        self.cached: dict[str, dict[Key, int]] = {name: {} for name in self.pools}
        self.locks: dict[Key, int] = {}
        self.content = SlotContent(self.components)
        self.read, self.write = self.content.read, self.content.write  # type: ignore[method-assign]
        self.running: list[ListedRequest] = []
        self.numbers = itertools.count()

    @classmethod
    def version(cls) -> str:
        return f"listed ({cls.__name__})"

    def read(self, component: str, slot: int) -> int:
        raise NotImplementedError

    def write(self, component: str, slot: int, number: int) -> None:
        raise NotImplementedError

    # ------------------------------------------------------------ room
    def take(self, pool: str, count: int) -> list[int]:
        while len(self.free[pool]) < count:
            gone = next((key for key in reversed(self.cached[pool]) if not self.locks.get(key)), None)
            if gone is None:
                raise NoRoom
            self.free[pool].append(self.cached[pool].pop(gone))
        taken, self.free[pool] = self.free[pool][:count], self.free[pool][count:]
        return taken

    def give(self, pool: str, units: Sequence[int]) -> None:
        self.free[pool] += units

    def evict(self, count: int) -> None:
        for pool, found in self.cached.items():
            for key in [key for key in reversed(found) if not self.locks.get(key)][: -(-count // self.page)]:
                self.give(pool, [found.pop(key)])

    # ------------------------------------------------------------ requests
    def key(self, request: ListedRequest, end: int) -> Key:
        return request.namespace, tuple(request.tokens[:end])

    def lock(self, request: ListedRequest, key: Key) -> None:
        request.locked.append(key)
        self.locks[key] = self.locks.get(key, 0) + 1

    def match(self, request: ListedRequest) -> int:
        hits, best = 0, 0
        while (hits + 1) * self.page < len(request.tokens):
            key = self.key(request, (hits + 1) * self.page)
            if key not in self.cached["pages"]:
                break
            hits += 1
            if not self.with_states or key in self.cached["states"]:
                best = hits
        return best * self.page

    def begin(self) -> None:
        self.making: list[tuple[ListedRequest, int]] = []

    def extend(self, request: ListedRequest, count: int) -> None:
        if request.scheduled < len(request.tokens) and self.with_states:
            whole = (request.scheduled + count) // self.page * self.page
            count = whole - request.scheduled if whole > request.scheduled else count
        need = -(-(request.scheduled + count) // self.page) - len(request.pages)
        taken = self.take("pages", need)
        request.pages += taken
        request.own.update(taken)
        self.making.append((request, count))

    def open(self, tokens: Sequence[int], namespace: str, count: int) -> tuple[Any, int]:
        request = ListedRequest(namespace, tokens)
        hit = request.scheduled = self.match(request)
        for end in range(self.page, hit + 1, self.page):
            self.lock(request, self.key(request, end))
            request.pages.append(self.cached["pages"][self.key(request, end)])
        states: list[int] = []
        try:
            if self.with_states:
                states = self.take("states", 1)
                request.state = states[0]
            self.extend(request, min(count, len(tokens) - hit))
        except NoRoom:
            if self.with_states:
                self.give("states", states)
            self.unlock(request)
            raise
        if self.with_states:
            self.device.run(self.prepared(request, hit))
        self.running.append(request)
        return request, hit

    def prepared(self, request: ListedRequest, hit: int) -> Callable[[], None]:
        source = self.cached["states"].get(self.key(request, hit)) if hit else None
        target = request.state
        return lambda: self.write("state", target, self.read("state", source) if source is not None else 0)

    def launch(self, forward: Callable[[Sequence[tuple[Any, PassPart]]], None]) -> None:
        parts = []
        for request, count in self.making:
            start = request.scheduled
            end = request.scheduled = start + count
            states = {"state": StateAccess(request.state, ((request.state, end),))} if self.with_states else {}
            parts.append((request, PassPart(start, end, {"kv": self.slots(request, end)}, states)))
        forward(parts)
        for request, part in parts:
            if self.with_states and part.end % self.page == 0:
                self.checkpoint(request, part.end)

    def checkpoint(self, request: ListedRequest, boundary: int) -> None:
        """Keep the state at a boundary: the device copies it once it was written."""
        try:
            (slot,) = self.take("states", 1)
        except NoRoom:
            return
        request.checkpoints.append((boundary, slot))
        self.device.run(self.copying(request.state, slot))

    def copying(self, source: int, target: int) -> Callable[[], None]:
        return lambda: self.write("state", target, self.read("state", source))

    def slots(self, request: ListedRequest, end: int) -> list[int]:
        return [request.pages[i // self.page] * self.page + i % self.page for i in range(end)]

    def commit(self, results: Sequence[PassResult]) -> None:
        for result in results:
            request = result.request
            if result.sampled is not None:
                request.tokens.append(result.sampled)
            self.publish(request, result.part.end)
            if result.last:
                self.leave(request)

    def publish(self, request: ListedRequest, end: int) -> None:
        for index in range(end // self.page):
            key, page = self.key(request, (index + 1) * self.page), request.pages[index]
            if page in request.own:
                request.own.remove(page)
                self.lock(request, key)
                if key in self.cached["pages"]:  # somebody else was first: read his page, and give this one back
                    request.pages[index] = self.cached["pages"][key]
                    self.give("pages", [page])
                else:
                    self.cached["pages"][key] = page
        for boundary, slot in [each for each in request.checkpoints if each[0] <= end]:
            request.checkpoints.remove((boundary, slot))
            key = self.key(request, boundary)
            if key in self.cached["states"]:
                self.give("states", [slot])
            else:
                self.cached["states"][key] = slot

    def unlock(self, request: ListedRequest) -> None:
        for key in request.locked:
            self.locks[key] -= 1
        request.locked.clear()

    def leave(self, request: ListedRequest) -> None:
        self.unlock(request)
        self.give("pages", sorted(request.own))
        if self.with_states:
            self.give("states", [request.state, *(slot for _, slot in request.checkpoints)])
        self.running.remove(request)
        self.making = [each for each in self.making if each[0] is not request]

    abort = retract = leave

    # ------------------------------------------------------------ books
    def tables(self, request: ListedRequest) -> RequestTables:
        states = {"state": request.state} if self.with_states else {}
        return RequestTables({"kv": self.slots(request, request.scheduled)}, states)

    def owners(self) -> dict[str, UnitOwners]:
        found = {}
        for pool in self.pools:
            running: dict[Any, list[int]] = {each: sorted(each.own) for each in self.running}
            if pool == "states":
                running = {each: [each.state, *(slot for _, slot in each.checkpoints)] for each in self.running}
            found[pool] = UnitOwners(self.free[pool], list(self.cached[pool].values()), running)
        return found


class ForgetsTheNamespace(ListedCache):
    """Content of one namespace is found in another."""

    def key(self, request: ListedRequest, end: int) -> Key:
        return "", tuple(request.tokens[:end])


class ForgetsTheState(ListedCache):
    """A match looks for pages only, so a request goes on from a state that nobody kept."""

    def match(self, request: ListedRequest) -> int:
        self.with_states, with_states = False, self.with_states
        try:
            return super().match(request)
        finally:
            self.with_states = with_states


class SnapshotsTooEarly(ListedCache):
    """The scheduling thread copies a state when the pass is launched, and not when the pass is over."""

    def checkpoint(self, request: ListedRequest, boundary: int) -> None:
        enqueue, self.device = self.device, _AtOnce()
        try:
            super().checkpoint(request, boundary)
        finally:
            self.device = enqueue


class _AtOnce:
    def run(self, work: Callable[[], object]) -> None:
        work()


class UnlocksTooFar(ListedCache):
    """Who leaves releases the locks of others, too: down to the root and not to its own boundary."""

    def unlock(self, request: ListedRequest) -> None:
        for key in request.locked:
            self.locks[key] = 0
        request.locked.clear()


class LocksNothing(ListedCache):
    """What a running request reads may be evicted."""

    def lock(self, request: ListedRequest, key: Key) -> None:
        pass


class FreesTwice(ListedCache):
    """A stale table names a page that was given back already."""

    def leave(self, request: ListedRequest) -> None:
        request.own.update(request.pages[:1])
        super().leave(request)

    abort = retract = leave


class LosesAState(ListedCache):
    """An abort forgets the running state."""

    def abort(self, request: ListedRequest) -> None:
        super().leave(request)
        if self.with_states:
            self.free["states"].remove(request.state)


class NamesNoSlot(ListedCache):
    """The table of a request has no slot for a token that its layers read."""

    def slots(self, request: ListedRequest, end: int) -> list[int]:
        found = super().slots(request, end)
        return [-1 if i == 2 and end > 6 else slot for i, slot in enumerate(found)]


class RaisesOnRetraction(ListedCache):
    """A call raises that may not raise."""

    def retract(self, request: ListedRequest) -> None:
        raise AssertionError("a lock is below zero")


class NeverHits(ListedCache):
    """All is in order, and nothing ever hits."""

    def match(self, request: ListedRequest) -> int:
        return 0


class HitsByOrder(ListedCache):
    """Pages of a request that another one overtook are not cached: what hits depends on the order."""

    def publish(self, request: ListedRequest, end: int) -> None:
        if request is self.running[0]:
            super().publish(request, end)


class PublishesBeforehand(ListedCache):
    """Pages are cached when they are scheduled, and stay cached if the request leaves before any pass wrote them."""

    gives_up_scheduled = True

    def extend(self, request: ListedRequest, count: int) -> None:
        super().extend(request, count)
        if request.scheduled + count <= len(request.tokens):
            self.publish(request, request.scheduled + count)
