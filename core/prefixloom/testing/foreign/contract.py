"""The contract of an adapter: what the kit must be able to ask of a cache that is not ours.

An adapter drives one cache manager as the scheduler of its engine does, in the same order of calls. It does no checks
of its own. The kit makes up the requests, says what the model samples, runs the forward passes, and knows what every
entry must hold.

Content is a number for each entry: one for each token in each component of pages, one for each state. ``read`` and
``write`` take it from where the engine keeps it, best from the engine's own pools, so that the engine's own copies move
it. Where the engine keeps content out of reach, ``SlotContent`` holds it beside the manager.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import attrs

from ...contract.reach import Reach
from ..inside.memory import STRANGE
from ..schedules.simulated import SimulatedStream

ABSENT = -1
"""In a table of slots: there is no slot for this position."""


class NoRoom(Exception):
    """There are no slots, even after evicting. The engine would let this request wait, or give it up."""


class AdapterUnavailable(ImportError):
    """The engine of this adapter cannot be imported here. The message says why, or what to install."""


@attrs.frozen
class AdaptedComponent:
    """One component of an adapted cache.

    ``reach``: which positions the layers read to compute the token at n, besides that token itself. ``pool``: where its
    slots come from; several components may share a pool. ``entries``: how many entries one unit of the pool holds for
    this component: the tokens of a page, or 1 for a state. Entry i of unit u is slot ``u * entries + i``.
    """

    name: str
    reach: Reach
    pool: str
    entries: int = 1

    @property
    def is_state(self) -> bool:
        return self.reach.unit == "boundary"


@attrs.frozen
class StateAccess:
    """What one forward pass does with a state of one request.

    ``source``: the slot that is read when the layers begin; None if the layers begin with no state. ``writes``: the
    slots that are written, each with the boundary that its content then stands for.
    """

    source: int | None
    writes: tuple[tuple[int, int], ...]


@attrs.frozen
class PassPart:
    """One request's part of a forward pass that computes the tokens [start, end).

    The tables are what the kernels of this pass get: the adapter copies them when it makes the part. ``slots``: for
    each component of pages, the slot of each position before ``end``. ``states``: for each component of states, its
    access.
    """

    start: int
    end: int
    slots: Mapping[str, Sequence[int]]
    states: Mapping[str, StateAccess] = {}


@attrs.frozen
class PassResult:
    """The result of a pass for one request.

    ``sampled``: the token at ``part.end``; None if the prompt goes on there. ``last``: it is the request's last token.
    """

    request: Any
    part: PassPart
    sampled: int | None
    last: bool = False


@attrs.frozen
class RequestTables:
    """Where the content of a running request lies now.

    ``slots``: for each component of pages, the slot of each position. ``states``: for each component of states, the
    slot of the state at the end of what was computed; absent where no such state is kept.
    """

    slots: Mapping[str, Sequence[int]]
    states: Mapping[str, int] = {}


@attrs.frozen
class UnitOwners:
    """Who owns the units of one pool. Every unit is named once, by exactly one owner.

    ``free``: what the allocator hands out next, and what nothing is cached in. ``cached``: what the cache keeps for
    later requests. ``running``: what one running request alone owns, by its handle.
    """

    free: Sequence[int]
    cached: Sequence[int]
    running: Mapping[Any, Sequence[int]] = {}


class ForeignCache(ABC):
    """One cache manager with its pools, driven as its engine's scheduler drives it.

    The constructor takes ``device``, the stream on which forward passes run; ``components``, a word with a letter for
    each kind of memory (F: full attention, S: a sliding window, M: a recurrent state); and small sizes: the tokens of a
    page, tokens and states in all, and the window.
    """

    sets: ClassVar[Sequence[str]] = ("F", "FS", "FM", "FSM")
    """The sets of components that the cache can be made of."""
    page_sizes: ClassVar[Sequence[int]] = (4,)
    ahead: ClassVar[int] = 0
    """How many passes may wait for their result when the next one is made: 1 where the scheduler runs one ahead."""
    mixes: ClassVar[bool] = True
    """Whether one pass may have both chunks of prompts and single sampled tokens."""
    one_chunked: ClassVar[bool] = False
    """Whether at most one request may be midway in its prompt. The next pass then goes on with it."""
    gives_up_scheduled: ClassVar[bool] = False
    """Whether the request that is retracted for room may already stand in the pass that is being made."""

    decodes_together: ClassVar[bool] = False
    """Whether a pass that samples for one request samples for all whose prompts are computed."""
    aborts_at_result: ClassVar[bool] = False
    """Whether a request whose prompt is computed is aborted with its next result, as if that were its last."""

    components: Sequence[AdaptedComponent]
    pools: Mapping[str, Iterable[int]]
    """By name: the units that a pool may hand out."""

    @abstractmethod
    def __init__(
        self, device: SimulatedStream, components: str, page: int, tokens: int, states: int, window: int
    ) -> None: ...

    @classmethod
    @abstractmethod
    def version(cls) -> str:
        """Return the engine's name and version."""

    # requests

    def begin(self) -> None:
        """Begin a forward pass, as the scheduler does. ``extend`` and ``open`` follow, and then ``launch``."""

    @abstractmethod
    def extend(self, request: Any, count: int) -> None:
        """Let a running request go on in this pass, by ``count`` tokens.

        NoRoom: there are no slots for it, even after evicting. The kit gives the request up by ``retract``.
        """

    @abstractmethod
    def open(self, tokens: Sequence[int], namespace: str, count: int) -> tuple[Any, int]:
        """Admit a request to this pass. Return a handle, and the number of tokens that hit.

        The prompt goes on behind the hit by ``count`` tokens, or by as many as are left. At least one is left.
        NoRoom: it cannot be admitted now, and nothing was taken.
        """

    @abstractmethod
    def launch(self, forward: Callable[[Sequence[tuple[Any, PassPart]]], None]) -> None:
        """Hand the pass to the device: all requests that were extended or opened since ``begin``.

        Enqueue on ``device`` what runs before the layers, such as copies. Then call ``forward`` with each request and
        its part: it enqueues the layers. A request for which the engine computes nothing this time has no part.
        """

    @abstractmethod
    def commit(self, results: Sequence[PassResult]) -> None:
        """Take the result of a pass, for each of its requests that is not over.

        A request whose result is ``last`` ends with it, and what it computed is cached. One more pass of it may be
        enqueued already, where the scheduler runs ahead; no result of that comes.
        """

    @abstractmethod
    def abort(self, request: Any) -> None:
        """End a request whose client went away. Its passes may still be enqueued; their results are dropped."""

    @abstractmethod
    def retract(self, request: Any) -> None:
        """Take the slots of a running request to make room. The kit never comes back to this handle."""

    # slots and content

    @abstractmethod
    def evict(self, count: int) -> None:
        """Free the cached content of at least ``count`` tokens and states, or of all there are, as far as it may go."""

    @abstractmethod
    def tables(self, request: Any) -> RequestTables:
        """Return where the content of a running request lies now."""

    @abstractmethod
    def owners(self) -> Mapping[str, UnitOwners]:
        """Return who owns which unit, by pool, from the cache's own books."""

    @abstractmethod
    def read(self, component: str, slot: int) -> int:
        """Return the number that a slot holds."""

    @abstractmethod
    def write(self, component: str, slot: int, number: int) -> None:
        """Let a slot hold a number."""

    def self_check(self) -> None:
        """Run the checks that the engine itself has for its books, if it has any. They raise."""


class SlotContent:
    """Content beside a manager whose pools are out of reach: a number for each slot of each component.

    Components that share a pool share its memory: what one writes into a unit is lost for the others.
    """

    def __init__(self, components: Iterable[AdaptedComponent]) -> None:
        self._components = {each.name: each for each in components}
        self._units: dict[tuple[str, int], tuple[str, dict[int, int]]] = {}

    def read(self, component: str, slot: int) -> int:
        of = self._components[component]
        owner, numbers = self._units.get((of.pool, slot // of.entries), ("", {}))
        return numbers.get(slot % of.entries, STRANGE) if owner == component else STRANGE

    def write(self, component: str, slot: int, number: int) -> None:
        of = self._components[component]
        owner, numbers = self._units.get((of.pool, slot // of.entries), ("", {}))
        if owner != component:
            numbers = {}
            self._units[of.pool, slot // of.entries] = component, numbers
        numbers[slot % of.entries] = number
