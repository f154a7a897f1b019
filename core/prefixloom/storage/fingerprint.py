"""Fingerprint: everything beside the tokens that decides what a record's bytes mean.

Two caches may read each other's records only if their fingerprints are equal. A store gets the fingerprint in full, so
that a cache which finds nothing can say what is different. This module knows no record and no store.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

DIGEST_BYTES = 16
MAX_TEXT = 1 << 16


def _shapes(values: Mapping[str, Iterable[int]] | Iterable[tuple[str, Iterable[int]]]) -> tuple[Any, ...]:
    pairs = values.items() if isinstance(values, Mapping) else values
    return tuple(sorted((str(name), tuple(int(extent) for extent in shape)) for name, shape in pairs))


def _layers(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(int(layer) for layer in values)


@attrs.frozen
class Fingerprint:
    """Which cache wrote a record, and in what form.

    ``model``, ``weights``, ``adapters``, ``precision``, ``positions`` and ``salt`` are those of an ``Identity``.

    ``layout``  how a payload lies; of a cache's records also the names of the buffers, in the manifest's order
    ``shapes``  buffer name -> shape of an entry, from the manifest
    ``layers``  the numbers of the model's layers that a payload holds
    ``shards``  axis ("tensor", "pipeline", "context") -> (rank, number of ranks). Leave out an axis over which the
                component is replicated: then its ranks share records
    ``format``  version of what the plugin itself writes into a payload
    ``text``    all of these facts as canonical JSON; ``digest``: the hash of the text
    """

    model: str
    dtype: str
    page_size: int
    plugin: str
    plugin_version: str
    layout: str = "layer_first"
    weights: str = ""
    adapters: str = ""
    precision: str = ""
    positions: str = ""
    salt: str = ""
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = attrs.field(default=(), converter=_shapes)
    layers: tuple[int, ...] = attrs.field(default=(), converter=_layers)
    shards: tuple[tuple[str, tuple[int, ...]], ...] = attrs.field(default=(), converter=_shapes)
    format: int = 1
    text: str = attrs.field(init=False, eq=False, repr=False)
    digest: bytes = attrs.field(init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        facts = {field.name: getattr(self, field.name) for field in _facts()}
        text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
        object.__setattr__(self, "text", text)
        hashed = hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES, person=b"loom.fingerprint")
        object.__setattr__(self, "digest", hashed.digest())

    @classmethod
    def read(cls, text: str | bytes) -> Fingerprint | None:
        """Return the fingerprint of a text that a store kept, or None if this version does not know its facts."""
        try:
            facts = json.loads(text)
            found = cls(**facts)
            return found if json.loads(found.text) == facts else None
        except (TypeError, ValueError, RecursionError, AttributeError):
            return None

    def difference(self, there: Fingerprint) -> str:
        """Say what is different in another fingerprint, in words."""
        differences = []
        for field in _facts():
            mine, other = getattr(self, field.name), getattr(there, field.name)
            if mine != other:
                differences.append(f"{field.name} is {_plain(other)} there and {_plain(mine)} here")
        return "; ".join(differences)


def _plain(value: object) -> str:
    return repr(dict(value)) if isinstance(value, tuple) and value and isinstance(value[0], tuple) else repr(value)


@functools.cache
def _facts() -> tuple[attrs.Attribute[Any], ...]:
    return tuple(field for field in attrs.fields(Fingerprint) if field.init)
