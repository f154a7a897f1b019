"""Peers: the cache managers of other engines, which the lab drives with the same trace, at the same bytes.

A peer is a class of ``PeerCache`` that makes the engine's own manager at the size that the engine's own rules give it
for a model and a number of bytes, and calls it as the engine's scheduler does for one request. What overlaps in time,
who waits, and who gives up its room is the lab's, and the same for all sides. No layer runs, and pools hold no bytes.

A peer is named ``module:Class``. Nothing here knows an engine.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

import attrs

from ...contract.composition import Composition, Part
from ...contract.reach import Path, Point, Window
from ...errors import CapacityError, InputError
from ...keys.tokens import Tokens
from ..replay import PoolFigures


class PeerUnavailable(InputError):
    """A peer cannot be imported here. The message is one sentence that says how to get it."""


class NotSized(InputError):
    """A peer cannot serve this model with these bytes. The message says what does not fit."""


class PeerFull(CapacityError):
    """A pool of a peer has no room, even after evicting. Nothing was taken."""

    def __init__(self, pool: str, what: str) -> None:
        super().__init__((), what)
        self.args = (f"{pool}: {what}",)


@attrs.frozen
class MemoryKind:
    """One kind of memory of a model: ``entry_bytes`` for each token, or for each state, in each of ``layers``."""

    name: str
    kind: Literal["path", "window", "state"]
    layers: int
    entry_bytes: int
    window: int = 0

    @property
    def bytes(self) -> int:
        """Of a token or of a state, in all layers."""
        return self.layers * self.entry_bytes


def memory_kinds(composition: Composition) -> tuple[MemoryKind, ...]:
    """Return the kinds of memory of a composed model. InputError: it has one that no peer's driver knows."""
    return tuple(_kind_of(part) for part in composition.parts)


def _kind_of(part: Part) -> MemoryKind:
    manifest, reach = part.manifest, part.reach
    layers = {each.layers for each in manifest.buffers}
    kinds: dict[type, Literal["path", "window", "state"]] = {Path: "path", Window: "window", Point: "state"}
    kind = kinds.get(type(reach))
    if kind is None or len(layers) != 1 or manifest.tokens_per_slot != 1 or manifest.stored_as is not None:
        raise InputError(
            f"component {part.name!r} cannot be given to a peer: the drivers know full attention, sliding windows and "
            f"states, of the same layers in all buffers, each token with its own entry"
        )
    count = len(next(iter(layers)))
    size = sum(each.entry_bytes for each in manifest.buffers)
    return MemoryKind(part.name, kind, count, size // count, reach.w if isinstance(reach, Window) else 0)


@attrs.frozen
class PeerMatch:
    """What a request hit. ``walked``: how far full attention alone was there; ``limited_by``: who allowed no more."""

    hit: int
    walked: int
    limited_by: str | None = None


class PeerCache(ABC):
    """The manager of another engine, at a size.

    The constructor takes the kinds of memory of the model, the bytes for all pools together, the name of a setting,
    and what the engine is told at its start: the most requests that run at once, the tokens of a step, and the tokens
    of the longest request. NotSized: it does not fit.
    """

    settings: ClassVar[Mapping[str, str]]
    """By name, in a few words, what may be chosen of this engine. The first is what it does when nothing is said."""

    grain: int
    """A hit is a multiple of so many tokens."""
    sizing: Sequence[str]
    """Sentences that explain the sizes of the pools."""

    @abstractmethod
    def __init__(
        self, kinds: Sequence[MemoryKind], memory: int, setting: str, *, running: int, chunk: int, longest: int
    ) -> None: ...

    @classmethod
    @abstractmethod
    def version(cls) -> str:
        """Return the engine's name and version."""

    @classmethod
    def settings_of(cls, kinds: Sequence[MemoryKind]) -> tuple[str, ...]:
        """Return the names of those settings that make a difference for such a model, the default first."""
        return tuple(cls.settings)

    @classmethod
    @abstractmethod
    def check_size(cls, kinds: Sequence[MemoryKind], memory: int, setting: str) -> None:
        """Raise NotSized if a cache of this size cannot be made."""

    @abstractmethod
    def holds(self, length: int) -> bool:
        """Return whether a request that comes to ``length`` tokens can run alone."""

    @abstractmethod
    def open(self, tokens: Tokens, namespace: str, end: int) -> tuple[Any, PeerMatch]:
        """Match a prompt and protect what it hits. PeerFull: there is none up to ``end`` now, and nothing changed.

        ``end`` is the end of the prompt, or lies behind it if the request decoded before it gave up its room.
        The request that is returned has ``close()``, when its answer is over, and ``abort()``: both give its room back.
        What it has published stays cached.
        """

    @abstractmethod
    def extend(self, request: Any, count: int) -> int:
        """Compute the next tokens of the prompt, ``count`` or fewer as the engine's own rules say, and publish them.

        Return how many were computed. Behind the prompt, tokens that were decoded before a request gave up its room
        are computed again. PeerFull: nothing changed.
        """

    @abstractmethod
    def decode(self, request: Any, count: int) -> None:
        """Decode ``count`` tokens. They take room, and are not published. PeerFull: nothing changed."""

    @abstractmethod
    def pools(self) -> Mapping[str, PoolFigures]:
        """Return by name what each pool has now: cached is what nobody holds."""

    def states(self) -> int:
        """Return how many states the cache has taken so far; 0 if the model has none."""
        return 0


def find_peer(name: str) -> type[PeerCache]:
    """Return the class ``module:Class`` of a peer.

    InputError: there is none of this name. PeerUnavailable: its engine cannot be imported here.
    """
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ModuleNotFoundError, AttributeError, ValueError) as error:
        raise InputError(f"--beside {name}: {error}") from error
    except ImportError as error:
        raise PeerUnavailable(f"--beside {name}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, PeerCache)):
        raise InputError(f"--beside {name} is {found!r}, and no class of PeerCache")
    return found
