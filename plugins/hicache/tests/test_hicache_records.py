"""Headers of records, held against what they are: bytes that nobody changed."""

from __future__ import annotations

import zlib

import attrs

from prefixloom.storage import HEADER_BYTES, Flaw, decode_header, encode_header
from prefixloom.testing.laws.storage import ONE, key_of, record_of


def test_a_header_of_which_any_bit_was_changed_is_a_flaw() -> None:
    header = encode_header(record_of(1))
    assert not isinstance(decode_header(header), Flaw)
    for bit in range(8 * HEADER_BYTES):
        changed = bytearray(header)
        changed[bit // 8] ^= 1 << bit % 8
        assert isinstance(decode_header(changed), Flaw), f"bit {bit % 8} of byte {bit // 8}"


def test_a_name_behind_which_anything_stands_is_a_flaw() -> None:
    """Another program may write this with a checksum that fits."""
    header = bytearray(encode_header(record_of(1)))
    component = record_of(1).component.encode()
    at = header.index(component + bytes(2)) + len(component) + 1
    header[at] = 120
    header[12:16] = zlib.crc32(header[16:], zlib.crc32(header[8:12])).to_bytes(4, "little")
    found = decode_header(header)
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
