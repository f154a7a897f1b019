"""Headers and the index of records, held against what they are: bytes that nobody changed, and a dict of dicts."""

from __future__ import annotations

import random
import zlib

import attrs
import pytest

from prefixloom.storage import (
    DELETED,
    HEADER_BYTES,
    MAGIC,
    Flaw,
    HeaderPlace,
    Miss,
    decode_header,
    encode_fingerprint_header,
    encode_header,
)
from prefixloom.testing.laws.storage import ONE, key_of, record_of
from prefixloom_hicache.records.index import RecordIndex

PLACE = HeaderPlace(5, 4096)


@pytest.mark.parametrize("header", [encode_header(record_of(1), PLACE, 64), encode_fingerprint_header(ONE, PLACE, 64)])
def test_a_header_of_which_any_bit_was_changed_is_a_flaw(header: bytes) -> None:
    assert not isinstance(decode_header(header, PLACE), Flaw)
    for bit in range(8 * HEADER_BYTES):
        changed = bytearray(header)
        changed[bit // 8] ^= 1 << bit % 8
        assert isinstance(decode_header(changed), Flaw), f"bit {bit % 8} of byte {bit // 8}"
    deleted = decode_header(header.replace(MAGIC, DELETED, 1), PLACE)
    assert not isinstance(deleted, Flaw) and deleted.deleted


def test_a_name_behind_which_anything_stands_is_a_flaw() -> None:
    """Another program may write this with a checksum that fits."""
    header = bytearray(encode_header(record_of(1), PLACE, 64))
    component = record_of(1).component.encode()
    at = header.index(component + bytes(2)) + len(component) + 1
    header[at] = 120
    header[12:16] = zlib.crc32(header[16:], zlib.crc32(header[8:12])).to_bytes(4, "little")
    found = decode_header(header, PLACE)
    assert isinstance(found, Flaw) and "no record has" in found.detail


def test_a_header_gives_the_record_of_its_key_alone() -> None:
    record = record_of(1)
    header = decode_header(encode_header(record))
    assert not isinstance(header, Flaw)
    assert header.record(record.key, record.payload) == record
    others = [key_of(2), attrs.evolve(record.key, fingerprint=attrs.evolve(ONE, salt="other"))]
    for key in others:
        found = header.record(key, record.payload)
        assert isinstance(found, Flaw) and "another record" in found.detail
    gone = decode_header(encode_header(record).replace(MAGIC, DELETED, 1))
    assert not isinstance(gone, Flaw)
    assert gone.record(record.key, record.payload) == Flaw("corrupt", "the record was deleted")


@pytest.mark.parametrize("seed", range(20))
def test_the_index_is_a_dict_of_dicts(seed: int) -> None:
    rng = random.Random(seed)
    prints = [attrs.evolve(ONE, salt=name) for name in "abc"]
    keys = [attrs.evolve(key_of(number), fingerprint=each) for number in range(3) for each in prints]
    index: RecordIndex[object] = RecordIndex()
    known: dict[tuple[bytes, bytes], object] = {}
    for _ in range(150):
        key = rng.choice(keys)
        at = key.fingerprint.digest, key.content
        what = rng.randrange(4)
        if what == 0:
            index.add_fingerprint(key.fingerprint)
            known[at] = object()
            index.add(*at, known[at])
        elif what == 1:
            assert index.drop(*at) is (known.pop(at, None) is not None)
        elif what == 2:  # an entry that was replaced meanwhile stays
            entry = rng.choice([object(), known.get(at)])
            there = at in known and (entry is None or known[at] is entry)
            assert index.drop(*at, entry) is there
            if there:
                del known[at]
        assert len(index) == len(known)
        for each in keys:
            here = each.fingerprint.digest, each.content
            assert index.find(each) is known.get(here) is index.at(*here)
            if here not in known:
                check_miss(index.missing(each), here, known)
        index.missing(key)
        others = [digest for digest, _ in known if digest != key.fingerprint.digest]
        told = index.foreign()
        assert [int(text.split()[0]) for text in told] == sorted(
            (others.count(digest) for digest in set(others)), reverse=True
        )
        assert all("salt is " in text for text in told)


def check_miss(miss: Miss, here: tuple[bytes, bytes], known: dict[tuple[bytes, bytes], object]) -> None:
    """``fingerprint``: another has this content; or nothing at all was stored under this one, and others have some."""
    digest, content = here
    others = any(other != digest and of == content for other, of in known)
    alone = all(other != digest for other, _ in known) and bool(known)
    assert miss.reason == ("fingerprint" if others or alone else "absent")
