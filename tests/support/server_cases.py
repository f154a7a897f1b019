"""The stores on servers as cases of the conformance suite."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

from prefixloom import open_store
from prefixloom.storage import HEADER_BYTES, Backend, Key
from prefixloom.testing.laws.storage import BackendCase

from .store_servers import azure, azure_url, mooncake, mooncake_url, redis, redis_url, s3, s3_url

NUMBERS = itertools.count()


def case_of(name: str, url_of: Callable[[str], str], damage: Any) -> BackendCase:
    """Each store has a prefix of its own. Whoever opens it again comes as another client."""
    urls: dict[int, str] = {}

    def at(url: str) -> Backend:
        store = open_store(url)
        urls[id(store)] = url
        return store

    def reopen(store: Any) -> Backend:
        store.close()
        return at(urls[id(store)])

    def abandon(store: Any) -> Backend:
        return at(urls[id(store)])

    def open_one(capacity: int) -> Backend:
        return at(url_of(f"test-{os.getpid()}-{next(NUMBERS)}"))

    return BackendCase(name, open_one, reopen, abandon, damage, small=0)


def value_name(store: Any, key: Key) -> str:
    return f"{store._prefix}/{key.fingerprint.digest.hex()}/{key.content.hex()}"


def spoiled(content: bytes, at: int, mask: int) -> bytes:
    made = bytearray(content)
    made[HEADER_BYTES + at] ^= mask
    return bytes(made)


def damage_redis(store: Any, key: Key, at: int, mask: int) -> None:
    client, name = store.values.client, value_name(store, key)
    client.set(name, spoiled(client.get(name), at, mask))


def damage_object(store: Any, key: Key, at: int, mask: int) -> None:
    import obstore

    bucket, name = store.values.bucket, value_name(store, key)
    obstore.put(bucket, name, spoiled(bytes(obstore.get(bucket, name).bytes()), at, mask))


def damage_mooncake(store: Any, key: Key, at: int, mask: int) -> None:
    client, name = store.values.client, value_name(store, key)
    assert client.upsert(name, spoiled(client.get(name), at, mask)) == 0


REDIS = case_of("redis", lambda prefix: redis_url(redis(), prefix=prefix, timeout=20), damage_redis)
S3 = case_of("s3", lambda prefix: s3_url(s3(), prefix=prefix, timeout=20), damage_object)
AZURE = case_of("azure", lambda prefix: azure_url(azure(), prefix=prefix, timeout=20), damage_object)
MOONCAKE = case_of("mooncake", lambda prefix: mooncake_url(mooncake(), prefix=prefix), damage_mooncake)
