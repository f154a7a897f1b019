"""Plays a script on an adapted cache, as a scheduler with its device would, and checks everything after each operation.

What must hold of every cache:

``content``   whatever a request reads is what its own tokens would have written: after a hit, after eviction by others,
              in passes that run late, and in what a running request keeps
``absent``    nothing that a request reads is missing
``owners``    every slot has one owner: the free list, the cache, or one running request; none has two
``lost``      every slot has an owner; and at the end, when all is evicted, every slot is free
``raised``    no call raises

The operations:

``("open", tokens, namespace, salt)``   a request comes; ``salt`` picks what the model will sample
``("pass", ((n, count), ...))``         the scheduler makes a pass over some requests; prompts go on by ``count`` tokens
``("device",)``                         the device does the next piece of work
``("result",)``                         the result of the oldest pass is processed
``("finish", n)``                       the next token that is sampled for a request is its last
``("abort", n)``, ``("retract", n)``    the client goes away; the scheduler takes the slots
``("evict", count)``                    cached content goes
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import attrs

from ...script import Failure, Op, ScriptError, World, picked, require
from ..schedules.explore import UNTOLD, touch
from ..schedules.simulated import SimulatedStream
from .contract import ABSENT, ForeignCache, NoRoom, PassPart, PassResult, UnitOwners
from .forward import Content, ForeignRequest

MakeForeign = Callable[[SimulatedStream], ForeignCache]
MOST = 4
"""The most requests that are open at once."""
PATIENCE = 30
"""How many passes and results a request may need to come to its end."""
ANSWER = 24
"""The most tokens that the model samples for one request."""
SPARE = 3
"""How many tokens before its last one a request ends, at the latest: more passes of it may be on their way by then."""


def sampled_text(salt: int) -> tuple[int, ...]:
    """Return what the model samples for a request of this salt: few different tokens, so that answers begin alike."""
    chance = random.Random(f"answer {salt}")
    return tuple(chance.randrange(2) for _ in range(ANSWER))


@attrs.define(eq=False)
class LaunchedPass:
    """A pass whose result was not processed yet. ``tick``: the work of the stream that ends it."""

    pieces: list[tuple[ForeignRequest, PassPart]]
    tick: int

    def __str__(self) -> str:
        return " and ".join(f"{request.label} [{part.start}, {part.end})" for request, part in self.pieces)


class ForeignPlayer(World):
    """Performs operations on one adapted cache."""

    def __init__(self, make: MakeForeign, stream: SimulatedStream | None = None) -> None:
        super().__init__()
        self.stream = stream or SimulatedStream("device")
        self.cache = cache = make(self.stream)
        self.content = Content(cache)
        self.requests: list[ForeignRequest] = []
        self.unprocessed: deque[LaunchedPass] = deque()
        self.opened = 0
        self._free: dict[str, set[int]] = {pool: set() for pool in cache.pools}
        self.check()

    def perform(self, op: Op) -> None:
        touch(
            writes=(UNTOLD,)
        )  # the scheduler and its checks read content, so no work of the device commutes with them
        self.does(op[0], lambda: super(ForeignPlayer, self).perform(op))

    def does(self, what: str, call: Callable[[], object]) -> None:
        """Make a call. Failure: it raised, and it should not have."""
        try:
            call()
        except (Failure, NoRoom, ScriptError):
            raise
        except Exception as error:
            told = str(error).strip().splitlines()
            raise Failure("raised", f"{what!r} raised {type(error).__name__}: {told[0] if told else ''}") from error

    # ------------------------------------------------------------ operations
    def pick(self, number: int) -> ForeignRequest | None:
        return picked(self.requests, number)

    def do_open(self, tokens: Sequence[int], namespace: str = "", salt: int = 0) -> None:
        if len(self.requests) < MOST and len(tokens) > 0:
            label = f"request {self.opened}"
            self.opened += 1
            self.requests.append(self.content.request(label, namespace, tokens, sampled_text(salt)))

    def do_pass(self, entries: Sequence[tuple[int, int]]) -> None:
        while len(self.unprocessed) > self.cache.ahead:
            self.do_result()
        chosen = sorted(self._chosen(entries), key=lambda each: not each[0].admitted)  # running requests come first
        going: list[ForeignRequest] = []
        self.cache.begin()
        for request, count in chosen:
            if not request.admitted:
                try:
                    self._admit(request, count)
                    going.append(request)
                except NoRoom:
                    self.count("refused")
            elif self._extended(request, count, going):
                going.append(request)
        if going:
            self.cache.launch(partial(self._launch, going))

    def _extended(self, request: ForeignRequest, count: int, going: list[ForeignRequest]) -> bool:
        """Let a running request go on. If there is no room, a request is retracted: this one, or one of the pass."""
        left = request.prompt - request.scheduled
        while True:
            try:
                self.cache.extend(request.handle, min(count, left) if left > 0 else 1)
                return True
            except NoRoom:
                victim = going.pop() if going and self.cache.gives_up_scheduled else request
                self.count("retracted")
                self._gone(victim, self.cache.retract)
                self._comes_again(victim)
                if victim is request:
                    return False

    def _chosen(self, entries: Sequence[tuple[int, int]]) -> Iterator[tuple[ForeignRequest, int]]:
        """Yield the requests of a pass, by the rules of this scheduler."""
        wanted: dict[int, tuple[ForeignRequest, int]] = {}
        for number, count in entries:
            request = self.pick(number)
            if request is not None and not request.ending:
                wanted.setdefault(id(request), (request, max(1, count)))
        chosen = list(wanted.values())
        midway = [request for request in self.requests if request.midway]
        if self.cache.one_chunked and midway:
            chosen = [each for each in chosen if each[0] in midway] or [(midway[0], MOST)]
        if not self.cache.mixes and chosen:
            chosen = [each for each in chosen if each[0].in_prompt == chosen[0][0].in_prompt]
        if self.cache.decodes_together and chosen and not chosen[0][0].in_prompt:
            chosen = [(each, 1) for each in self.requests if each.admitted and not each.in_prompt]
        chunked = bool(midway)
        for request, count in chosen:
            if self.cache.one_chunked and request.in_prompt and count < request.prompt - request.scheduled:
                if chunked and request not in midway:
                    count = request.prompt  # only one may be midway: the others are computed to their end
                chunked = True
            yield request, count

    def _admit(self, request: ForeignRequest, count: int) -> None:
        tokens = request.text[: request.prompt]
        request.handle, request.hit = self.cache.open(tokens, request.namespace, count)
        request.admitted = True
        request.scheduled = request.ran = request.hit
        said = "%s has %s tokens, and %s hit: at least one must be left to compute"
        require(0 <= request.hit < request.prompt, "raised", said, request.label, request.prompt, request.hit)
        self.count("hit" if request.hit else "miss")
        self.count("tokens that hit", request.hit)

    def _launch(self, requests: list[ForeignRequest], parts: Sequence[tuple[Any, PassPart]]) -> None:
        """Enqueue the layers of a pass."""
        pieces = []
        for handle, part in parts:
            (request,) = [each for each in requests if each.handle is handle]
            said = "%s was computed up to %s, and a pass begins at %s and ends at %s"
            right = part.start == request.scheduled < part.end <= max(request.prompt, part.start + 1)
            require(right, "raised", said, request.label, request.scheduled, part.start, part.end)
            request.scheduled = part.end
            request.ending = request.ending or part.end + SPARE >= len(request.text)
            pieces.append((request, part))

        def layers() -> None:
            self.content.run(pieces)

        self.stream.run(layers)
        self.unprocessed.append(LaunchedPass(pieces, self.stream.tick))
        self.count("passes")

    def raise_late(self) -> None:
        """Raise what failed on the device."""
        for _, error in self.stream.failures:
            raise error

    def do_device(self) -> None:
        """Let the device do its next piece of work."""
        if self.stream.ready:
            self.stream.advance()
            self.raise_late()

    def do_result(self) -> None:
        if not self.unprocessed:
            return
        launched = self.unprocessed.popleft()
        while self.stream.over < launched.tick:
            self.do_device()
        results = []
        for request, part in launched.pieces:
            if not request.over:
                sampled = request.text[part.end] if part.end >= request.prompt else None
                last = request.ending and sampled is not None
                request.known = max(request.known, part.end + 1) if sampled is not None else request.known
                results.append(PassResult(request.handle, part, sampled, last))
                if last:
                    self._leaves(request)
                    self.count("finished")
        self.cache.commit(results)

    def awaits_a_sample(self, request: ForeignRequest) -> bool:
        """Return whether a pass is on its way that samples a token for this request."""
        pieces = [piece for launched in self.unprocessed for piece in launched.pieces]
        return any(each is request and part.end >= request.prompt for each, part in pieces)

    def ask(self, tokens: Sequence[int], namespace: str) -> int:
        """Open a request, compute it and abort it; return how many of its tokens hit."""
        self.apply(("open", tuple(tokens), namespace, 0))
        request = self.requests[-1]
        self.apply(("pass", ((-1, len(tokens)),)))
        while self.unprocessed:
            self.apply(("result",))
        require(request.admitted, "raised", "%s finds no room in an idle cache", request.label)
        if not request.over:
            self.apply(("abort", self.requests.index(request)))
        return request.hit

    def do_finish(self, number: int) -> None:
        """Let a request end with the next token that is sampled for it, in a pass on its way or in a new one."""
        request = self.pick(number)
        if request is None or not request.admitted or request.in_prompt:
            return
        for _ in range(PATIENCE):
            if request.over:
                return
            if self.awaits_a_sample(request):
                request.ending = True
                self.do_result()
            else:
                self.do_pass([(self.requests.index(request), 1)])
        raise Failure("raised", f"{request.label} gets no pass any more, and cannot end")

    def _leaves(self, request: ForeignRequest) -> None:
        request.over = True
        self.requests.remove(request)

    def _gone(self, request: ForeignRequest, call: Callable[[Any], None]) -> None:
        self._leaves(request)
        if request.admitted:
            call(request.handle)

    def _comes_again(self, request: ForeignRequest) -> None:
        """Let a retracted request wait again, with all its tokens that are known as its prompt."""
        known, text = request.known, request.text
        if known + SPARE < len(text):
            again = self.content.request(f"{request.label} again", request.namespace, text[:known], text[known:])
            self.requests.append(again)

    def do_abort(self, number: int) -> None:
        request = self.pick(number)
        if request is None:
            return
        self.count("aborted")
        if self.cache.aborts_at_result and request.admitted and not request.in_prompt:
            self.do_finish(number)
        else:
            self._gone(request, self.cache.abort)

    def do_retract(self, number: int) -> None:
        """Retract a request behind all results, as schedulers that run ahead do: it has no pass that still runs."""
        request = self.pick(number)
        if request is not None and request.admitted and not request.in_prompt:
            while self.unprocessed:
                self.do_result()
            if not request.over:
                self._gone(request, self.cache.retract)
                self.count("retracted")

    def do_evict(self, count: int) -> None:
        self.cache.evict(count)

    # ------------------------------------------------------------ checks
    def check(self) -> None:
        """Check the books, what running requests keep, and overwrite what became free."""
        owners = self.cache.owners()
        for pool in self.cache.pools:
            self._check_owners(pool, owners[pool])
        idle = not self.stream.pending
        for request in self.requests:
            if not request.admitted:
                continue
            tables = self.cache.tables(request.handle)
            over = idle and request.ran == request.scheduled
            for component in self.cache.components:
                name = component.name
                slots = [tables.states[name]] if component.is_state else tables.slots[name][: request.scheduled]
                units = {slot // component.entries for slot in slots if slot != ABSENT}
                both = units & self._free[component.pool]
                require(not both, "owners", "%s has units of %r that are free: %s", request.label, name, sorted(both))
                if component.is_state and over and slots[0] != ABSENT and request.ran:
                    reader = f"{request.label} has its state of {name!r} after {request.ran} tokens"
                    self.content.check(component, slots[0], request.ids[request.ran], reader)
            if over:
                self.content.check_needs(request, request.ran, tables.slots, set())
        self.does("the engine's own check", self.cache.self_check)

    def _check_owners(self, pool: str, owners: UnitOwners) -> None:
        labels = {id(request.handle): request.label for request in self.requests if request.admitted}
        groups = [("the free list", owners.free), ("the cache", owners.cached)]
        groups += [
            (labels.get(id(handle), "a request that is over"), units) for handle, units in owners.running.items()
        ]
        owner: dict[int, str] = {}
        for who, units in groups:
            for unit in units:
                said = "unit %s of %r is owned by %s and by %s"
                require(unit not in owner, "owners", said, unit, pool, owner.get(unit), who)
                owner[unit] = who
        known = set(self.cache.pools[pool])
        strange, lost = owner.keys() - known, known - owner.keys()
        require(not strange, "owners", "%r has owners of units that do not exist: %s", pool, sorted(strange))
        require(not lost, "lost", "%s units of %r have no owner: %s", len(lost), pool, sorted(lost)[:8])
        free = set(owners.free)
        new, self._free[pool] = free - self._free[pool], free
        if new:
            self._poison(pool, new)

    def _poison(self, pool: str, units: set[int]) -> None:
        """Overwrite units that became free, once the passes are over that may still read them."""

        def overwrite() -> None:
            for component in self.cache.components:
                for unit in sorted(units & self._free[pool]) if component.pool == pool else ():
                    self.content.poison(component, unit)

        if self.stream.pending:
            self.stream.run(overwrite)
        else:
            overwrite()

    def finish(self) -> None:
        """End all requests and evict everything: then every slot must be free."""
        while self.unprocessed:
            self.apply(("result",))
        while self.requests:
            self.apply(("abort" if self.requests[0].in_prompt else "finish", 0))
        while self.stream.pending:
            self.apply(("device",))
        most = max(each.entries for each in self.cache.components)
        self.apply(("evict", most * sum(len(set(units)) for units in self.cache.pools.values())))
        owners = self.cache.owners()
        for pool, units in self.cache.pools.items():
            left = set(units) - set(owners[pool].free)
            said = "all requests are over and everything is evicted, and %s units of %r are not free"
            require(not left, "lost", said, len(left), pool)
