"""Options: what ``kv_connector_extra_config`` may say, checked before anything is made."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any, Literal

import attrs

from prefixloom import CompositionError, parse_memory


def _memory(value: Any) -> int | None:
    return None if value is None else parse_memory(value, "memory")


def _store_capacity(value: Any) -> int | None:
    return None if value is None else parse_memory(value, "store_capacity")


def _staging(value: Any) -> int | None:
    return None if value is None else parse_memory(value, "staging")


def _one_of(*allowed: str) -> Any:
    def check(self: object, field: attrs.Attribute[str], value: object) -> None:
        if value not in allowed:
            raise CompositionError(f"{field.name} is {' or '.join(map(repr, allowed))}, got {value!r}")

    return check


def _whole(self: object, field: attrs.Attribute[int], value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CompositionError(f"{field.name} is a whole number of at least 1, got {value!r}")


def _text(self: object, field: attrs.Attribute[Any], value: object) -> None:
    if value is not None and (not isinstance(value, str) or not value):
        raise CompositionError(f"{field.name} is a text, got {value!r}")


@attrs.frozen(kw_only=True)
class Options:
    """The options of the connector.

    ``memory``          bytes of the host's memory, of all ranks together
    ``blocks``          in its place: how many of vLLM's blocks, of whatever groups
    ``policy``          the order of eviction
    ``load_at_least``   tokens that a load must bring; for less it is quicker to compute
    ``shm``             the folder of the shared memory file
    ``unknown_model``   "refuse": vLLM does not start; "off": it runs without this connector, with one line in the log
    ``store``           the store behind the host's memory: a folder of this engine, or a URL, such as of a server that
                        engines share
    ``store_capacity``  bytes that a folder may have
    ``staging``         bytes of the host's memory that the store's data goes through; a fourth of ``memory`` by default
    ``keep``            what is written to the store
    ``fetch``           how long a prompt waits for the store
    ``weights``         the revision of the weights, where the path of the model does not tell it
    """

    memory: int | None = attrs.field(default=None, converter=_memory)
    blocks: int | None = attrs.field(default=None, validator=attrs.validators.optional(_whole))
    policy: str = "lru"
    load_at_least: int = attrs.field(default=1, validator=_whole)
    shm: str = attrs.field(default="/dev/shm", validator=_text)
    unknown_model: Literal["refuse", "off"] = attrs.field(default="refuse", validator=_one_of("refuse", "off"))
    store: str | None = attrs.field(default=None, validator=_text)
    store_capacity: int | None = attrs.field(default=None, converter=_store_capacity)
    staging: int | None = attrs.field(default=None, converter=_staging)
    keep: str = attrs.field(default="through", validator=_one_of("through", "selective", "back"))
    fetch: str = attrs.field(default="timeout", validator=_one_of("best_effort", "wait", "timeout"))
    weights: str | None = attrs.field(default=None, validator=_text)

    def __attrs_post_init__(self) -> None:
        if (self.memory is None) == (self.blocks is None):
            raise CompositionError(
                'say how much of the host to use, by memory or by blocks: {"memory": "4GiB"} in '
                "kv_connector_extra_config"
            )
        for name in ("store_capacity", "staging"):
            if self.store is None and getattr(self, name) is not None:
                raise CompositionError(f"{name} is for a store, and no store was given")
        if self.store is not None and self.store_is_url == (self.store_capacity is not None):
            raise CompositionError(
                "store_capacity is for a folder: a URL says all of its store"
                if self.store_is_url
                else "a store needs store_capacity, the bytes that it may have"
            )

    @property
    def store_is_url(self) -> bool:
        return self.store is not None and re.match(r"[a-z][a-z0-9+.-]+:", self.store) is not None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Options:
        """Make the options that were given. CompositionError: a name is no option."""
        known = [field.name for field in attrs.fields(cls)]
        for name in given:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                meant = f": did you mean {near[0]!r}?" if near else ""
                raise CompositionError(
                    f"kv_connector_extra_config has {name!r}, which is no option{meant} The options are "
                    f"{', '.join(known)}"
                )
        return cls(**given)
