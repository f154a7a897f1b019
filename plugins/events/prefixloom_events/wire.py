"""The form of KV events on the wire: the one of vLLM and SGLang, in msgpack.

A batch is an array ``[ts, events, data_parallel_rank]`` of exactly three, and an event a map that has its class's name
as ``type``. Decoders of other projects know three types and refuse a batch with a fourth. They skip map keys that they
do not know, and groups other than the first. So what is ours goes into further groups and keys.

A message has three frames: the topic, the batch's sequence number in 8 bytes (big-endian), and the batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from prefixloom import InputError, exact_key
from prefixloom.storage import shown_url

PAGES = 0
"""The group of pages that lead to a boundary that can be resumed at. Routers that know full attention alone read it."""
PAGES_KIND = "full_attention"
END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
"""Stands for a sequence number in the message that ends a replay."""
MEDIUMS = {"device": "GPU", "host": "CPU"}
"""By tier, what events call it."""


class BlockStored(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Blocks are cached now. ``token_ids`` are those of all of them, one block after the other.

    ``component`` and ``boundaries`` are ours. ``component``: the group has what this component keeps, whether it can be
    resumed from or not. ``cache_salt`` is a digest (``salt_digest``).
    ``boundaries``: the group has the blocks at whose end a request can resume, which have no
    tokens here since the first group has announced them.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    lookahead_token_ids: list[list[int]] | None = None
    cache_salt: str | None = None
    component: str | None = None
    boundaries: bool = False


class BlockRemoved(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Blocks of one group are not cached any more."""

    block_hashes: list[int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    """Nothing is cached any more, in any group."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True, gc=False):
    """What one message says."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(EventBatch)


def encode_batch(batch: EventBatch) -> bytes:
    return _encoder.encode(batch)


def decode_batch(payload: bytes) -> EventBatch:
    """Read a batch. ``msgspec.MsgspecError`` (a ValueError): these bytes are no batch."""
    return _decoder.decode(payload)


def sequence_bytes(number: int) -> bytes:
    return number.to_bytes(8, "big")


def frames_of(topic: bytes, number: int, payload: bytes) -> tuple[bytes, bytes, bytes]:
    return topic, sequence_bytes(number), payload


def read_frames(frames: Sequence[bytes]) -> tuple[int, bytes] | None:
    """Return the sequence number and the batch of a message; None if it has another form."""
    if len(frames) != 3 or len(frames[1]) != 8:
        return None
    return int.from_bytes(frames[1], "big"), frames[2]


def plain_text(text: str) -> str:
    """Return ``text`` so that it can be encoded: it may have half a surrogate pair."""
    return text.encode("utf-8", "backslashreplace").decode()


def plain_key(key: Any) -> str | bytes | int:
    """Return an extra key that can be encoded: the key as it is, or its text."""
    if type(key) in (bytes, bool) or (type(key) is int and -(1 << 63) <= key < 1 << 64):
        return key  # type: ignore[no-any-return]
    return plain_text(key if type(key) is str else repr(exact_key(key)))


def is_snapshot(events: Iterable[KVEvent]) -> bool:
    """Return whether a batch is a snapshot, which begins with ``AllBlocksCleared``."""
    return isinstance(next(iter(events), None), AllBlocksCleared)


def is_ipv6(endpoint: str) -> bool:
    """Return whether a socket for ``endpoint`` needs IPv6, which ZeroMQ speaks only if its option is set."""
    return endpoint.startswith("tcp://[")


def beside(endpoint: str) -> str:
    """Return the endpoint of replays, if the user names none: the next port."""
    head, _, port = endpoint.rpartition(":")
    if endpoint.startswith("tcp://") and port.isdigit():
        return f"{head}:{int(port) + 1 if int(port) else 0}"
    if endpoint.startswith(("ipc://", "inproc://")):
        return f"{endpoint}.replay"
    raise InputError(f"events take an endpoint such as tcp://127.0.0.1:5557, got {shown_url(endpoint)!r}")
