"""Twenty thousand damaged inputs for the readers; a million with ``fuzz_readers.py`` run as a script."""

from __future__ import annotations

import struct
import zlib

import pytest

from prefixloom.storage import MAX_PAYLOAD, MAX_POSITION, Record, checksum, frame
from tests.support import fuzz_readers


def test_no_input_breaks_a_reader_or_is_taken_for_what_it_is_not() -> None:
    ended = fuzz_readers.fuzz(20_000)
    assert sum(ended.values()) == 20_000
    for what in ("try_frame: read", "try_frame: corrupt", "try_frame: format"):
        assert ended[what] > 20, f"hardly any input ended as {what!r}: {ended}"
    reasons = {what.partition(": ")[2] for what in ended if what.startswith(("try_frame", "try_header"))}
    assert reasons == {"read", "corrupt", "format"}


def test_the_fuzz_sees_a_reader_that_trusts_payloads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksum.Checksum, "fits", lambda self, content: True)
    with pytest.raises(AssertionError, match="a payload that nobody wrote"):
        fuzz_readers.fuzz(2000)


def test_the_fuzz_sees_a_reader_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame, "_decode_name", lambda padded: padded.rstrip(b"\0").decode())
    with pytest.raises(AssertionError, match=r"input \d+ broke try_\w+: (UnicodeDecode|Value)Error"):
        fuzz_readers.fuzz(20_000)


@pytest.mark.parametrize("field, what", [(64, "component"), (32, "layout")])
def test_a_name_that_fills_its_field_was_never_written(field: int, what: str) -> None:
    record = fuzz_readers.record_of(1, 40)
    header = bytearray(frame.encode_header(record))
    at = header.index(record.component.encode() if what == "component" else record.layout.encode())
    for length, good in ((field - 1, True), (field, False)):
        header[at : at + field] = (b"x" * length).ljust(field, b"\0")
        header[12:16] = zlib.crc32(header[16:], zlib.crc32(header[8:12])).to_bytes(4, "little")
        found = frame.decode_record(header + record.payload, record.key)
        assert isinstance(found, Record) if good else isinstance(found, frame.Flaw) and found.reason == "corrupt"


LIMITS = [
    ("size", (0,), False), ("size", (1,), True), ("size", (MAX_PAYLOAD,), True), ("size", (MAX_PAYLOAD + 1,), False),
    ("span", (5, 5), True), ("span", (6, 5), False),
    ("span", (0, MAX_POSITION), True), ("span", (0, MAX_POSITION + 1), False),
]  # fmt: skip


@pytest.mark.parametrize(("field", "values", "good"), LIMITS)
def test_a_number_is_read_up_to_its_limit(field: str, values: tuple[int, ...], good: bool) -> None:
    header = bytearray(frame.encode_header(fuzz_readers.record_of(1, 40)))
    at = 16 if field == "size" else 104
    assert struct.unpack_from("<Q", header, at)[0] == (40 if field == "size" else 16)
    struct.pack_into(f"<{len(values)}Q", header, at, *values)
    header[12:16] = zlib.crc32(header[16:], zlib.crc32(header[8:12])).to_bytes(4, "little")
    found = frame.decode_header(header)
    assert isinstance(found, frame.RecordHeader) == good
    assert good or (isinstance(found, frame.Flaw) and found.reason == "corrupt")
