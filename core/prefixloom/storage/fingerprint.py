"""Fingerprint: everything beside the tokens that decides what a record's bytes mean.

Two caches may read each other's records only if their fingerprints are equal. It is told in full to a store, so that a
cache which finds nothing can say why.
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
    """Who wrote a record, and how.

    ``shapes``  buffer name -> shape of an entry, from the manifest
    ``layers``  the model's layers that a payload holds
    ``shards``  axis ("tensor", "pipeline", "context") -> (rank, of how many). Leave an axis out over which the
                component is replicated: its ranks then share records
    ``format``  version of what the plugin itself writes into a payload
    """

    model: str
    dtype: str
    page_size: int
    plugin: str
    plugin_version: str
    layout: str = "layer_first"
    weights: str = ""
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = attrs.field(default=(), converter=_shapes)
    layers: tuple[int, ...] = attrs.field(default=(), converter=_layers)
    shards: tuple[tuple[str, tuple[int, ...]], ...] = attrs.field(default=(), converter=_shapes)
    format: int = 1
    text: str = attrs.field(init=False, eq=False, repr=False)
    """The facts as canonical JSON."""
    digest: bytes = attrs.field(init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        facts = {field.name: getattr(self, field.name) for field in _facts()}
        text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
        object.__setattr__(self, "text", text)
        told = hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES, person=b"loom.fingerprint")
        object.__setattr__(self, "digest", told.digest())

    @classmethod
    def read(cls, text: str | bytes) -> Fingerprint | None:
        """The fingerprint that a store told of; None if it is none that this version knows."""
        try:
            facts = json.loads(text)
            found = cls(**facts)
            return found if json.loads(found.text) == facts else None
        except (TypeError, ValueError, RecursionError, AttributeError):
            return None

    def difference(self, there: Fingerprint) -> str:
        """What is different in the other one, in words."""
        told = []
        for field in _facts():
            mine, other = getattr(self, field.name), getattr(there, field.name)
            if mine != other:
                told.append(f"{field.name} is {_plain(other)} there and {_plain(mine)} here")
        return "; ".join(told)


def _plain(value: object) -> str:
    return repr(dict(value)) if isinstance(value, tuple) and value and isinstance(value[0], tuple) else repr(value)


@functools.cache
def _facts() -> tuple[attrs.Attribute[Any], ...]:
    return tuple(field for field in attrs.fields(Fingerprint) if field.init)
