"""Identity: everything beside its tokens that decides what a model leaves in memory for them.

A hit means the same bytes. Equal tokens alone do not promise that: other weights, another adapter or another regime of
positions leave other bytes. So what a cache keeps stands under an identity, which is a part of the namespace of every
key. The namespace is a part of every address in a store and of every hand-over, so these have it too.

An adapter that knows the model derives the identity. Whoever drives a cache without such an adapter states it.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import attrs

from ..errors import CompositionError
from .checks import items, of_type, typed

MARK = "\0"
"""A namespace that begins with it names its identity; any other is a name that the caller chose."""


def _shards(instance: object, field: attrs.Attribute[Any], value: Mapping[Any, Any]) -> None:
    for axis, shard in value.items():
        if len(items(shard, int, f"the shard of axis {of_type(axis, str, 'an axis')!r}")) != 2:
            raise CompositionError(f"the shard of axis {axis!r} is (rank, number of ranks), got {shard!r}")


@attrs.frozen(kw_only=True)
class Identity:
    """What a hit must agree on beside the tokens.

    ``model``      the architecture, and what of its config changes content
    ``weights``    a digest of the weights, or the revision that their owner states
    ``adapters``   the adapters that are active, with their weights
    ``precision``  dtypes, quantization, and the kernels that decide the rounding
    ``positions``  how positions enter, where that is not the same for every prompt
    ``salt``       whatever else the caller keeps apart
    ``shards``     which part of the model this process has: axis -> (rank, number of ranks). It is the same content on
                   every rank, so it is a part of a record's address, and of no namespace
    """

    model: str = attrs.field(default="", validator=typed(str))
    weights: str = attrs.field(default="", validator=typed(str))
    adapters: str = attrs.field(default="", validator=typed(str))
    precision: str = attrs.field(default="", validator=typed(str))
    positions: str = attrs.field(default="", validator=typed(str))
    salt: str = attrs.field(default="", validator=typed(str))
    shards: Mapping[str, tuple[int, int]] = attrs.field(factory=dict, validator=[typed(Mapping), _shards])
    digest: str = attrs.field(init=False, repr=False, eq=False)

    def __attrs_post_init__(self) -> None:
        said = json.dumps(self.facts).encode("utf-8", "surrogatepass")
        object.__setattr__(self, "digest", hashlib.blake2b(said, digest_size=16, person=b"loom.identity").hexdigest())

    @classmethod
    def of(cls, given: object) -> Identity:
        """Return an identity, or make one of a mapping. A name that an identity does not have is refused."""
        if isinstance(given, Identity):
            return given
        if not isinstance(given, Mapping):
            raise CompositionError(f"an identity is an Identity or a mapping of its fields, got {given!r}")
        known = [field.name for field in attrs.fields(cls) if field.init]
        for name in given:
            if name not in known:
                near = difflib.get_close_matches(str(name), known, 1)
                meant = f": did you mean {near[0]!r}?" if near else ""
                raise CompositionError(f"an identity has {', '.join(known)}, and no {name!r}{meant}")
        return cls(**given)

    @property
    def facts(self) -> dict[str, str]:
        """By name, all that content depends on."""
        fields = (field.name for field in attrs.fields(Identity) if field.init and field.name != "shards")
        return {name: getattr(self, name) for name in fields}

    @property
    def unknown(self) -> list[str]:
        """What must be known before content leaves the process, and is not."""
        return [name for name in ("model", "weights") if not getattr(self, name)]

    def difference(self, there: Mapping[str, object]) -> str:
        """Say where another process's ``facts`` differ, in words; empty if it does not."""
        mine = self.facts
        names = [*mine, *(name for name in there if name not in mine)]
        return "; ".join(
            f"{name} is {there.get(name)!r} there and {mine.get(name)!r} here"
            for name in names
            if there.get(name) != mine.get(name)
        )

    def namespace(self, name: str = "") -> str:
        """Return the namespace ``name`` of this identity, under which alone its content is found."""
        return f"{MARK}{self.digest}{MARK}{name}"


def plain_name(namespace: str) -> str:
    """Return the name that the caller chose for a namespace, without the identity."""
    return namespace.split(MARK, 2)[2] if namespace.count(MARK) > 1 and namespace.startswith(MARK) else namespace


def means(given: str, namespace: str) -> bool:
    """Return whether ``given`` means ``namespace``. A plain name means it under every identity."""
    return given == namespace or (not given.startswith(MARK) and given == plain_name(namespace))
