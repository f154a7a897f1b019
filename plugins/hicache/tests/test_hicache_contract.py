"""What surrounds the stores: how they are offered and found, fingerprints, keys, records and checksums."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import attrs
import pytest

from prefixloom import CompositionError, PageChain, StorageError, encode
from prefixloom.compose.registry import Registry
from prefixloom.storage import (
    HEADER_BYTES,
    MAX_POSITION,
    BackendType,
    Fingerprint,
    Flaw,
    Key,
    Record,
    decode_record,
    encode_header,
)
from prefixloom.storage import checksum as sums
from prefixloom.storage.checksum import Checksum
from prefixloom.storage.contract import opened
from prefixloom.storage.record import key
from prefixloom.testing.laws.storage import ONE, key_of, record_of, same, stored
from prefixloom_hicache import MemoryBackend
from tests.support.names import stable

POINTS = {"memory": "prefixloom_hicache.memory_store", "file": "prefixloom_hicache.file_store.backend"}
REGISTRY = Registry([EntryPoint(f"storage:{name}", value, "prefixloom") for name, value in POINTS.items()])


@pytest.mark.parametrize(("name", "options"), [("memory", {}), ("file", {"directory": "store"})])
def test_the_stores_are_found_by_name_and_opened(name: str, options: dict[str, str], tmp_path: Path) -> None:
    store = opened(REGISTRY.storage(name), **{option: tmp_path / value for option, value in options.items()})
    store.put([record_of(1)])
    assert store.get([key_of(1)]) == (record_of(1),)
    store.close()


def test_what_is_opened_must_be_a_store() -> None:
    with pytest.raises(CompositionError, match="opened a dict without put, exists, status"):
        opened(BackendType("mine", dict))
    with pytest.raises(StorageError, match="capacity must be more"):
        MemoryBackend(10)


# ---------------------------------------------------------------- keys and fingerprints


def test_addresses_are_the_same_in_every_version() -> None:
    """Else a store that was written before is empty."""
    chain = PageChain(16)
    (page,) = chain.pages(encode(range(16)), chain.root("a"))
    (with_image,) = chain.pages(encode(range(16)).keyed([(2, 5, ("cat", 1))]), chain.root("a"))
    assert chain.root("a").hex()[:16] == "78dd24b95223a39f"
    assert [page.hex()[:16], with_image.hex()[:16]] == ["760db07aeb209202", "fc5a3aa635821dc4"]
    assert key(page, "kv", 0, 16, ONE).content.hex()[:16] == "5adc5f3be372cc83"


def test_a_key_depends_on_component_and_span() -> None:
    (link,) = PageChain(16).pages(encode(range(16)), b"")
    made = {key(link, *about, ONE).content for about in (("kv", 0, 16), ("kv2", 0, 16), ("kv", 1, 16), ("kv", 16, 16))}
    assert len(made) == 4
    with pytest.raises(ValueError, match="a digest of 32 bytes"):
        Key(b"short", ONE)


def test_every_fact_of_a_fingerprint_counts_and_comes_back() -> None:
    changes: dict[str, Any] = {"model": "m", "shapes": {"kv": (3,)}, "shards": {"context": (1, 4)}, "layers": [3, 4]}
    for fact, value in changes.items():
        other = attrs.evolve(ONE, **{fact: value})
        assert other.digest != ONE.digest and Fingerprint.read(other.text) == other
        assert ONE.difference(other).startswith(f"{fact} is ")
    same = attrs.evolve(ONE, shapes=[["kv", [2, 64]]])
    assert same.digest == ONE.digest and ONE.difference(same) == ""
    two = [("k", (2,)), ("v", (3,))]
    assert attrs.evolve(ONE, shapes=two) == attrs.evolve(ONE, shapes=two[::-1]), "buffers in any order"


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '{"model": 1}', b"\xff", "[" * 100_000, ONE.text[:-1]])
def test_a_text_that_is_no_fingerprint_is_none(text: str | bytes) -> None:
    assert Fingerprint.read(text) is None


# ---------------------------------------------------------------- records and checksums


@pytest.mark.parametrize(
    "change",
    [
        {"component": ""}, {"component": "x" * 64}, {"component": "a\0b"}, {"layout": "x" * 32}, {"start": 40},
        {"start": -1}, {"payload": b""}, {"payload": memoryview(bytes(16))[::2]},
    ],
    ids=stable,
)  # fmt: skip
def test_a_record_that_cannot_be_is_refused(change: dict[str, Any]) -> None:
    facts = {"key": key_of(1), "component": "kv", "start": 0, "end": 16, "layout": "l", "payload": b"1"} | change
    with pytest.raises(ValueError):
        Record(**facts)


def test_a_payload_of_another_format_is_read_as_bytes() -> None:
    record = attrs.evolve(record_of(1), payload=memoryview(bytes(range(16))).cast("I"), checksum=Checksum.of(b"x"))
    assert len(record.payload) == 16 and record.payload.readonly


def test_the_checksum_goes_by_what_is_installed_and_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    sums.function.cache_clear()
    sums.preferred.cache_clear()
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "xxhash", None)
        assert sums.preferred() == "crc32"
        record = record_of(1)
        frame = encode_header(record) + bytes(record.payload)
        assert decode_record(frame, record.key) == record
        other = attrs.evolve(record, checksum=Checksum("xxh3", 7))
        found = decode_record(encode_header(other) + bytes(other.payload), other.key)
        assert isinstance(found, Flaw) and found.reason == "format" and "install xxhash" in found.detail
        with pytest.raises(ValueError, match="install xxhash"):
            Checksum.of(b"", "xxh3")
    sums.function.cache_clear()
    sums.preferred.cache_clear()
    assert decode_record(frame, record.key) == record, "crc32 is read everywhere"


def test_what_was_put_or_read_last_stays_in_a_memory_store() -> None:
    store = MemoryBackend(4 * (1000 + HEADER_BYTES))
    for seed in range(4):
        stored(store, record_of(seed, 1000))
    same(store.get([key_of(0)])[0], record_of(0, 1000))
    stored(store, record_of(4, 1000))
    assert store.exists([key_of(seed) for seed in range(5)]) == (True, False, True, True, True)


def test_a_record_may_reach_to_the_last_position() -> None:
    record = record_of(1)
    assert attrs.evolve(record, start=0, end=MAX_POSITION).end == MAX_POSITION
    with pytest.raises(ValueError, match="a record's span must be"):
        attrs.evolve(record, start=0, end=MAX_POSITION + 1)
