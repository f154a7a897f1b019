"""How the file backend lays out a segment: where payloads and headers stand, and what a scan makes of them."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path
from typing import Any

import attrs
import pytest

from prefixloom.storage import HEADER_BYTES, Checksum, HeaderPlace, Miss, Record, Refused, Stored, encode_header
from prefixloom.testing.laws.storage import ONE, ROOMY, key_of, missed, record_of, same, stored
from prefixloom_hicache import FileBackend
from prefixloom_hicache.file_store.disk import Disk
from prefixloom_hicache.file_store.segment import Segment
from prefixloom_hicache.file_store.segment_format import (
    HEAD_BYTES,
    SegmentHead,
    decode_head,
    header_offset,
    payload_start,
    scan_headers,
)

SEGMENT = 16 << 10


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("segment-*"))


def test_payloads_lie_side_by_side_and_are_found_by_readers_and_later_writers(tmp_path: Path) -> None:
    store = FileBackend(tmp_path / "s", 64 << 20)
    reader = FileBackend(tmp_path / "s", read_only=True, refresh_seconds=0)
    sizes = (70_000, 100, 40_000, 32_768, 7, 1 << 18, 1 << 18, 1 << 18, 3 << 16, 1 << 18)
    begun = []
    for seed, size in enumerate(sizes):
        stored(store, record_of(seed, size))
        same(reader.get([key_of(seed)])[0], record_of(seed, size))
        location = store.locate(key_of(seed))
        assert location is not None and location.payload_at % (4096 if size >= 32_768 else 4) == 0
        begun.append(location.payload_at)
    ends = [begin + size for begin, size in zip(begun, sizes, strict=True)]
    assert begun[7] == ends[6], "no room between those of one size"
    assert all(begin >= end for begin, end in zip(begun[1:], ends[:-1], strict=True))
    assert ends[-1] - sum(sizes) < 1 << 18, "and not much elsewhere"
    store.close()
    store = FileBackend(tmp_path / "s", 64 << 20)
    assert store.status().notes == () and store.status().records == len(sizes)
    for seed, size in enumerate(sizes):
        same(store.get([key_of(seed)])[0], record_of(seed, size))


def test_a_writer_goes_on_in_the_segment_that_the_last_one_wrote_to(tmp_path: Path) -> None:
    store = FileBackend(tmp_path / "s", 8 * SEGMENT, segment_bytes=SEGMENT)
    stored(store, *(record_of(seed, 3000) for seed in range(12)))
    last = store.locate(key_of(11))
    store.close()
    store = FileBackend(tmp_path / "s", 8 * SEGMENT, segment_bytes=SEGMENT)
    assert len(files(tmp_path / "s")) > 2
    stored(store, record_of(12, 40))
    next_ = store.locate(key_of(12))
    assert last is not None and next_ is not None
    assert next_.segment.name == last.segment.name


@pytest.mark.parametrize("segment", [1 << 14, 1 << 20, 64 << 20])
def test_a_payload_starts_behind_the_last_one_and_loses_little(segment: int) -> None:
    for size in (1, 40, 65, 256, 3000, 4096, 5000, 40_000, 1 << 16, 100_000, 1 << 19, 3 << 19, segment // 2):
        at = HEAD_BYTES + 300
        for number in range(20):
            begin = payload_start(at, size, number, segment)
            little = max(8, min(size // 32, segment // 64) if number else segment // 64)
            assert at <= begin <= at + little
            assert number < 2 or begin == at or size % 4096, "those of one size lie side by side"
            at = begin + size
        for at in (segment // 4 + 1, segment // 4 + segment // 32 - 3000, segment // 3):
            assert 0 <= payload_start(at, size, 9, segment) - at <= max(7, size // 32), "beside those of other sizes"
    at = payload_start(HEAD_BYTES + 300, 1 << 19, 1, 64 << 20)
    assert at == 1 << 19, "a few bytes of a segment for large parts of memory"
    for lost, begin in ((2048, 2 << 20), (2049, (2 << 20) - 2048)):
        assert payload_start((2 << 20) - lost, 1 << 16, 9, 64 << 20) == begin, "a 32nd of its size is little"


def test_what_fits_is_not_pushed_out_by_its_alignment() -> None:
    segment = 8 << 20
    room = header_offset(1, segment) - HEAD_BYTES - 304
    for lost in (0, 8, 64, 4096 - 304, 1 << 16, 1 << 18):
        for size in (room - lost, (room - lost) >> 12 << 12, (room - lost) >> 16 << 16):
            start = payload_start(HEAD_BYTES + 300, size, 1, segment)
            assert HEAD_BYTES + 300 <= start <= header_offset(1, segment) - size


def fits(segment: Segment, record: Record) -> bool:
    """Whether the record, behind its fingerprint if the segment has none of it, ends before the headers begin."""
    after, number = segment.payloads_end, segment.count
    known = record.key.fingerprint.digest in segment.fingerprints
    for size in (*([] if known else [len(record.key.fingerprint.text)]), len(record.payload)):
        after = payload_start(after, size, number, segment.size) + size
        number += 1
    return after <= header_offset(number - 1, segment.size)


def test_segments_are_filled_to_where_headers_and_payloads_meet(tmp_path: Path) -> None:
    """Small segments of 16 KiB, filled in many ways: nothing that is there was written over."""
    draw = random.Random(1)
    store = FileBackend(tmp_path / "s", 4 * SEGMENT, segment_bytes=SEGMENT)
    prints = [attrs.evolve(ONE, dtype=f"float{16 + n}") for n in range(5)]
    sizes: dict[int, int] = {}
    least = SEGMENT
    for seed in range(1500):
        sizes[seed] = draw.choice((draw.randrange(1, 300), draw.randrange(1, 3000), 512, 2048, 4096))
        record, before = record_of(seed, sizes[seed], prints[seed % 97 % 5]), store._segments.active
        expected = before is not None and fits(before, record)
        generation = before.head if before is not None else None
        stored(store, record)
        active = store._segments.active
        assert active is not None and (active is before and active.head == generation) == expected
        assert active is not None and active.payloads_end <= header_offset(active.count - 1, SEGMENT)
        least = min(least, header_offset(active.count - 1, SEGMENT) - active.payloads_end)
    assert least < 128, "some were filled"
    store.close()
    store = FileBackend(tmp_path / "s", 4 * SEGMENT, segment_bytes=SEGMENT)
    keys = [key_of(seed, prints[seed % 97 % 5]) for seed in sizes]
    found = store.get(keys)
    assert not store.status().misses.get("corrupt") and sum(isinstance(each, Record) for each in found) > 15
    for seed, each in enumerate(found):
        assert isinstance(each, Miss) or each.payload == record_of(seed, sizes[seed]).payload


def test_of_segments_without_records_the_one_that_was_begun_last_goes_last(tmp_path: Path) -> None:
    store = FileBackend(tmp_path / "s", 3 * SEGMENT, segment_bytes=SEGMENT)
    stored(store, *(record_of(seed, 3000) for seed in range(12)))
    store.delete([key_of(seed) for seed in range(12)])
    segments, begun = store._segments, []
    assert (store.status().records, len(segments.by_name)) == (0, 3)
    for _ in range(6):
        segment = segments.next_to_evict()
        assert segment is not None
        begun.append(segments.recycle(segment))
    assert begun[:3] == begun[3:] and len({*begun}) == 3


def test_the_largest_record_just_fits(tmp_path: Path) -> None:
    store = FileBackend(tmp_path / "s", 2 * SEGMENT, segment_bytes=SEGMENT)
    size = SEGMENT - 2 * HEADER_BYTES - payload_start(HEAD_BYTES + len(ONE.text), 9999, 1, SEGMENT)
    assert store.put([record_of(1, size)]) == (Stored(key_of(1)),)
    same(store.get([key_of(1)])[0], record_of(1, size))
    (answer,) = store.put([record_of(2, size + 1)])
    assert isinstance(answer, Refused) and answer.reason == "size"
    store.close()
    reader = FileBackend(tmp_path / "s", read_only=True)
    same(reader.get([key_of(1)])[0], record_of(1, size))


def test_a_checksum_that_cannot_be_computed_here_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileBackend(tmp_path / "s", ROOMY)
    stored(store, attrs.evolve(record_of(1), checksum=Checksum("xxh3", 1)))
    monkeypatch.setattr("prefixloom.storage.checksum.function", lambda algorithm: None)
    (miss,) = store.get([key_of(1)])
    missed(miss, "format")
    assert isinstance(miss, Miss) and miss.detail.endswith("its checksum is xxh3: install xxhash to read it")


def test_a_scan_for_news_stops_at_the_first_header_that_is_none(tmp_path: Path) -> None:
    store = FileBackend(tmp_path / "s", ROOMY)
    stored(store, *(record_of(seed) for seed in range(40)))
    place = store.locate(key_of(9)).place  # type: ignore[union-attr]
    store.close()
    (file,) = files(tmp_path / "s")
    whole = bytearray(file.read_bytes())
    whole[place.offset] ^= 1
    head = decode_head(whole)
    assert isinstance(head, SegmentHead)
    for resync, numbers in ((False, [*range(10)]), (True, [*range(10), *range(11, 41)])):
        told = scan_headers(lambda size, at: bytes(whole[at : at + size]), head, past_damage=resync)
        assert [each.number for each in told] == numbers


def test_a_header_whose_payload_would_reach_into_it_is_damage() -> None:
    """No store writes such a header, but its checksum may fit."""
    head, record = SegmentHead(1, 1, SEGMENT), record_of(1, 3000)
    latest = header_offset(0, SEGMENT) - 3000
    for start, valid in ((HEAD_BYTES - 1, 0), (HEAD_BYTES, 1), (latest, 1), (latest + 1, 0)):
        header = encode_header(record, HeaderPlace(1, header_offset(0, SEGMENT)), start)
        whole = bytes(header_offset(0, SEGMENT)) + header
        found = list(scan_headers(lambda size, at: whole[at : at + size], head))  # noqa: B023
        assert len(found) == valid, start


def test_headers_are_read_by_the_hundred_and_news_by_the_dozen(tmp_path: Path) -> None:
    store = FileBackend(tmp_path / "s", 8 << 20)
    stored(store, *(record_of(seed) for seed in range(500)))
    store.close()
    (file,) = files(tmp_path / "s")
    whole, sizes = file.read_bytes(), []
    head = decode_head(whole)
    assert isinstance(head, SegmentHead)

    def read(size: int, at: int) -> bytes:
        sizes.append(size // HEADER_BYTES)
        return whole[at : at + size]

    found = list(scan_headers(read, head))
    assert len(found) == 501 and len(sizes) <= 4, "a few reads, and what is free in one more"
    sizes.clear()
    assert list(scan_headers(read, head, 501, found[-1].payload_end, past_damage=False)) == [] and sizes == [16]


def test_a_system_that_reads_and_writes_little_at_a_time_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, write = os.preadv, os.pwrite
    store = FileBackend(tmp_path / "s", ROOMY)
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: write(file, data[:700], at))
    stored(store, record_of(1, 5000))
    monkeypatch.setattr(os, "preadv", lambda file, into, at: read(file, [memoryview(into[0])[:900]], at))
    same(store.get([key_of(1)])[0], record_of(1, 5000))


def test_a_reader_that_saw_a_segment_being_made_reads_it_once_it_is(tmp_path: Path) -> None:
    readers: list[FileBackend] = []

    class Watched(Disk):
        def allocate(self, file: int, size: int) -> None:
            readers.append(FileBackend(tmp_path / "s", read_only=True, refresh_seconds=0))
            super().allocate(file, size)

    store = FileBackend(tmp_path / "s", ROOMY, disk=Watched())
    stored(store, record_of(1))
    (reader,) = readers
    same(reader.get([key_of(1)])[0], record_of(1))
    assert reader.status().notes == ()


def test_a_damaged_header_costs_its_record_and_is_told(tmp_path: Path) -> None:
    store = FileBackend(tmp_path / "s", ROOMY)
    stored(store, *(record_of(seed) for seed in range(5)))
    place = store.locate(key_of(2)).place  # type: ignore[union-attr]
    store.close()
    (file,) = files(tmp_path / "s")
    with file.open("r+b") as open_file:
        open_file.seek(place.offset + 20)
        open_file.write(b"damage")
    store = FileBackend(tmp_path / "s", ROOMY)
    assert store.exists([key_of(seed) for seed in range(5)]) == (True, True, False, True, True)
    assert store.status().notes == ("damaged headers between others: 1",)
    stored(store, record_of(2))
    same(store.get([key_of(2)])[0], record_of(2))


def test_a_short_read_is_not_the_end_of_the_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the writer would write over the records whose headers it did not see."""
    read = os.pread
    store = FileBackend(tmp_path / "s", ROOMY)
    stored(store, *(record_of(seed) for seed in range(200)))
    store.close()
    monkeypatch.setattr(os, "pread", lambda file, size, at: read(file, min(size, 5000), at))
    store = FileBackend(tmp_path / "s", ROOMY)
    stored(store, record_of(200))
    assert all(store.exists([key_of(seed) for seed in range(201)]))


def test_what_is_written_while_a_reader_opens_is_not_taken_for_damage(tmp_path: Path) -> None:
    """A header that was none when it was read may stand in front of one that was read later."""
    store = FileBackend(tmp_path / "s", ROOMY)
    stored(store, *(record_of(seed) for seed in range(5)))
    late = [record_of(seed) for seed in range(5, 40)]

    class Meanwhile(Disk):
        def read(self, file: int, size: int, offset: int) -> bytes:
            content = super().read(file, size, offset)
            if late and size >= HEADER_BYTES and offset + size == ROOMY // 8:  # the first headers
                stored(store, *late)
                late.clear()
            return content

    reader = FileBackend(tmp_path / "s", read_only=True, refresh_seconds=0, disk=Meanwhile())
    assert not late and all(reader.exists([key_of(seed) for seed in range(40)]))
    assert reader.status().notes == ()


@pytest.mark.parametrize("arrives", [0, 100, HEADER_BYTES])
def test_no_reader_misses_what_follows_a_header_that_failed(tmp_path: Path, arrives: int) -> None:
    class Failing(Disk):
        fails = False

        def write(self, file: int, content: Any, offset: int) -> None:
            if self.fails and len(content) == HEADER_BYTES:
                super().write(file, content[:arrives], offset)
                raise OSError(errno.EIO, "Input/output error")
            super().write(file, content, offset)

    disk = Failing()
    store = FileBackend(tmp_path / "s", ROOMY, disk=disk)
    stored(store, record_of(0))
    reader = FileBackend(tmp_path / "s", read_only=True, refresh_seconds=0)
    for seed in (1, 3):
        disk.fails = True
        (answer,) = store.put([record_of(seed)])
        assert isinstance(answer, Refused) and answer.reason == "io"
        reader.exists([key_of(seed)])  # it may find what was refused, and passes over its header
        disk.fails = False
        stored(store, record_of(seed + 1))
        same(reader.get([key_of(seed + 1)])[0], record_of(seed + 1))
    store.close()
    store = FileBackend(tmp_path / "s", ROOMY)
    assert store.exists([key_of(seed) for seed in (0, 2, 4)]) == (True, True, True)
    assert store.status().notes == ()


def test_damage_is_told_until_its_segment_is_used_again(tmp_path: Path) -> None:
    store = FileBackend(tmp_path / "s", 2 * SEGMENT, segment_bytes=SEGMENT)
    stored(store, *(record_of(seed, 40) for seed in range(5)))
    place = store.locate(key_of(2)).place  # type: ignore[union-attr]
    with files(tmp_path / "s")[0].open("r+b") as file:
        file.seek(place.offset + 20)
        file.write(b"damage")
    reader = FileBackend(tmp_path / "s", read_only=True, refresh_seconds=0)
    assert reader.status().notes == ("damaged headers between others: 1",)
    for seed in range(5, 20):
        stored(store, record_of(seed, 3000))
    same(reader.get([key_of(19)])[0], record_of(19, 3000))
    assert reader.status().notes == ()


def test_a_reader_is_told_of_a_head_that_was_damaged(tmp_path: Path) -> None:
    store = FileBackend(tmp_path / "s", ROOMY)
    stored(store, record_of(1))
    reader = FileBackend(tmp_path / "s", read_only=True)
    with files(tmp_path / "s")[0].open("r+b") as file:
        file.seek(20)
        file.write(b"damage")
    (miss,) = reader.get([key_of(1)])
    missed(miss, "corrupt")
    assert isinstance(miss, Miss) and miss.detail.endswith(": the head is not what was written")


@pytest.mark.parametrize("deletes", [True, False])
@pytest.mark.parametrize("at", range(6))
def test_what_goes_while_a_reader_asks_why_it_went_is_not_taken_for_damage(
    tmp_path: Path, at: int, deletes: bool
) -> None:
    store = FileBackend(tmp_path / "s", 2 * SEGMENT, segment_bytes=SEGMENT)
    stored(store, record_of(0, 3000))

    class Meanwhile(Disk):
        left = -1

        def _act(self) -> None:
            if self.left == 0:
                stored(store, *(record_of(seed, 3000) for seed in range(1, 30)))
            self.left -= 1

        def read(self, file: int, size: int, offset: int) -> bytes:
            self._act()
            return super().read(file, size, offset)

        def read_into(self, file: int, buffer: memoryview, offset: int) -> int:
            self._act()
            return super().read_into(file, buffer, offset)

    disk = Meanwhile()
    reader = FileBackend(tmp_path / "s", read_only=True, refresh_seconds=1e9, disk=disk)
    if deletes:
        store.delete([key_of(0)])
    disk.left = at
    (found,) = reader.get([key_of(0)])
    assert isinstance(found, Record) if not deletes and at > 1 else isinstance(found, Miss) and found.reason == "absent"


@pytest.mark.parametrize("others", range(1, 12))
def test_record_written_again_while_it_is_read_is_kept(tmp_path: Path, others: int) -> None:
    """However many records come between, a read of the old place must not forget the new one."""

    class Meanwhile(Disk):
        acts = False

        def read_into(self, file: int, buffer: memoryview, offset: int) -> int:
            if self.acts:
                self.acts = False
                store.put([record_of(seed, 3000) for seed in (*range(1, others), 0)])
            return super().read_into(file, buffer, offset)

    disk = Meanwhile()
    store = FileBackend(tmp_path, 2 * SEGMENT, segment_bytes=SEGMENT, disk=disk)
    stored(store, record_of(0, 3000))
    disk.acts = True
    (found,) = store.get([key_of(0)])
    assert isinstance(found, Record) or found.reason == "absent"
    (again,) = store.get([key_of(0)])
    same(again, record_of(0, 3000))
