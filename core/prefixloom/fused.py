"""What is known of a composition, and which operations it has functions of its own for.

Caches of one shape, of which the same is known, share them: they know no cache, and stay for as long as the process
runs. What is listed here must not change while a cache lives; what a flush makes anew is looked at again.
"""

from __future__ import annotations

import linecache
import logging
from collections.abc import Iterable
from types import FunctionType
from typing import TYPE_CHECKING, Any

from .flight import Work
from .fusing import Const, Each, Fuser, Items, Row, Thing, Unable
from .hookspecs import HOT_HOOKS
from .lease import Hold
from .queues import Queue
from .sequence import Sequence
from .step import Step
from .straight import is_straight
from .streams import InlineStream
from .tree import places_of

if TYPE_CHECKING:
    from .cache import Cache
    from .lane import Lane

log = logging.getLogger("prefixloom")

OF_CACHE = (
    "_admitting", "_all_closed", "_asks_more", "_attended", "_debug", "_follows", "_insert_hooks", "_lock_hooks",
    "_lookahead", "_match_hooks", "_max_rewind", "_opens_apart", "_page", "_plugin_ops", "_replay", "_retaining",
    "_sequence_class", "_several_near", "_several_states", "_spread", "_step_class", "_thins", "_tracking",
    "_transfer_hooks", "_unshared",
)  # fmt: skip
ROWS = (
    "_closed_lanes", "_coded_lanes", "_in_order", "_lanes", "_near_lanes", "_page_lanes", "_point_lanes", "_sparing",
)  # fmt: skip
OF_LANE = (
    "closed_upward", "dense", "holds", "index", "page", "per_sequence", "replay", "shared", "track_every", "tree_page",
)  # fmt: skip
OF_POOL = ("device",)
OF_POOL_ALONE = ("device", "orderly")
"""The same where there is no tier, whose first copy brings pools in order."""
OF_TREE = ("element_bytes", "kind", "page", "page_bytes", "width")
OPERATIONS = {
    "cache": ("open", "_open_planned", "match", "lease", "_release", "step", "evict", "_evict"),
    "sequence": ("grow", "append", "fill", "commit", "publish", "close"),
    "step": ("__enter__", "run_ops", "__exit__"),
}

made: dict[Any, Made] = {}
"""By shape."""


class Made:
    """The classes of one shape's caches, sequences and steps. ``plain``: operations that had to stay as they are."""

    def __init__(self, known: Known) -> None:
        self.classes: dict[type, type] = {}
        self.plain: list[str] = []
        lanes = [name for name, _ in known.lanes.values()]
        self.fuser = Fuser({"cells": known.places} if known.places else {}, self.classes, tuple(lanes))
        kinds = {"cache": known.cache, "sequence": known.sequence, "step": known.step}
        for thing in kinds.values():
            space = {name: getattr(thing.cls, name) for name in ("__module__", "__qualname__", "__doc__")}
            space |= {"__slots__": (), "_made_of": thing.cls}
            self.classes[thing.cls] = type(thing.cls.__name__, (thing.cls,), space)
        for kind, thing in kinds.items():
            owner = "self" if kind == "cache" else "self._cache"
            for name in OPERATIONS[kind]:
                self._make(thing, name, f"{owner}._lanes", known.name)

    def _make(self, thing: Thing, name: str, lanes: str, of: str) -> None:
        function = self.fuser.member(thing.cls, name)
        what = f"{thing.cls.__name__}.{name}"
        try:
            if not isinstance(function, FunctionType) or not is_straight(function):
                raise Unable("something else was put there")
            text = self.fuser.entry(function, {"self": thing}, lanes)
            filename = f"<{what} of {of}, {len(made) + 1}>"
            code = compile(text, filename, "exec")
        except Unable as error:
            log.info("%s of %s runs as it is written: %s", what, of, error)
            self.plain.append(what)
            return
        except Exception:  # what is there to be faster keeps no cache from being made
            log.warning("%s of %s runs as it is written", what, of, exc_info=True)
            self.plain.append(what)
            return
        linecache.cache[filename] = len(text), None, text.splitlines(True), filename
        exec(code, self.fuser.scope)
        fused = self.fuser.scope.pop(name)
        fused.__qualname__, fused.__module__ = function.__qualname__, function.__module__
        setattr(self.classes[thing.cls], name, fused)


def fuse(cache: Cache) -> None:
    """Have ``cache``, its sequences and its steps run what is made for compositions like its own."""
    plain = vars(type(cache)).get("_made_of")
    if plain is not None:  # something else is known of it by now
        cache.__class__ = plain
        del cache._sequence_class, cache._step_class
    known = Known(cache)
    found = made.get(known.shape)
    if found is None or not found.fuser.holds:
        found = made[known.shape] = Made(known)
    cache._sequence_class = found.classes[Sequence]
    cache._step_class = found.classes[Step]
    cache.__class__ = found.classes[known.cache.cls]


class Known:
    """What is known of a cache; and its ``shape``, which is the same for all caches of which the same is known."""

    def __init__(self, cache: Cache) -> None:
        self._shape: list[Any] = [type(cache), cache._width]
        self.name = cache.composition.name
        self.places = places_of(cache._width) if cache._spread else ()
        self.lanes: dict[Lane, tuple[str, Thing]] = {}
        of_pool = OF_POOL_ALONE if cache._tier is None else OF_POOL
        for lane in cache._lanes:
            self.lanes[lane] = f"lane_{lane.index}", self._of_lane(lane, of_pool)
        for lane, (_, thing) in self.lanes.items():
            thing.known["feeds"] = self._row(lane.feeds)
        known = {
            **self._consts(cache, OF_CACHE),
            **{name: self._row(getattr(cache, name)) for name in ROWS},
            "_flight": self._thing(cache._flight),
            "_inline": Thing(InlineStream, {}, maybe=True),
            "_tier": Const(None) if cache._tier is None else self._thing(cache._tier),
            "_tree": Thing(type(cache._tree), self._consts(cache._tree, OF_TREE)),
        }
        if not cache._validators:
            known["_validators"] = Const(())
        self._shape.append((cache._tier is None, not cache._validators))
        self.cache = Thing(type(cache), known)
        held = Items(tuple(Thing(lane.holds, {}) for lane in cache._lanes))
        lease = Thing(Hold, {"_cache": Thing(type(cache), known, maybe=True), "held": held})
        states = [self.lanes[lane][1] for lane in cache._point_lanes]
        of, holding = (states[0], Thing(cache._point_lanes[0].holds, {})) if len(states) == 1 else (None, None)
        fills = Each(Items((of, holding, None, None)))
        self.sequence = Thing(Sequence, {"_cache": self.cache, "_lease": lease, "_fills": fills})
        begun = Each(Items((self.sequence, None, None)))
        of_step = {"_cache": self.cache, "_work": Thing(Work, {}), "_sequences": Each(self.sequence), "_begun": begun}
        if not (cache._tracking or cache._max_rewind):
            of_step["_tracks"] = Const(())
        if not cache._plugin_ops:
            of_step["_plugins"] = Const(())
        self.step = Thing(Step, of_step)
        self.shape = tuple(self._shape)

    def _consts(self, owner: Any, names: Iterable[str]) -> dict[str, Any]:
        values = {name: getattr(owner, name) for name in names if hasattr(owner, name)}
        self._shape.append((type(owner), tuple((name, type(value), value) for name, value in values.items())))
        return {name: Const(value) for name, value in values.items()}

    def _thing(self, owner: Any) -> Thing:
        self._shape.append(type(owner))
        return Thing(type(owner), {})

    def _row(self, lanes: Iterable[Lane]) -> Row:
        row = tuple(self.lanes[lane] for lane in lanes)
        self._shape.append(tuple(name for name, _ in row))
        return Row(row)

    def _of_lane(self, lane: Lane, of_pool: tuple[str, ...]) -> Thing:
        known = self._consts(lane, OF_LANE)
        for name in ("pool", "live"):
            pool = getattr(lane, name)
            known[name] = Thing(type(pool), {**self._consts(pool, of_pool), "fence": self._thing(pool.fence)})
        for name in ("queue", "slack"):
            kept = getattr(lane, name, None)
            if isinstance(kept, Queue) and not type(kept).__dictoffset__:  # else it may have methods of its own
                known[name] = self._thing(kept)
        tail = getattr(lane, "tail", None)
        if is_straight(tail):
            assert isinstance(tail, FunctionType)
            known["tail"] = Const(tail)
            self._shape.append((tail.__code__, tuple(cell.cell_contents for cell in tail.__closure__ or ())))
        unasked = tuple(name for name in HOT_HOOKS if getattr(lane.hooks, name) is None)
        self._shape.append(unasked)
        known["hooks"] = Thing(type(lane.hooks), {name: Const(None) for name in unasked})
        return Thing(type(lane), known)
